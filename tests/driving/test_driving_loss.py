"""The loss of A.4, on numbers that can be worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.errors import OptionError
from simulations.driving.driving_loss import Drive, driving_losses


def test_the_formula_of_the_paper_on_one_track():
    """t_max = 100 s, of the one that finished.

    good: 2 crossings in 100 s, c = 0.02; on the line for 5 s.
    bad: t = 25 s, 2 crossings, c = 0.08 = c_max; on the line for 10 s.
    L(good) = 0.8 · 0 + 0.15 · 0.02 / 0.08 + 0.05 · 5 / 100 = 0.0375 + 0.0025 = 0.04.
    L(bad) = 0.8 · 75 / 100 + 0.15 · 1 + 0.05 · 10 / 25 = 0.6 + 0.15 + 0.02 = 0.77.
    """
    losses = driving_losses(
        {"good": [Drive(100, 2, 5, True)], "bad": [Drive(25, 2, 10, False)]},
    )
    assert losses["good"].total == pytest.approx(0.04)
    assert losses["bad"].total == pytest.approx(0.77)
    assert losses["bad"].time_lost == 0.75


def test_where_nobody_finishes_the_longest_time_is_the_measure():
    losses = driving_losses({"a": [Drive(10, 0, 0, False)], "b": [Drive(40, 0, 0, False)]})
    assert losses["a"].total == pytest.approx(0.8 * 0.75)
    assert losses["b"].total == 0


def test_who_finishes_earlier_because_it_cuts_corners_has_lost_no_time():
    losses = driving_losses({"a": [Drive(97, 0, 0, True)], "b": [Drive(100, 0, 0, True)]})
    assert losses["a"].time_lost == losses["b"].time_lost == 0


def test_several_tracks_are_one_long_drive():
    """t_max = 100 + 60. The second model: 100 (finished) and 20 of 60, so 40 of 160 s are lost.

    Its crossings: 3 in 120 s, on the line for 6 of them. The first has 0: c_max = 3 / 120.
    """
    losses = driving_losses(
        {
            "first": [Drive(100, 0, 0, True), Drive(60, 0, 0, True)],
            "second": [Drive(100, 1, 2, True), Drive(20, 2, 4, False)],
        }
    )
    assert losses["second"].time_lost == pytest.approx(0.25)
    assert losses["second"].crossings == 1
    assert losses["second"].on_line == pytest.approx(0.05)
    assert losses["second"].total == pytest.approx(0.2 + 0.15 + 0.0025)


def test_a_car_that_was_never_on_the_road_has_the_worst_time_and_line():
    losses = driving_losses({"none": [Drive(0, 0, 0, False)], "good": [Drive(9, 0, 0, True)]})
    assert losses["none"].total == pytest.approx(0.85)


# Times are whole steps of the simulator, 50 a second.
drives = st.builds(
    lambda steps, share, c, done: Drive(steps / 50, c, share * steps / 50, done),
    st.integers(0, 25_000),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(0, 50),
    st.booleans(),
)


@given(st.lists(st.tuples(drives, drives, drives), min_size=1, max_size=4))
def test_every_loss_lies_between_0_and_1(tracks):
    by_model = {name: [track[i] for track in tracks] for i, name in enumerate("abc")}
    for loss in driving_losses(by_model).values():
        assert 0 <= loss.total <= 1 + 1e-12


def test_models_of_different_tracks_are_not_compared():
    with pytest.raises(OptionError, match="same tracks"):
        driving_losses({"a": [Drive(1, 0, 0, True)], "b": []})
    with pytest.raises(OptionError, match="same tracks"):
        driving_losses({})


def test_an_impossible_drive_is_refused():
    with pytest.raises(OptionError, match="on_line_seconds"):
        Drive(1.0, 0, 2.0, False)
