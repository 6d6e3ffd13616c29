"""Curves of accuracy against bytes, on numbers made by hand."""

import pytest

from simulations.report.byte_curves import ByteCurve, CurvePoint, curve_of, lead, marked_rounds
from simulations.report.runs import Round, Run, Setting


def curve(name, *points):
    return ByteCurve(name, "", tuple(CurvePoint(i + 1, *p) for i, p in enumerate(points)))


OURS = curve("ours", (50, 0.80), (100, 0.90))
SLOW = curve("slow", (1000, 0.5), (2000, 0.9), (3000, 0.95))
FAST = curve("fast", (400, 0.7), (800, 0.91), (1200, 0.85))
NEVER = curve("never", (1, 0.1), (2, 0.89))


def test_bytes_until_an_accuracy_are_those_of_the_first_round_that_has_it():
    assert FAST.bytes_until(0.7) == 400
    assert FAST.bytes_until(0.8) == 800
    # What was reached once was reached, whatever comes later.
    assert FAST.bytes_until(0.9) == 800
    assert NEVER.bytes_until(0.9) is None


def test_the_factor_is_the_cheapest_rivals_bytes_for_the_last_models_accuracy():
    """Of .90 after 100 bytes: slow has it after 2000, fast .91 after 800; 800 / 100 = 8."""
    found = lead(OURS, [SLOW, FAST, NEVER])
    assert (found.rival, found.rival_bytes, found.factor) == ("fast", 800, 8.0)


def test_a_rival_that_is_cheaper_gives_a_factor_below_one():
    assert lead(SLOW, [OURS, curve("tiny", (30, 0.99))]).factor == pytest.approx(30 / 3000)


def test_where_no_rival_is_as_good_there_is_no_factor():
    found = lead(OURS, [NEVER])
    assert (found.rival, found.rival_bytes, found.factor) == (None, None, None)
    assert lead(OURS, []).factor is None


def test_a_curve_adds_up_what_a_node_has_sent_and_skips_rounds_without_a_score():
    """Four nodes: 400, 800 and 400 bytes are 100, 300 and 400 per node in all."""
    rounds = [(0, 0, 0.1), (1, 400, 0.5), (2, 800, None), (3, 400, 0.7)]
    run = Run(
        name="",
        setting=Setting("digits", "labels", 4, "logistic"),
        strategy="",
        label=None,
        seed=0,
        rounds=3,
        accuracy=0.7,
        loss=None,
        bytes_up=1600,
        bytes_down=0,
        messages=None,
        seconds=None,
        nodes_failed=0,
        stopped_because=None,
        history=tuple(Round(n, up, 0, accuracy, ()) for n, up, accuracy in rounds),
    )
    assert curve_of(run, "a", "b").points == (CurvePoint(1, 100, 0.5), CurvePoint(3, 400, 0.7))
    assert curve_of(run, "a", "b").at_its_end().points == (CurvePoint(3, 400, 0.7),)


def test_all_rounds_of_a_short_curve_are_marked_and_few_of_a_long_one():
    points = [CurvePoint(number, number, 0.5) for number in range(1, 131)]
    assert marked_rounds(points[:6]) == [0, 1, 2, 3, 4, 5]
    marked = [points[index].round for index in marked_rounds(points)]
    assert marked == [1, 2, 5, 10, 20, 50, 100, 130]
