"""The live view says what happens, fits the terminal, and leaves logs free of control signs."""

import io
import logging
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from conftest import initial_arrays, record_equal, toy_app
from gems_flwr import FedAvg, LiveView
from gems_flwr.errors import Failure, RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import Traffic
from gems_flwr.server.state import RoundRecord
from gems_flwr.tracking.live_picture import LivePicture, amount, clock, cut, shares, sparkline
from gems_flwr.tracking.live_state import LiveState


def record(number, nodes=5, failed=0, name="{}", why="no reply within 60 s", **metrics):
    names = tuple(name.format(node) for node in range(nodes))
    return RoundRecord(
        number,
        seconds=0.25,
        nodes_asked=names,
        nodes_answered=names[failed:],
        failures=tuple(Failure(node, why) for node in names[:failed]),
        traffic=Traffic(14_745 * nodes, 14_530 * nodes, nodes, nodes),
        **metrics,
    )


def scored(number, **options):
    metrics = {"accuracy": 1 - math.exp(-number / 9), "loss": 2.3 * math.exp(-number / 9)}
    return record(number, server_metrics=metrics, **options)


def state_of(*records, rounds=20, title="gems rank=20"):
    state = LiveState(title)
    state.start(rounds, records[:1])
    for each in records[1:]:
        state.add(each)
    return state


def drawn(state, width=80, height=30, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height)
    console.print(LivePicture(state))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_the_picture_has_rounds_nodes_bytes_and_scores():
    """5 nodes of 14,745 bytes up in 12 rounds: 884.7 kB; two of them and one error have come."""
    state = state_of(scored(0, nodes=0), *(scored(n, failed=n == 6) for n in range(1, 13)))
    state.exchange(13, 5)
    for usable in (True, True, False):
        state.reply(usable)
    text = drawn(state)
    assert "gems rank=20" in text
    assert "round 13 of 20" in text
    assert "885 kB up · 872 kB down" in text
    assert "●●✗··  2 answered · 2 waiting · 1 failed" in text
    assert "round 6, node 0: no reply within 60 s" in text
    [row] = [line.split() for line in text.splitlines() if line.strip().startswith("12 ")]
    assert row == ["12", "5/5", "–", "73.7", "kB", "72.7", "kB", "0.25", "0.6063", "0.7364"]
    assert "0.0000 → 0.7364" in text
    assert all(cell_len(line) <= 80 for line in text.splitlines())


HARD = {
    "a thousand nodes": lambda: state_of(
        scored(0, nodes=0), *(scored(n, nodes=1000, failed=3, name="ward-{}") for n in (1, 2))
    ),
    "long names": lambda: state_of(
        scored(0, nodes=0),
        scored(
            1,
            failed=2,
            name="Ward 宮殿 [bold]of[/bold] St. Mary {0} " * 9,
            why="Why?\x1b[2J\n" * 99,
        ),
        title="strategy with [red]many[/red] options " * 9,
    ),
    "no metric": lambda: state_of(record(0, nodes=0), record(1), record(2)),
    "several models": lambda: state_of(
        scored(0, nodes=0),
        record(1, server_metrics={f"accuracy/{'task' * 9}-{n}": 0.5 for n in range(40)}),
    ),
    "not a number": lambda: state_of(
        *(record(n, server_metrics={"loss": math.nan}) for n in (0, 1))
    ),
    "nothing yet": lambda: state_of(record(0, nodes=0), rounds=1),
    "a stream": lambda: state_of(
        scored(0, nodes=0),
        *(record(n, train_metrics={"in_place_accuracy": n / 5000}) for n in range(1, 5000)),
        rounds=10_000,
    ),
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_every_terminal(kind, width):
    state = HARD[kind]()
    state.exchange(9999, 1000)
    for number in range(500):
        state.reply(number != 7)
    for height in (10, 24):
        text = drawn(state, width, height)
        assert all(cell_len(line) <= width for line in text.splitlines())
        assert len(text.splitlines()) <= max(height, 14)
        assert "\x1b" not in text  # what a node wrote cannot steer the terminal


def test_names_are_text_and_no_markup():
    text = drawn(state_of(scored(0, nodes=0), scored(1, failed=1, name="[bold]{}[/bold]")))
    assert "node [bold]0[/bold]: no reply" in text


def test_a_terminal_without_unicode_gets_plain_signs():
    state = state_of(scored(0, nodes=0), scored(1))
    state.exchange(2, 4)
    state.reply(True)
    text = drawn(state, encoding="ascii")
    assert "#..." in text.replace(" ", "")


def test_what_is_measured_now_and_then_gives_way_to_what_most_rounds_have():
    often = [record(n, train_metrics={"in_place_accuracy": 0.5}) for n in range(1, 9)]
    assert state_of(scored(0), *often).followed("score") == "in_place_accuracy"
    assert state_of(scored(0), *map(scored, range(1, 9))).followed("score") == "accuracy"
    nodes = [record(n, evaluate_metrics={"eval_acc": 0.5, "num": 1.0}) for n in range(3)]
    assert state_of(*nodes).followed("score") == "eval_acc"
    assert state_of(*nodes).followed("loss") is None


@given(st.lists(st.integers(0, 2000), min_size=3, max_size=3), st.integers(0, 60))
def test_signs_for_nodes_fit_and_none_that_failed_is_hidden(counts, room):
    parts = shares(counts, room)
    assert sum(parts) <= room
    if sum(counts) <= room:
        assert parts == counts
    elif room >= 3:
        assert sum(parts) == room
        assert all(bool(part) == bool(count) for part, count in zip(parts, counts, strict=True))


@given(st.lists(st.floats(), max_size=200), st.integers(0, 60))
def test_a_sparkline_is_as_wide_as_it_may_be(values, width):
    finite = [value for value in values if math.isfinite(value)]
    assert len(sparkline(values, width)) == min(len(finite), width)


def test_a_sparkline_shows_low_and_high_and_ends_with_the_last():
    line = sparkline([*np.linspace(0, 1, 1000), 0.0], 40)
    assert (line[-1], max(line)) == ("▁", "█")


@given(st.text(), st.integers(1, 50))
def test_text_is_cut_to_the_width_that_there_is(text, width):
    assert cell_len(cut(text, width)) <= width


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "0 B"), (999, "999 B"), (14_745, "14.7 kB"), (999_600, "1 MB"), (4.8e9, "4.8 GB")],
)
def test_bytes_are_said_in_three_digits(size, said):
    assert amount(size) == said


@pytest.mark.parametrize(("seconds", "said"), [(8.4, "8 s"), (125, "2:05"), (3725, "1:02:05")])
def test_durations_are_said_as_a_clock_does(seconds, said):
    assert clock(seconds) == said


# --- as a callback ---------------------------------------------------------------------------


def watched(console, behaviours=None, **options):
    view = LiveView("four wards", console=console, every_seconds=0)
    strategy = FedAvg(callbacks=[view], **options)
    grid = InProcessGrid(toy_app(behaviours), 4)
    return strategy.start(grid, initial_arrays(), num_rounds=3)


def refuse(message, context):
    raise ValueError("out of order")


def test_in_a_log_there_is_a_line_for_a_round_and_no_control_sign():
    file = io.StringIO()
    result = watched(Console(file=file), {2: refuse})
    lines = file.getvalue().splitlines()
    assert lines[0] == "four wards: 3 rounds"
    assert len(lines) == 5
    each = result.history[1].traffic
    assert lines[1].startswith("round 1 of 3: 4 of 4 answered, 1 left out (node 2: ")
    assert "out of order" in lines[1]
    assert f"{amount(each.bytes_up)} up, {amount(each.bytes_down)} down" in lines[1]
    assert "train loss 0." in lines[1]
    assert lines[-1].startswith("four wards: all rounds are done after ")
    assert all(line.isprintable() for line in lines)


def test_in_a_log_quick_rounds_do_not_fill_it():
    file = io.StringIO()
    view = LiveView(console=Console(file=file), every_seconds=1e9)
    grid = InProcessGrid(toy_app(), 4)
    FedAvg(callbacks=[view]).start(grid, initial_arrays(), num_rounds=50)
    rounds = [line.split(":")[0] for line in file.getvalue().splitlines()[1:-1]]
    assert rounds == ["round 1 of 50", "round 50 of 50"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_the_last_picture_stays_and_the_cursor_comes_back():
    file = Terminal()
    result = watched(Console(file=file, force_terminal=True, width=80, height=30))
    text = file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    last = text[text.rindex("four wards") :]
    assert "round 3 of 3" in last
    assert "all rounds are done" in last
    traffic = result.traffic
    assert f"{amount(traffic.bytes_up)} up · {amount(traffic.bytes_down)} down" in last


def test_a_run_that_fails_gives_the_terminal_and_the_log_back():
    handler = logging.StreamHandler(sys.__stderr__)
    logging.getLogger("flwr").addHandler(handler)
    file, streams = Terminal(), (sys.stdout, sys.stderr)
    with pytest.raises(RoundFailedError):
        watched(Console(file=file, force_terminal=True), dict.fromkeys(range(4), refuse))
    assert (sys.stdout, sys.stderr) == streams
    assert handler.stream is sys.__stderr__
    assert "\x1b[?25h" in file.getvalue()
    assert "ended by an error" in file.getvalue()


def test_watching_changes_nothing():
    alone = FedAvg().start(InProcessGrid(toy_app(), 4), initial_arrays(), num_rounds=3)
    seen = watched(Console(file=Terminal(), force_terminal=True))
    assert record_equal(alone.arrays, seen.arrays)
    assert alone.traffic == seen.traffic
