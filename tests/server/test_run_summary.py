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
from helpers_multi_model import initial as initial_models
from helpers_multi_model import pulling_app

from conftest import initial_arrays, toy_app, train_reply
from gems_flwr.errors import Failure
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import Traffic
from gems_flwr.server.log import short
from gems_flwr.server.run_summary import result_lines, settings_lines
from gems_flwr.server.state import RoundRecord, RunResult
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.wire.space_requests import Ball, Cone


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
    events = [line.split()[0] for line in lines("event=") if "round=1" in line]
    assert events == [
        "event=ask",
        *["event=reply"] * 3,
        "event=left_out",
        "event=usable",
        "event=round_end",
    ]
    assert not [line for line in lines("event=reply") if "usable" in line]
    assert lines("event=usable") == ["event=usable round=1 what=train nodes=2 of=3"]


def test_an_error_is_logged_as_one_and_a_reply_that_is_too_large_as_it_came(lines):
    def refuse(message, context):
        raise RuntimeError("no")

    def large(message, context):
        return train_reply(message, context, metrics={"x" * 2000: 1.0})

    strategy = FedAvg(fraction_evaluate=0.0, max_reply_bytes=1500)
    app = toy_app({1: refuse, 2: large})
    result = strategy.start(InProcessGrid(app, 4), initial_arrays(), num_rounds=1)
    (error,) = lines("event=reply round=1 node=1")
    assert " bytes=0 error=2 " in error
    (too_large,) = [i for i, line in enumerate(lines()) if "event=reply round=1 node=2" in line]
    (left_out,) = [i for i, line in enumerate(lines()) if "event=left_out round=1 node=2" in line]
    assert too_large < left_out
    assert result.history[1].nodes_answered == ("0", "3")


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        (
            lambda: FedAvg(fraction_evaluate=1.0).start(
                InProcessGrid(toy_app(), 3), initial_arrays(), num_rounds=2
            ),
            [("train", "evaluate"), ("train", "evaluate")],
        ),
        (
            lambda: Gems(space=Cone(min_count=2), verify=True).start(
                InProcessGrid(linear_app(), 3), initial_layer()
            ),
            [("space", "score")],
        ),
        (
            lambda: Gems(space=Ball(directions=20), epsilon={"0": 0.3}).start(
                Nameless(linear_app(), 2), initial_layer()
            ),
            [("names", "space")],
        ),
        (
            lambda: DynamicAveraging(delta=1e9).start(
                Nameless(walking_app(), 3), initial_walk(), num_rounds=2
            ),
            [("names", "train"), ("train", "models", "delivery")],
        ),
        (
            lambda: MultiModel(sampling="lvr", budget=3).start(
                InProcessGrid(pulling_app(), 3), initial_models(), num_rounds=2
            ),
            [("holdings", "losses", "train"), ("losses", "train")],
        ),
        (
            lambda: MultiModel(sampling="gvr", budget=3).start(
                InProcessGrid(pulling_app(), 3), initial_models(), num_rounds=1
            ),
            [("holdings", "norms", "models")],
        ),
    ],
    ids=["FedAvg", "Gems", "Gems by name", "DynamicAveraging", "MultiModel", "MultiModel, norms"],
)
def test_exchanges_are_called_what_they_are_for(play, expected, lines):
    result = play()
    assert [record.exchanges for record in result.history[1:]] == expected
    told = [line.split("what=")[1].split()[0] for line in lines("event=ask")]
    assert told == [what for round_ in expected for what in round_]
    usable = [line.split("what=")[1].split()[0] for line in lines("event=usable")]
    assert usable == [what for what in told if what != "names"]


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


def test_the_end_says_cost_exchanges_who_was_left_out_and_scores(lines):
    strategy = Gems(space=Cone(min_count=2), verify=True)
    result = strategy.start(InProcessGrid(linear_app(), 2), initial_layer())
    text = "\n".join(lines())
    traffic = result.traffic
    assert f"Rounds: 1, {traffic.bytes_up:,} bytes up, {traffic.bytes_down:,} bytes down" in text
    assert "Exchanges: 2 (space, score)" in text
    assert "Left out: nobody" in text
    scores = result.details["node_scores"]
    assert f"Node scores: 0: {scores['0']:.4f}, 1: {scores['1']:.4f}" in text


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
        "Exchanges: 2 (train × 2)",
        "Left out: 2",
        "\tnode north, 2 times: late",
        "\tnode south, once: NaN in weight",
    ]
    many = tuple(Failure(str(node), "late") for node in range(25))
    told = result_lines(RunResult(history=(RoundRecord(0), record(1, many))))
    assert told[2] == "Left out: 25"
    assert told[-1] == "\tand 15 more"
    assert len(told) == 3 + 10 + 1


def test_of_a_resumed_run_the_exchanges_are_those_of_the_rounds_that_it_has_played(tmp_path):
    grid = InProcessGrid(toy_app(), 3)
    FedAvg(checkpoint_dir=tmp_path).start(grid, initial_arrays(), num_rounds=2)
    strategy = FedAvg(checkpoint_dir=tmp_path, resume=True)
    result = strategy.start(grid, initial_arrays(), num_rounds=3)
    assert result_lines(result)[1] == "Exchanges after round 2: 2 (train, evaluate)"


def test_of_a_traceback_the_last_line_is_told():
    """Ray sends a whole one, over several lines."""
    said = (
        "<class 'RayTaskError'>: Traceback (most recent call last):\n  File x\nKeyError: 'arrays'\n"
    )
    assert short(said) == "KeyError: 'arrays'"
    assert short("NaN\n  in weight") == "NaN in weight"
    assert len(short("x" * 1000)) < 310
    assert short("") == ""


def test_whom_the_strategy_left_out_and_many_scores_are_told():
    scores = {str(node): node / 20 for node in range(20)}
    details = {"left_out": {"west": "its inputs are of another scale"}, "node_scores": scores}
    told = result_lines(RunResult(history=(RoundRecord(0),), details=details))
    assert "\tnode west, its inputs are of another scale" in told
    assert told[-1] == ("Node scores: mean 0.4750 of 20, lowest 0.0000 (node 0), highest 0.9500")


def test_settings_are_told_as_a_tree_and_what_is_not_set_is_not_told():
    def start_again(server_round):
        return {}

    settings = {
        "space": Ball(radius="worst"),
        "epsilon": {"north": 0.8},
        "initialise": start_again,
        "public": (np.zeros((5, 2)), np.zeros(5)),
        "layer": None,
        "min_nodes": 2,
        "resume": True,
        "stop_rules": (),
        "wait_seconds": 60.0,
    }
    shared = {"min_nodes": 2, "resume": False, "stop_rules": (), "wait_seconds": 60.0}
    assert settings_lines(settings, shared) == [
        "\t├──> Settings:",
        f"\t│\t├── space: {Ball(radius='worst')}",
        "\t│\t├── epsilon: {'north': 0.8}",
        "\t│\t├── initialise: start_again",
        "\t│\t└── public: [array (5, 2), array (5,)]",
        "\t└──> Rounds and nodes:",
        "\t\t├── min_nodes: 2",
        "\t\t└── resume: True",
    ]


def test_a_quiet_log_stays_quiet(caplog):
    caplog.set_level(logging.WARNING, "flwr")
    FedAvg().start(InProcessGrid(toy_app(), 3), initial_arrays(), num_rounds=2)
    assert caplog.records == []
