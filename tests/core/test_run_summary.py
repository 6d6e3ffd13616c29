"""What the log says: what was started, what happened, and what came of it."""

import logging

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from helpers_gems import initial as initial_layer
from helpers_gems import linear_app
from helpers_grids import Nameless
from helpers_learners import initial as initial_walk
from helpers_learners import walking_app

from conftest import initial_arrays, toy_app, train_reply
from gems_flwr import Ball, Cone, DynamicAveraging, FedAvg, Gems, InProcessGrid
from gems_flwr.core import RoundRecord, RunResult, Traffic
from gems_flwr.core.log import result_lines
from gems_flwr.errors import Failure


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "flwr")

    def logged(word=""):
        return [r.getMessage() for r in caplog.records if word in r.getMessage()]

    return logged


def not_a_number(message, context):
    return train_reply(message, context, arrays={"bias": np.array([np.nan, 0.0])})


def test_a_reply_is_called_usable_only_after_it_was_looked_at(lines):
    app = toy_app({1: not_a_number})
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(InProcessGrid(app, 3), initial_arrays(), num_rounds=1)
    events = [line.split()[0][6:] for line in lines("event=") if "round=1" in line]
    assert events == ["ask", *["reply"] * 3, "left_out", "usable", "round_end"]
    assert not [line for line in lines("event=reply") if "usable" in line]
    assert lines("event=usable") == ["event=usable round=1 what=train nodes=2 of=3"]


EXCHANGES = {
    "Gems": (Gems(space=Ball(directions=20, epsilon={"0": 0.3})), [("name", "ball")]),
    "DynamicAveraging": (
        DynamicAveraging(delta=1e9),
        [("name", "learn"), ("learn", "send-model", "take-model")],
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_are_called_what_they_are_for(name, lines):
    strategy, expected = EXCHANGES[name]
    gems = name == "Gems"
    grid = Nameless(linear_app() if gems else walking_app(), 2)
    result = strategy.start(grid, initial_layer() if gems else initial_walk(), num_rounds=2)
    assert [record.exchanges for record in result.history[1:]] == expected
    told = [line.split("what=")[1].split()[0] for line in lines("event=ask")]
    assert told == [what for round_ in expected for what in round_]
    usable = [line.split("what=")[1].split()[0] for line in lines("event=usable")]
    assert usable == [what for what in told if what != "name"]


def test_the_lines_that_a_flower_user_knows_are_there(lines):
    """Flower's own run is the pattern: those of its lines that say the same in any strategy."""
    grid = InProcessGrid(toy_app(), 3)
    FlowersFedAvg(fraction_evaluate=0.0).start(grid, initial_arrays(), num_rounds=2)
    flowers = lines()
    known = [
        line
        for line in flowers
        if line.startswith(("Starting", "[ROUND", "Final results", "\t├── ", "\tAggregated"))
    ]
    assert len(known) == 1 + 4 + 2 + 1 + 2
    ours_begin = len(flowers)
    FedAvg(fraction_evaluate=0.0).start(grid, initial_arrays(), num_rounds=2)
    ours = lines()[ours_begin:]
    positions = [ours.index(line) for line in known]
    assert positions == sorted(positions)
    assert any(line.startswith("Strategy execution finished in") for line in ours)


def test_the_end_says_cost_who_was_left_out_and_scores(lines):
    strategy = Gems(space=Cone(min_count=2), verify=True)
    result = strategy.start(InProcessGrid(linear_app(), 2), initial_layer())
    text = "\n".join(lines())
    traffic = result.traffic
    assert f"Rounds: 1, {traffic.bytes_up:,} bytes up, {traffic.bytes_down:,} bytes down" in text
    assert "Left out: none" in text
    scores = result.details["node_scores"]
    assert f"0: {scores['0']:.4f}, 1: {scores['1']:.4f}" in text


def record(number, failures=(), exchanges=("train",)):
    return RoundRecord(
        number, failures=failures, exchanges=exchanges, traffic=Traffic(bytes_up=1000)
    )


def test_who_was_left_out_is_told_once_with_the_last_reason_and_many_are_cut():
    failures = (Failure("north", "late"), Failure("south", "NaN\nin weight"))
    history = (RoundRecord(0), record(1, failures[:1]), record(2, failures))
    told = result_lines(RunResult(history=history, stopped_because="all rounds are done"))
    assert told == [
        "Rounds: 2, 2,000 bytes up, 0 bytes down, ended because all rounds are done",
        "Left out: 2",
        "\tnode north, 2 ×: late",
        "\tnode south, 1 ×: NaN in weight",
    ]
    many = tuple(Failure(str(node), "late") for node in range(25))
    told = result_lines(RunResult(history=(RoundRecord(0), record(1, many))))
    assert told[1] == "Left out: 25"
    assert told[-1] == "\tand 15 more"
    assert len(told) == 2 + 10 + 1
