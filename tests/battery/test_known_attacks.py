"""Replies that ended a run once, each by name; and those that lie in the inbox of a resumed run."""

import json
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from helpers_battery import HostileApp, Played, check, grid_of
from helpers_blobs import both_parts
from helpers_lies import with_record
from helpers_scenarios import HIDDEN, NODES, SCENARIOS, app_of, arrays_of, data, layer

from gems_flwr.bounds import MAX_FILE_NAME_BYTES, MAX_NEURON_RATIO
from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.errors import RoundFailedError
from gems_flwr.neuron_merging.neuron_scale import oversized_layers
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.spaces.radius import Radius
from gems_flwr.spaces.space_files import SUFFIX, SpaceFolder, save_space
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_requests import Ball


def in_json(key, **changes):
    """Return a lie that changes the JSON in one record."""

    def lie(content):
        if key not in content:
            return content
        text = json.loads(content[key]["json"])
        note = ConfigRecord({**content[key], "json": json.dumps(text | changes)})
        return with_record(content, key, note)

    return lie


def only_failure(played, server_round=1):
    (failure,) = played.result.history[server_round].failures
    return failure


@pytest.mark.parametrize(
    "name", ["Gems, cone", "Gems, cone, capped", "Gems, cone, robust", "Gems, cone, audit"]
)
@pytest.mark.parametrize("count", [10**400, 10**16, -1], ids=["10^400", "10^16", "-1"])
def test_samples_withheld_by_the_googol_are_refused(name, count):
    def lie(content):
        if "space-meta" not in content:
            return content
        total = json.loads(content["space-meta"]["json"])["total_count"] + count
        return in_json("space-meta", withheld_count=count, total_count=total)(content)

    played = Played(name, {1: lie})
    check(played)
    assert only_failure(played).node == "1"
    assert "count: expected an integer" in only_failure(played).reason


def far_sums(sign):
    """Return a lie about class sums: as far out as one node can be, on this side or on that."""

    def lie(content):
        if "class-sums" not in content:
            return content
        classes = len(content["class-sums"]["counts"].numpy())
        counts, features = np.full(classes, 1e3, np.float32), content["class-sums"]["sums"].shape[1]
        means = np.full((classes, features), sign * 0.9e6)
        spread = 0.9e12 * np.eye(features) + np.full((features, features), 0.9e6**2)
        upper = np.tile(spread[np.triu_indices(features)], (classes, 1))
        arrays = {"counts": counts, "sums": 1e3 * means, "outers": 1e3 * upper}
        packed = to_record({key: array.astype(np.float32) for key, array in arrays.items()})
        return with_record(content, "class-sums", packed)

    return lie


@pytest.mark.parametrize("name", ["Gems, sums", "Gems, sums, capped"])
def test_sums_that_only_together_are_out_of_bounds_are_refused_one_by_one(name):
    """Each has moments that a cone may have; their total has a variance of 1.7e12."""
    played = Played(name, {1: far_sums(1), 3: far_sums(-1)})
    check(played)
    assert all("of class 0" in f.reason for f in played.result.history[1].failures)


def test_an_integer_of_5000_digits_does_not_end_a_multi_model_run():
    def lie(content):
        if "capacity" not in content.get("multi-model", {}):
            return content
        note = ConfigRecord({"json": '{"a": ' + "9" * 5000 + "}", "capacity": 1})
        return with_record(content, "multi-model", note)

    played = Played("MultiModel, random", {1: lie})
    check(played)
    assert "holds no JSON" in only_failure(played).reason


@pytest.mark.parametrize("condition", ["local", "total"])
def test_a_model_with_nan_leaves_dynamic_averaging_running(condition):
    def lie(content):
        for key, record in content.array_records.items():
            spoilt = {n: Array(np.full_like(a.numpy(), np.nan)) for n, a in record.items()}
            content = with_record(content, key, ArrayRecord(spoilt))
        return content

    played = Played(f"DynamicAveraging, {condition}", {1: lie})
    check(played)
    for record in played.result.history[1:]:
        assert {failure.node for failure in record.failures} == {"1"}
        assert all("NaN" in failure.reason for failure in record.failures)


def test_a_beta_beyond_all_measure_costs_a_node_its_pair_and_nobody_else():
    """Its old update is about 1; 1e90 times that is infinite in single precision."""

    def lie(content):
        for key, record in content.metric_records.items():
            if "beta" in record:
                content = with_record(content, key, MetricRecord({**record, "beta": 1e90}))
        return content

    played = Played("MultiModel, stale", {1: lie})
    check(played)
    lost = played.result.details["lost"]
    assert lost
    assert all(each["node"] == "1" and "beta 1e+90" in each["reason"] for each in lost)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": np.full(36, 3)}, "labels must be from 0 to 2, got 3 to 3"),
        ({"labels": np.full(36, -1)}, "got -1 to -1"),
        ({"features": np.zeros((36, 3))}, "features are float64, those of most nodes float32"),
    ],
)
def test_pooled_examples_must_be_like_those_of_the_others(change, words):
    def lie(content):
        arrays = to_numpy(content["examples"]) | change
        return with_record(content, "examples", to_record(arrays))

    played = Played("Pooled", {1: lie})
    check(played, Played("Pooled", {1: None}))
    assert words in only_failure(played).reason


def test_weights_that_no_tuning_survives_stay_as_they_are():
    def lie(content):
        arrays = {key: np.full_like(a.numpy(), 1e19) for key, a in content["arrays"].items()}
        return with_record(content, "arrays", to_record(arrays))

    played = Played("LocalModels, tuned", {1: lie})
    check(played)
    assert (played.result.arrays["member/1/2.weight"].numpy() == np.float32(1e19)).all()


def test_metrics_may_be_called_like_the_fields_of_a_log_line(caplog):
    """Every node reports them, so that they are in the mean."""

    def named(message, context):
        reply = app(message, context)
        if "metrics" in reply.content:
            more = {"event": 7.0, "round": 8.0, "a b=c\n": 9.0}
            record = MetricRecord({**reply.content["metrics"], **more})
            reply.content["metrics"] = record
        return reply

    app = app_of()
    FedAvg().start(InProcessGrid(named, 3), arrays_of(layer), num_rounds=1)
    (line,) = [r.getMessage() for r in caplog.records if "event=round_end" in r.getMessage()]
    assert line.startswith("event=round_end round=1 ")
    assert "metric.event=7 metric.round=8 " in line
    assert r'"a b=c\n"=9' in line


# --- names ------------------------------------------------------------------------------------


LONG = ["/" * 100, "漢" * 90, "\U0001f600" * 100, "\\" * 100]


@pytest.mark.parametrize("name", LONG, ids=["slashes", "Han", "emoji", "backslashes"])
def test_a_long_odd_name_is_kept_in_a_file_of_bounded_name(name, tmp_path):
    def lie(content):
        return with_record(content, "node", ConfigRecord({"name": name}))

    played = Played("Gems, cone", {1: lie}, folder=tmp_path, named=False)
    check(played)
    files = list((tmp_path / "spaces").iterdir())
    assert len(files) == NODES
    assert max(len(file.name.encode()) for file in files) <= MAX_FILE_NAME_BYTES - len("..tmp")
    assert name in SpaceFolder(tmp_path / "spaces").load()


def test_names_that_begin_alike_have_files_of_their_own(tmp_path):
    ball = BallSpace(np.zeros(3), Radius(1.0, "worst"))
    names = ["漢" * 99 + sign for sign in "abc"] + ["short", "a/b"]
    folder = SpaceFolder(tmp_path)
    folder.save(dict.fromkeys(names, ball))
    assert set(folder.load()) == set(names)


def test_files_of_earlier_runs_are_found_under_their_nodes_names(tmp_path):
    """They were called by the quoted name alone, and had no node in their header."""
    save_space(tmp_path / f"clinic%2F7~{'0' * 32}{SUFFIX}", BallSpace([0.0], Radius(1.0, "worst")))
    assert set(SpaceFolder(tmp_path).load()) == {f"clinic/7~{'0' * 32}"}


# --- hidden layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [9e5, 100.0])
@pytest.mark.parametrize("merge", ["concat", "kmeans", "verified"])
def test_huge_hidden_weights_leave_everybody_else_usable_in_the_next_round(merge, largest):
    """Weights up to a million may be in a space; with them the next layer's inputs may not."""

    def lie(content):
        if "neurons" not in content:
            return content
        array = np.array(content["neurons"]["neurons"].numpy())
        array[:, :-2] *= np.float32(largest / np.abs(array[:, :-2]).max())
        return with_record(content, "neurons", to_record({"neurons": array}))

    played = Played(f"LayerwiseGems, {merge}", {1: lie})
    check(played)
    assert "neurons: expected lengths up to" in only_failure(played).reason
    assert played.result.history[2].nodes_answered == ("0", "1", "2", "3", "4")


def balls(length, width=HIDDEN):
    return NeuronBalls(np.eye(width) * length, np.ones(width), "worst")


def test_a_length_is_too_large_only_beside_the_model_that_was_sent_and_most_nodes():
    sent = np.eye(HIDDEN)
    above, within = 1.01 * MAX_NEURON_RATIO, 0.99 * MAX_NEURON_RATIO
    assert list(oversized_layers([balls(1), balls(above), balls(1)], sent)) == [1]
    assert oversized_layers([balls(1), balls(within), balls(1)], sent) == {}
    # A model that is large by itself, and a layer that grows on most nodes.
    assert oversized_layers([balls(1), balls(above), balls(1)], 2 * sent) == {}
    assert oversized_layers([balls(above), balls(above), balls(1)], sent) == {}
    # One that sends nothing but zeros has nobody refused.
    assert oversized_layers([balls(0), balls(2)], sent) == {}


# --- what lies in the inbox -------------------------------------------------------------------


def interrupted(name, folder, plant):
    """Leave a round with too few replies behind, one of which is exchanged for another."""
    scenario = SCENARIOS[name]
    grid = grid_of(name).begin({0: None})
    with pytest.raises(RoundFailedError):
        scenario.make(min_nodes=NODES, checkpoint_dir=folder).start(grid, scenario.initial())
    inbox = CheckpointFolder(folder)
    inbox.keep_reply("1-train", "1", plant(inbox.kept_reply("1-train", "1")))


@pytest.mark.parametrize("name", ["Gems, cone, capped", "Gems, cone, robust", "Gems, cone, audit"])
def test_a_kept_reply_that_older_code_let_pass_is_dropped_on_resume(name, tmp_path):
    def plant(content):
        total = json.loads(content["space-meta"]["json"])["total_count"] + 10**400
        return in_json("space-meta", withheld_count=10**400, total_count=total)(content)

    interrupted(name, tmp_path, plant)
    played = Played(name, {1: lambda content: content}, folder=tmp_path, resume=True)
    check(played)
    assert only_failure(played).node == "1"
    assert set(played.result.details["margins"]) == {"0", "2", "3", "4"}


class Breaks(FedAvg):
    """A strategy with a fault that no check knows of: weights of 77 in a model break it."""

    def aggregate(self, answers):
        for answer in answers:
            if (answer.value.arrays["bias"] == 77).any():
                raise TypeError("77 cannot be averaged")
        return super().aggregate(answers)


def seventy_seven(content):
    arrays = to_numpy(content["arrays"])
    return with_record(content, "arrays", to_record(arrays | {"bias": arrays["bias"] * 0 + 77}))


def start(strategy, lies, nodes=NODES, rounds=2):
    grid = InProcessGrid(HostileApp(app_of(), lies), nodes)
    return strategy.start(grid, arrays_of(layer), num_rounds=rounds)


@pytest.mark.parametrize("liars", [(1,), (0, 3)])
def test_a_reply_that_breaks_a_round_unforeseen_is_found_and_left_out(liars, tmp_path):
    result = start(Breaks(checkpoint_dir=tmp_path), dict.fromkeys(liars, seventy_seven))
    for record in result.history[1:]:
        assert tuple(failure.node for failure in record.failures) == tuple(map(str, liars))
        assert all(
            "TypeError: 77 cannot be averaged (in aggregate" in f.reason for f in record.failures
        )
    honest = start(FedAvg(), dict.fromkeys(liars))
    for key, array in result.arrays.items():
        assert np.array_equal(array.numpy(), honest.arrays[key].numpy())


class BreaksLocally(PeriodicAveraging):
    def synchronise(self, server_round, learners, replies, ask):
        if any((reply.arrays["bias"] == 77).any() for reply in replies.values()):
            raise KeyError("77")
        return super().synchronise(server_round, learners, replies, ask)


class BreaksSpaces(Gems):
    def _aggregate(self, spaces):
        if any((space.center == 77).any() for space in spaces.values()):
            raise FloatingPointError("77")
        return super()._aggregate(spaces)


def seventy_sevens(content):
    """Change the first number of every array, in whatever record."""
    for key, record in content.array_records.items():
        arrays = to_numpy(record)
        for array in arrays.values():
            array.reshape(-1)[0] = 77
        content = with_record(content, key, to_record(arrays))
    return content


@pytest.mark.parametrize(
    ("strategy", "mod"),
    [
        (BreaksLocally, dynamic_averaging_mod()),
        (partial(BreaksSpaces, space=Ball(directions=5)), good_enough_mod(both_parts(data))),
    ],
)
def test_the_culprit_is_found_in_every_kind_of_round(strategy, mod, tmp_path):
    grid = InProcessGrid(HostileApp(app_of(mod), {1: seventy_sevens}), NODES)
    result = strategy(checkpoint_dir=tmp_path).start(grid, arrays_of(layer), num_rounds=1)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert "can be played without this reply" in failure.reason
    assert result.history[1].nodes_answered == ("0", "2", "3", "4")
    assert np.isfinite(result.arrays["bias"].numpy()).all()


def test_a_reply_that_broke_a_run_does_not_break_its_resume(tmp_path):
    """The first run is of code that has no way out: the reply is in its inbox when it ends."""

    class Older(Breaks):
        def _play(self, exchange, *rest):
            self._exchange, self._is_playing = exchange, True
            return self.play_round(1, *rest)

    Older.__name__ = Breaks.__name__
    with pytest.raises(TypeError):
        start(Older(checkpoint_dir=tmp_path), {1: seventy_seven})
    asked = []

    def counted(message, context):
        asked.append(context.node_config["partition-id"])
        return app_of()(message, context)

    grid = InProcessGrid(counted, NODES)
    resumed = Breaks(fraction_evaluate=0.0, checkpoint_dir=tmp_path, resume=True)
    result = resumed.start(grid, arrays_of(layer), num_rounds=1)
    assert result.history[1].nodes_answered == ("0", "2", "3", "4")
    assert [failure.node for failure in result.history[1].failures] == ["1"]
    # What was kept is enough to find out.
    assert asked == []


def test_a_fault_that_is_no_replys_doing_is_raised_as_it_is(tmp_path):
    class Broken(FedAvg):
        def aggregate(self, answers):
            raise TypeError("a mistake of ours")

    with pytest.raises(TypeError, match="a mistake of ours"):
        start(Broken(checkpoint_dir=tmp_path), {})
    # And nothing that was received is lost.
    assert len(list((tmp_path / "inbox").iterdir())) == NODES


def test_a_fault_in_unpacking_names_the_node_with_the_kind_and_the_place():
    class Careless(FedAvg):
        def _unpack_model(self, content):
            if content["metrics"]["num-examples"] == 21:  # node 1
                raise ZeroDivisionError("by our own code")
            return super()._unpack_model(content)

    (failure,) = start(Careless(), {}, rounds=1).history[1].failures
    assert failure.node == "1"
    assert "ZeroDivisionError: by our own code (in _unpack_model, test_known" in failure.reason
