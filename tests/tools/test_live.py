"""The live view shows what happens, fits the terminal, and leaves logs free of control signs."""

import io
import logging
import math
import sys

import pytest
from rich.console import Console

from conftest import initial_arrays, record_equal, toy_app
from gems_flwr import FedAvg, InProcessGrid
from gems_flwr.core import RoundRecord, Traffic
from gems_flwr.errors import Failure, RoundFailedError
from gems_flwr.tools import LiveView
from gems_flwr.tools.live import followed


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(number, nodes=5, failed=0, name="{}", why="no reply within 60 s", **metrics):
    names = tuple(name.format(node) for node in range(nodes))
    return RoundRecord(
        number,
        nodes_asked=names,
        nodes_answered=names[failed:],
        failures=tuple(Failure(node, why) for node in names[:failed]),
        traffic=Traffic(14_745 * nodes, 14_530 * nodes, nodes, nodes),
        **metrics,
    )


def shown(records, file=None, **options):
    file = file or io.StringIO()
    view = LiveView("wards", console=Console(file=file, **options))
    view.every_seconds = 0
    view.on_start("FedAvg", 20, 0)
    for each in records:
        view.on_round_end(each)
    view.on_error(KeyboardInterrupt())
    return file.getvalue()


def test_a_line_has_rounds_nodes_bytes_and_scores():
    """5 nodes of 14,745 bytes up in 12 rounds: 884.7 kB."""
    metrics = {"accuracy": 0.75, "loss": 0.5, "by_class": [1.0]}
    lines = shown([record(n, server_metrics=metrics) for n in range(1, 13)]).splitlines()
    expected = "5/5 nodes · 884.7 kB up, 871.8 kB down · accuracy 0.75 · loss 0.5"
    assert lines[12] == f"round 12 of 20: {expected}"
    assert lines[-1].startswith("wards: interrupted · 884.7 kB up")


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_node_wrote_is_text_and_is_cut(terminal):
    name = "Ward 宮殿 [bold]of[/bold] {0} "
    hostile = record(1, failed=2, name=name, why="Why?\x1b[2J\n" * 99)
    text = shown([hostile, record(2, server_metrics={"loss": math.nan})], force_terminal=terminal)
    assert "\x1b[2J" not in text
    assert "[bold]of[/bold]" in text
    assert len(text) < 3000
    if not terminal:
        assert all(line.isprintable() for line in text.splitlines())


def test_the_servers_scores_come_first_and_sums_are_not_followed():
    sums = {"cumulative_loss": 9.0, "accuracy/task-1": 1.0}
    assert followed(record(1, server_metrics={**sums, "accuracy": 0.5})) == {"accuracy": 0.5}
    both = record(1, evaluate_metrics={"eval_acc": 0.5}, train_metrics={"loss": 2.0})
    assert followed(both) == {"eval eval_acc": 0.5, "train loss": 2.0}


# --- as a callback ---------------------------------------------------------------------------


def watched(console, behaviours=None, rounds=3, every_seconds=0.0):
    view = LiveView("four wards", console=console)
    view.every_seconds = every_seconds
    grid = InProcessGrid(toy_app(behaviours), 4)
    return FedAvg(callbacks=[view]).start(grid, initial_arrays(), num_rounds=rounds)


def refuse(message, context):
    raise ValueError("out of order")


def test_in_a_log_there_is_a_line_for_a_round_and_one_for_who_is_left_out():
    file = io.StringIO()
    watched(Console(file=file), {2: refuse})
    lines = file.getvalue().splitlines()
    assert lines[0] == "four wards: 3 rounds"
    assert lines[1].startswith("round 1: node 2: ")
    assert "out of order" in lines[1]
    assert "train loss 0." in lines[2]
    assert lines[-1].startswith("four wards: all rounds are done")
    watched(Console(file=(file := io.StringIO())), rounds=50, every_seconds=1e9)
    rounds = [line.split(":")[0] for line in file.getvalue().splitlines()[1:-1]]
    assert rounds == ["round 1 of 50", "round 50 of 50"]


def test_in_a_terminal_the_run_is_the_same_and_the_cursor_comes_back():
    file = Terminal()
    seen = watched(Console(file=file, force_terminal=True, width=80, height=30))
    text = file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "4/4 nodes" in text
    alone = FedAvg().start(InProcessGrid(toy_app(), 4), initial_arrays(), num_rounds=3)
    assert record_equal(alone.arrays, seen.arrays)
    assert alone.traffic == seen.traffic


def test_a_run_that_fails_gives_the_terminal_and_the_log_back():
    handler = logging.StreamHandler(sys.__stderr__)
    logging.getLogger("flwr").addHandler(handler)
    file, streams = Terminal(), (sys.stdout, sys.stderr)
    with pytest.raises(RoundFailedError):
        watched(Console(file=file, force_terminal=True), dict.fromkeys(range(4), refuse))
    assert (sys.stdout, sys.stderr) == streams
    assert handler.stream is sys.__stderr__
    assert "\x1b[?25h" in file.getvalue()
