"""A round as flat names and numbers: what trackers are told, and what they are not."""

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from gems_flwr import Cone, Gems
from gems_flwr.errors import Failure
from gems_flwr.runtime.metered_grid import Traffic
from gems_flwr.server.state import RoundRecord, RunResult
from gems_flwr.tracking.round_numbers import (
    Totals,
    flat_values,
    result_values,
    round_numbers,
    setting_values,
    tidy_name,
    totals_of,
)
from gems_flwr.wire.records import to_record

FIRST = RoundRecord(0, server_metrics={"accuracy": 0.1})
SECOND = RoundRecord(
    1,
    seconds=2.0,
    nodes_asked=("north", "south", "harbour"),
    nodes_answered=("north", "south"),
    failures=(Failure("harbour", "harbour is on strike"),),
    traffic=Traffic(100, 200, 2, 3),
    train_metrics={"loss": 0.5, "by_class": [1.0, 2.0]},
    evaluate_metrics={"loss": 0.25},
    server_metrics={"loss": 0.125, "accuracy/task-1": 0.75},
)
THIRD = RoundRecord(2, seconds=1.0, nodes_asked=("north",), traffic=Traffic(10, 20, 1, 1))


def test_metrics_of_server_evaluation_and_training_are_kept_apart():
    numbers = round_numbers(SECOND, totals_of([FIRST, SECOND]))
    assert (numbers["loss"], numbers["evaluate/loss"], numbers["train/loss"]) == (0.125, 0.25, 0.5)
    assert numbers["accuracy/task-1"] == 0.75
    assert not any("by_class" in name for name in numbers)


def test_bytes_are_told_by_round_and_in_all():
    """100 + 10 up, 200 + 20 down, 5 + 2 messages in 3 seconds."""
    numbers = round_numbers(THIRD, totals_of([FIRST, SECOND, THIRD]))
    assert (numbers["round/bytes_up"], numbers["round/bytes_down"]) == (10, 20)
    assert (numbers["total/bytes_up"], numbers["total/bytes_down"]) == (110, 220)
    assert (numbers["total/bytes"], numbers["total/messages"]) == (330, 7)
    assert (numbers["total/seconds"], numbers["total/failures"]) == (3.0, 1)
    assert (numbers["round/nodes_asked"], numbers["round/nodes_answered"]) == (1, 0)


def test_the_initial_model_has_metrics_and_no_cost():
    assert round_numbers(FIRST, Totals()) == {"accuracy": 0.1}


def test_nodes_are_named_only_if_that_was_asked_for():
    totals = totals_of([SECOND])
    told = repr(round_numbers(SECOND, totals))
    assert not re.search("north|south|harbour", told)
    named = round_numbers(SECOND, totals, nodes=True)
    used = {name: value for name, value in named.items() if name.startswith("node/")}
    assert used == {"node/north/used": 1, "node/south/used": 1, "node/harbour/used": 0}


def result(**details):
    return RunResult(
        arrays=to_record({}),
        history=(FIRST, SECOND),
        details=details,
        stopped_because="all rounds are done",
    )


def test_of_the_result_there_are_verdict_bound_and_scores_without_names():
    ended = result(
        status="feasible",
        empty=False,
        loss_bound=0.01,
        note="north was late",
        left_out={"harbour": "harbour is on strike"},
        node_scores={"north": 0.5, "south": 1.0},
        margins={"north": 3.0},
    )
    values = result_values(ended)
    assert values["stopped_because"] == "all rounds are done"
    assert (values["status"], values["empty"], values["loss_bound"]) == ("feasible", False, 0.01)
    scores = [values[f"node_scores/{name}"] for name in ("mean", "lowest", "highest", "nodes")]
    assert scores == [0.75, 0.5, 1.0, 2]
    assert (values["nodes_failed"], values["bytes_up"], values["rounds"]) == (1, 100, 1)
    assert not re.search("north|south|harbour", repr(values))
    named = result_values(ended, nodes=True)
    assert (named["node/south/node_scores"], named["node/north/margins"]) == (1.0, 3.0)
    assert named["node/harbour/failures"] == 1


def test_settings_are_told_without_lists_that_may_name_nodes():
    strategy = Gems(space=Cone(rank=7), epsilon={"north": 0.5}, checkpoint_dir="/srv/wards")
    values = setting_values(vars(strategy))
    assert (values["space"], values["space.rank"], values["seed"]) == ("Cone", 7, 0)
    assert not re.search("north|wards", repr(values))


def test_a_config_becomes_one_level():
    config = {"a": {"b": {"c": 1}, "d": None}, "e": [1, 2], "f g": True}
    assert flat_values(config) == {"a.b.c": 1, "e": "[1, 2]", "f_g": True}


@given(st.dictionaries(st.text(max_size=300), st.floats(), max_size=20))
def test_whatever_nodes_call_their_metrics_every_tracker_takes_the_names(metrics):
    """MLflow's rule is the strictest: these characters, 250 of them, and no part ``..``."""
    record = RoundRecord(1, server_metrics=metrics, train_metrics=metrics)
    for name in round_numbers(record, Totals()):
        assert re.fullmatch(r"[\w\-./]{1,250}", name, re.ASCII)
        assert not name.startswith("/")
        assert not {"", ".", ".."} & {*name.split("/")}


def test_a_metric_cannot_pass_for_one_of_ours():
    metrics = {"total/bytes_up": 7.0, "round/failures": 0.0, "loss": math.nan}
    lying = RoundRecord(1, traffic=Traffic(50, 0, 1, 0), server_metrics=metrics)
    numbers = round_numbers(lying, totals_of([lying]))
    assert (numbers["total/bytes_up"], numbers["server/total/bytes_up"]) == (50, 7.0)
    assert math.isnan(numbers["loss"])
    assert tidy_name("../../etc") == "etc"
