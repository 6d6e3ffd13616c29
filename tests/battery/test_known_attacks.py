"""Replies that are known to have broken a run, each by name; and those in a resumed run's inbox."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord
from helpers_battery import HostileApp, Played, check
from helpers_lies import with_record
from helpers_scenarios import HIDDEN, NODES, app_of, arrays_of, layer

from gems_flwr import FedAvg, InProcessGrid
from gems_flwr.bounds import MAX_FILE_NAME_BYTES, MAX_NEURON_RATIO
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.neurons import NeuronBalls, oversized_layers
from gems_flwr.spaces import SpaceFolder
from gems_flwr.spaces.ball import BallSpace, Radius


def in_json(key, field, **changes):
    """Return a lie that changes the JSON in one record."""

    def lie(content):
        if key not in content:
            return content
        text = json.loads(content[key][field])
        note = ConfigRecord({**content[key], field: json.dumps(text | changes)})
        return with_record(content, key, note)

    return lie


def only_failure(played, server_round=1):
    (failure,) = played.result.history[server_round].failures
    return failure


@pytest.mark.parametrize("name", ["Gems, cone", "Gems, cone, capped", "Gems, cone, robust"])
@pytest.mark.parametrize("count", [10**400, 10**16, -1], ids=["10^400", "10^16", "-1"])
def test_samples_withheld_by_the_googol_are_refused(name, count):
    def lie(content):
        if "space-meta" not in content:
            return content
        total = json.loads(content["space-meta"]["text"])["total_count"] + count
        return in_json("space-meta", "text", withheld_count=count, total_count=total)(content)

    played = Played(name, {1: lie})
    check(played)
    assert only_failure(played).node == "1"
    assert "count: expected an integer" in only_failure(played).reason


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
    ball = BallSpace(np.zeros(3), Radius(1.0, "certified"))
    names = ["漢" * 99 + sign for sign in "abc"] + ["short", "a/b"]
    folder = SpaceFolder(tmp_path)
    folder.save(dict.fromkeys(names, ball))
    assert set(folder.load()) == set(names)


# --- hidden layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [9e5, 100.0])
@pytest.mark.parametrize("name", ["LayerwiseGems", "LayerwiseGems, robust"])
def test_huge_hidden_weights_leave_everybody_else_usable_in_the_next_round(name, largest):
    """Weights up to a million may be in a space; with them the next layer's inputs may not."""

    def lie(content):
        if "neurons" not in content:
            return content
        array = np.array(content["neurons"]["neurons"].numpy())
        array[:, :-2] *= np.float32(largest / np.abs(array[:, :-2]).max())
        return with_record(content, "neurons", to_record({"neurons": array}))

    played = Played(name, {1: lie})
    check(played)
    assert "neurons: expected lengths up to" in only_failure(played).reason
    assert played.result.history[2].nodes_answered == ("0", "1", "2", "3", "4")


def balls(length, width=HIDDEN):
    return NeuronBalls(np.eye(width) * length, np.ones(width))


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


# --- faults that no check knows of ---------------------------------------------------------


class Breaks(FedAvg):
    """A strategy with a fault that no check knows of: weights of 77 in a model break it."""

    def aggregate(self, replies):
        if any((reply.arrays["bias"] == 77).any() for reply in replies.values()):
            raise TypeError("77 cannot be averaged")
        return super().aggregate(replies)


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


def test_a_reply_that_broke_a_run_does_not_break_its_resume(tmp_path):
    """The first run has no way out: the reply is in its inbox when it ends."""

    class Stuck(Breaks):
        def _despite_replies(self, play):
            return play({})

    Stuck.__name__ = Breaks.__name__
    with pytest.raises(TypeError):
        start(Stuck(checkpoint_dir=tmp_path), {1: seventy_seven})
    asked = []

    def counted(message, context):
        asked.append(context.node_config["partition-id"])
        return app_of()(message, context)

    grid = InProcessGrid(counted, NODES)
    resumed = Breaks(fraction_evaluate=0.0, checkpoint_dir=tmp_path)
    result = resumed.start(grid, arrays_of(layer), num_rounds=1, resume=True)
    assert result.history[1].nodes_answered == ("0", "2", "3", "4")
    assert [failure.node for failure in result.history[1].failures] == ["1"]
    # What was kept is enough to find out.
    assert asked == []


def test_a_fault_that_is_no_replys_doing_is_raised_as_it_is(tmp_path):
    class Broken(FedAvg):
        def aggregate(self, replies):
            raise TypeError("a mistake of ours")

    with pytest.raises(TypeError, match="a mistake of ours"):
        start(Broken(checkpoint_dir=tmp_path), {})
    # And nothing that was received is lost.
    assert len(list((tmp_path / "inbox").iterdir())) == NODES


def test_a_fault_in_unpacking_names_the_node_with_the_kind_and_the_place():
    class Careless(FedAvg):
        def _read_model(self, node_id, content):
            if content["metrics"]["num-examples"] == 21:  # node 1
                raise ZeroDivisionError("by our own code")
            return super()._read_model(node_id, content)

    (failure,) = start(Careless(), {}, rounds=1).history[1].failures
    assert failure.node == "1"
    assert "ZeroDivisionError: by our own code (in _read_model, test_known" in failure.reason
