"""The round loop: nodes, order, faults, stopping, checkpoints."""

import json
import threading
from functools import partial

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from helpers_grids import Impatient

from conftest import initial_arrays, record_equal, small_model, toy_app, train_reply
from gems_flwr import (
    Callback,
    FedAvg,
    InProcessGrid,
    MeteredGrid,
    OneShotAverage,
    TargetReached,
    Tolerance,
)
from gems_flwr.core.records import to_record
from gems_flwr.errors import CheckpointError, OptionError, RoundFailedError


def start(strategy, grid, rounds=2, **kwargs):
    return strategy.start(grid, initial_arrays(), num_rounds=rounds, **kwargs)


def weight(result):
    return result.arrays["weight"].numpy()


# --- the arithmetic -------------------------------------------------------------------------


def test_fedavg_is_the_weighted_mean_round_after_round(grid):
    """Node k adds k+1 with weight k+1: Σ(k+1)² / Σ(k+1) = 55/15 per round; the counter stays."""
    result = start(FedAvg(), grid, rounds=3)
    assert weight(result) == pytest.approx(small_model()["weight"] + 3 * 55 / 15)
    assert result.arrays["steps"].numpy() == 7
    assert result.arrays["steps"].numpy().dtype == np.int64


def floats_only():
    return to_record({k: v for k, v in small_model().items() if v.dtype.kind == "f"})


def test_a_method_called_by_itself_takes_the_first_reply_as_the_pattern(grid):
    outgoing = FedAvg().configure_train(1, initial_arrays(), ConfigRecord(), grid)
    arrays, _ = FedAvg().aggregate_train(1, grid.send_and_receive(outgoing))
    assert arrays["weight"].numpy() == pytest.approx(small_model()["weight"] + 55 / 15)
    empty = Message(RecordDict(), reply_to=outgoing[0])
    with pytest.raises(RoundFailedError, match="no readable model"):
        FedAvg().aggregate_train(1, [empty])


# --- faults ---------------------------------------------------------------------------------


def raises(message, context):
    raise RuntimeError("no data here")


def returns_nothing(message, context):
    return None


def sleeps(message, context):
    threading.Event().wait()


def sends(**arrays):
    return lambda message, context: train_reply(message, context, arrays=arrays)


sends_nan = sends(bias=np.array([0.0, np.nan]))


def sends_no_metrics(message, context):
    reply = train_reply(message, context)
    del reply.content["metrics"]
    return reply


FAULTS = {
    raises: "no data here",
    returns_nothing: "no reply within 0.2 s",
    sleeps: "no reply within 0.2 s",
    sends_nan: "array 'bias' holds NaN or infinity",
    sends(bias=np.zeros(3)): r"array 'bias' has shape (3,), expected (2,)",
    sends_no_metrics: "expected one MetricRecord",
}


@pytest.mark.parametrize(("fault", "guarded"), [*((f, True) for f in FAULTS), (raises, False)])
def test_a_run_goes_on_without_the_node_at_fault_and_says_who(fault, guarded, caplog):
    """Node 1 is left out: nodes 0, 2, 3 add 1, 3, 4 with weights 1, 3, 4: 26/8."""
    expected = FAULTS[fault]
    if guarded and fault is returns_nothing:
        expected = "the handler returned NoneType, expected a Message"
    grid = Impatient(toy_app({1: fault}, guarded=guarded), 4, hurried=[1])
    result = start(FedAvg(fraction_evaluate=0.0), grid, rounds=1, timeout=0.2)
    assert weight(result) == pytest.approx(small_model()["weight"] + 26 / 8)
    record = result.history[1]
    assert record.nodes_asked == ("0", "1", "2", "3")
    assert record.nodes_answered == ("0", "2", "3")
    assert [failure.node for failure in record.failures] == ["1"]
    assert expected in record.failures[0].reason
    assert "event=left_out round=1 node=1 reason=" in caplog.text
    assert result.failures == ((1, record.failures[0]),)


def test_too_few_usable_replies_fail_the_round_and_nothing_is_lost(tmp_path):
    grid = InProcessGrid(toy_app({0: raises, 1: sends_nan}), 3)
    with pytest.raises(RoundFailedError) as caught:
        start(FedAvg(min_nodes=2, checkpoint_dir=tmp_path), grid)
    text = str(caught.value)
    assert "round 1 failed: 1 of 3 nodes gave a usable reply, min_nodes is 2" in text
    assert "node 0: " in text
    assert "node 1: array 'bias' holds NaN" in text
    assert "resume=True" in text
    assert [node for node, _ in caught.value.replies] == ["2"]
    assert [failure.node for failure in caught.value.failures] == ["0", "1"]
    assert len(list((tmp_path / "inbox").iterdir())) == 1


def test_a_resumed_round_asks_only_those_whose_replies_are_missing(tmp_path):
    asked_nodes = []

    def noted(message, context):
        asked_nodes.append(context.node_config["partition-id"])
        return train_reply(message, context)

    broken = InProcessGrid(toy_app({0: raises, 1: sends_nan, 2: noted}), 3)
    with pytest.raises(RoundFailedError):
        start(FedAvg(min_nodes=3, checkpoint_dir=tmp_path), broken)
    mended = MeteredGrid(InProcessGrid(toy_app({0: noted, 1: noted, 2: noted}), 3))
    strategy = FedAvg(fraction_evaluate=0.0, min_nodes=3, checkpoint_dir=tmp_path)
    result = start(strategy, mended, rounds=1, resume=True)
    assert asked_nodes == [2, 0, 1]
    assert mended.total.messages_down == 2
    whole = start(FedAvg(), InProcessGrid(toy_app(), 3), rounds=1)
    assert record_equal(result.arrays, whole.arrays)


def test_a_subclass_hears_of_every_round_even_if_no_node_evaluates(grid):
    """As in Flower, whose loop calls both methods whatever the fraction is."""
    heard = []

    class Listening(FedAvg):
        def aggregate_evaluate(self, server_round, replies):
            heard.append((server_round, list(replies)))

    start(Listening(fraction_evaluate=0.0), grid, rounds=2)
    assert heard == [(1, []), (2, [])]


# --- evaluation, stopping, callbacks --------------------------------------------------------


def growing(server_round, arrays):
    return MetricRecord(
        {"accuracy": min(0.5, 0.1 * server_round), "loss": 1.0 / (server_round + 1)}
    )


@pytest.mark.parametrize(
    ("rule", "rounds", "reason"),
    [
        (TargetReached(0.25), 3, "accuracy 0.3000 reached the target 0.25"),
        (TargetReached(0.3, metric="loss", goal="min"), 3, "loss 0.2500 reached"),
        (TargetReached(20, metric="mean_weight"), 5, "mean_weight 20.8333 reached"),
        (TargetReached(0.9), 12, "all rounds are done"),
        (TargetReached(0.1, metric="unheard-of"), 12, "all rounds are done"),
    ],
)
def test_stop_rules_end_the_run_and_say_why(grid, rule, rounds, reason):
    result = start(FedAvg(), grid, rounds=12, evaluate_fn=growing, should_stop=rule)
    assert result.history[-1].round == rounds
    assert reason in result.stopped_because
    assert reason in repr(result)


def test_a_run_ends_after_the_round_for_which_should_stop_says_so(grid):
    heard = []

    def enough(server_round, result):
        heard.append((server_round, result.history[-1].round))
        return result.evaluate_metrics_serverapp[server_round]["accuracy"] >= 0.2

    result = start(FedAvg(), grid, rounds=9, evaluate_fn=growing, should_stop=enough)
    assert result.stopped_because == "should_stop ended the run after round 2"
    assert heard == [(1, 1), (2, 2)]


WRONG = {"fraction_train": 1.5, "fraction_evaluate": -0.1, "min_nodes": 0, "seed": -1}
WRONG |= {"min_train_nodes": -1, "min_available_nodes": -1}


@pytest.mark.parametrize(
    "make",
    [
        lambda: TargetReached(0.5, goal="up"),
        lambda: TargetReached(1, goal="down"),
        *(partial(FedAvg, **{key: value}) for key, value in WRONG.items()),
        lambda: FedAvg(min_nodes=3, tolerance=Tolerance(wait_for_nodes=2)),
        lambda: FedAvg(arrayrecord_key="same", configrecord_key="same"),
        lambda: Tolerance(wait_seconds=-1),
        lambda: Tolerance(max_reply_bytes=0),
        lambda: Tolerance(max_examples=-1),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(OptionError, match=r"must|needs"):
        make()


class Listener(Callback):
    def __init__(self):
        self.heard = []

    def on_setup(self, settings, history):
        self.heard.append(("setup", settings["seed"], len(history)))

    def on_start(self, strategy, num_rounds, finished_rounds):
        self.heard.append(("start", strategy, num_rounds, finished_rounds))

    def on_exchange(self, server_round, nodes):
        self.heard.append(("exchange", server_round, nodes))

    def on_reply(self, server_round, node, usable):
        self.heard.append(("reply", server_round, usable))

    def on_round_end(self, record):
        self.heard.append(("round", record.round))

    def on_end(self, result):
        self.heard.append(("end", len(result.history)))

    def on_error(self, error):
        self.heard.append(("error", type(error)))
        raise RuntimeError("a callback's own trouble does not hide the run's")


def test_callbacks_hear_everything_in_order(grid):
    listener = Listener()
    start(FedAvg(fraction_evaluate=0.0, callbacks=[listener, Callback()]), grid, rounds=1)
    assert listener.heard == [
        ("setup", 0, 1),
        ("start", "FedAvg", 1, 0),
        ("exchange", 1, 5),
        *[("reply", 1, True)] * 5,
        ("round", 1),
        ("end", 2),
    ]
    killed = Listener()
    with pytest.raises(Killed):
        start(FedAvg(callbacks=[killed, KillAfter(1)]), grid)
    assert killed.heard[-1] == ("error", Killed)


# --- checkpoints ----------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a power cut: nothing in the loop catches it."""


class KillAfter(Callback):
    def __init__(self, rounds):
        self.rounds = rounds

    def on_round_end(self, record):
        if record.round == self.rounds:
            raise Killed


def without_seconds(result):
    return [{**record.to_json(), "seconds": 0} for record in result.history]


def test_a_run_killed_after_round_three_and_resumed_equals_an_unbroken_one(tmp_path):
    def play(resume=False, **options):
        strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.5, seed=3, **options)
        grid = InProcessGrid(toy_app(), 8)
        return start(strategy, grid, rounds=6, evaluate_fn=growing, resume=resume)

    unbroken = play()
    with pytest.raises(Killed):
        play(checkpoint_dir=tmp_path, callbacks=[KillAfter(3)])
    resumed = play(resume=True, checkpoint_dir=tmp_path)
    assert record_equal(resumed.arrays, unbroken.arrays)
    assert without_seconds(resumed) == without_seconds(unbroken)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(7))


def test_a_finished_run_that_is_resumed_sends_nothing(tmp_path, grid):
    first = start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=2)
    metered = MeteredGrid(grid)
    again = start(FedAvg(checkpoint_dir=tmp_path), metered, rounds=2, resume=True)
    assert metered.total.messages_down == 0
    assert record_equal(first.arrays, again.arrays)
    longer = start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=3, resume=True)
    assert [record.round for record in longer.history] == [0, 1, 2, 3]


def test_without_resume_an_old_checkpoint_is_forgotten(tmp_path, grid):
    start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=3)
    fresh = start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=1)
    assert [record.round for record in fresh.history] == [0, 1]


@pytest.mark.parametrize(
    ("other", "model", "words"),
    [
        (FedAvg(seed=9), initial_arrays(), "seed 0, this run has 9"),
        (OneShotAverage(), initial_arrays(), "strategy FedAvg, this run has OneShotAverage"),
        (FedAvg(), floats_only(), "with model"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(tmp_path, grid, other, model, words):
    start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=1)
    other.checkpoint_dir = tmp_path
    with pytest.raises(CheckpointError, match=words):
        other.start(grid, model, resume=True)


def test_a_line_written_after_the_last_checkpoint_is_dropped_and_a_missing_one_refused(
    tmp_path, grid
):
    start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=2)
    path = tmp_path / "rounds.jsonl"
    lines = path.read_text()
    path.write_text(lines + '{"round": 3, "torn')
    resumed = start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=3, resume=True)
    assert [record.round for record in resumed.history] == [0, 1, 2, 3]
    path.write_text(lines.splitlines()[0] + "\n")
    with pytest.raises(CheckpointError, match="does not fit the checkpoint"):
        start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=4, resume=True)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rounds.jsonl cannot be read"):
        start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=4, resume=True)
