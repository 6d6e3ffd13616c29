"""The round loop: nodes, order, faults, stopping, checkpoints."""

import json
import logging
import threading

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from helpers_grids import Impatient, Nameless

from conftest import initial_arrays, record_equal, small_model, toy_app, train_reply
from gems_flwr.errors import CheckpointError, Failure, NotEnoughNodesError, RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server import nodes
from gems_flwr.server.log import log_event
from gems_flwr.server.settings import Callback
from gems_flwr.server.state import RoundRecord
from gems_flwr.server.stopping import PatienceExhausted, TargetReached
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import to_record


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


def test_unweighted_fedavg_is_the_plain_mean(grid):
    """(1 + 2 + 3 + 4 + 5) / 5 = 3."""
    result = start(FedAvg(weighted=False), grid, rounds=1)
    assert weight(result) == pytest.approx(small_model()["weight"] + 3)


def floats_only():
    return to_record({k: v for k, v in small_model().items() if v.dtype.kind == "f"})


def test_fedavg_equals_flowers_bit_for_bit_on_the_same_replies():
    grid = InProcessGrid(toy_app(), 7)
    ours, flowers = FedAvg(min_train_nodes=7), FlowersFedAvg(min_train_nodes=7)
    messages = list(ours.configure_train(1, floats_only(), ConfigRecord(), grid))
    replies = list(grid.send_and_receive(messages))
    our_arrays, our_metrics = ours.aggregate_train(1, replies)
    # Flower sums in order of arrival; give it ours.
    replies.sort(key=lambda reply: reply.content["node"]["name"])
    flower_arrays, flower_metrics = flowers.aggregate_train(1, replies)
    assert record_equal(our_arrays, flower_arrays)
    assert dict(our_metrics) == dict(flower_metrics)


def test_a_whole_run_equals_flowers_bit_for_bit():
    class InOrder(InProcessGrid):
        """Replies in order of partition, as our loop sums them."""

        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            return sorted(replies, key=lambda reply: reply.content["node"]["name"])

    ours = FedAvg().start(InOrder(toy_app(), 5), floats_only(), num_rounds=4)
    flowers = FlowersFedAvg().start(InOrder(toy_app(), 5), floats_only(), num_rounds=4)
    assert record_equal(ours.arrays, flowers.arrays)
    assert ours.train_metrics_clientapp == flowers.train_metrics_clientapp
    assert ours.evaluate_metrics_clientapp == flowers.evaluate_metrics_clientapp


def test_the_result_does_not_depend_on_the_order_of_arrival():
    class Shuffled(InProcessGrid):
        def collect(self, message_ids, *, timeout):
            return reversed(list(super().collect(message_ids, timeout=timeout)))

    forwards = start(FedAvg(), InProcessGrid(toy_app(), 9), rounds=3)
    backwards = start(FedAvg(), Shuffled(toy_app(), 9), rounds=3)
    assert record_equal(forwards.arrays, backwards.arrays)


def test_a_method_called_by_itself_takes_the_first_reply_as_the_pattern(grid):
    outgoing = FedAvg().configure_train(1, initial_arrays(), ConfigRecord(), grid)
    arrays, _ = FedAvg().aggregate_train(1, grid.send_and_receive(outgoing))
    assert arrays["weight"].numpy() == pytest.approx(small_model()["weight"] + 55 / 15)
    empty = Message(RecordDict(), reply_to=outgoing[0])
    with pytest.raises(RoundFailedError, match="no readable model"):
        FedAvg().aggregate_train(1, [empty])


# --- names -------------------------------------------------------------------------------------


def test_two_nodes_with_one_name_are_told_apart():
    def claim_to_be_zero(message, context):
        reply = train_reply(message, context)
        reply.content["node"] = pack_name("0")["node"]
        return reply

    result = start(FedAvg(), Nameless(toy_app({1: claim_to_be_zero}), 3), rounds=1)
    names = result.history[1].nodes_answered
    assert len(set(names)) == 3
    assert any(name.startswith("0#") for name in names)


# --- waiting --------------------------------------------------------------------------------


class Late(InProcessGrid):
    """Nodes that connect after a while."""

    def __init__(self, app, nodes, empty_looks):
        super().__init__(app, nodes)
        self.empty_looks = empty_looks

    def get_node_ids(self):
        self.empty_looks -= 1
        return set() if self.empty_looks >= 0 else super().get_node_ids()


class Clock:
    """A clock that only waiting moves on."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(nodes, "time", clock)
    return clock


def test_the_loop_waits_for_nodes_that_are_late(clock):
    result = start(FedAvg(wait_seconds=5), Late(toy_app(), 3, empty_looks=3), rounds=1)
    assert len(result.history[1].nodes_answered) == 3


def test_waiting_ends_with_a_clear_error(grid, clock):
    with pytest.raises(NotEnoughNodesError, match=r"5 nodes are connected after 7 s.* is 6"):
        start(FedAvg(min_nodes=6, wait_seconds=7), grid)
    assert 7 <= clock.now < 8


def test_fewer_nodes_than_expected_are_enough_if_they_are_the_minimum(grid, caplog, clock):
    result = start(FedAvg(wait_for_nodes=9, wait_seconds=0.05), grid, rounds=1)
    assert len(result.history[1].nodes_answered) == 5
    assert "event=too_few_nodes connected=5 wanted=9" in caplog.text


# --- faults ---------------------------------------------------------------------------------


def raises(message, context):
    raise RuntimeError("no data here")


def returns_nothing(message, context):
    return None


def sleeps(message, context):
    threading.Event().wait()


def sends_nan(message, context):
    return train_reply(message, context, arrays={"bias": np.array([0.0, np.nan])})


def sends_another_shape(message, context):
    return train_reply(message, context, arrays={"bias": np.zeros(3)})


def sends_no_metrics(message, context):
    reply = train_reply(message, context)
    del reply.content["metrics"]
    return reply


FAULTS = {
    raises: "no data here",
    returns_nothing: "no reply within 0.2 s",
    sleeps: "no reply within 0.2 s",
    sends_nan: "array 'bias' holds NaN or infinity",
    sends_another_shape: r"array 'bias' has shape (3,), expected (2,)",
    sends_no_metrics: "expected one MetricRecord",
}


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
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


def test_all_faults_at_once():
    app, sleeper = toy_app(dict(enumerate(FAULTS)), guarded=False), list(FAULTS).index(sleeps)
    grid = Impatient(app, len(FAULTS) + 2, hurried=[sleeper])
    record = start(FedAvg(fraction_evaluate=0.0), grid, rounds=1, timeout=0.2).history[1]
    assert {f.node for f in record.failures} == {str(k) for k in range(len(FAULTS))}
    assert record.nodes_answered == ("6", "7")


def test_a_node_that_failed_is_asked_again_in_the_next_round():
    calls = []

    def fails_once(message, context):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not yet")
        return train_reply(message, context)

    grid = InProcessGrid(toy_app({1: fails_once}), 3)
    result = start(FedAvg(fraction_evaluate=0.0), grid, rounds=2)
    assert [r.nodes_answered for r in result.history[1:]] == [("0", "2"), ("0", "1", "2")]


def test_too_few_usable_replies_fail_the_round_and_nothing_is_lost(tmp_path):
    grid = InProcessGrid(toy_app({0: raises, 1: sends_nan}), 3)
    with pytest.raises(RoundFailedError) as caught:
        start(FedAvg(min_nodes=2, checkpoint_dir=tmp_path), grid)
    text = str(caught.value)
    assert "round 1 failed: 1 of 3 nodes gave a usable reply, min_nodes is 2" in text
    assert "node 0: " in text
    assert "node 1: array 'bias' holds NaN" in text
    assert "resume=True" in text
    assert [answer.node for answer in caught.value.replies] == ["2"]
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
    strategy = FedAvg(fraction_evaluate=0.0, min_nodes=3, checkpoint_dir=tmp_path, resume=True)
    result = start(strategy, mended, rounds=1)
    assert asked_nodes == [2, 0, 1]
    assert mended.total.messages_down == 2
    whole = start(FedAvg(), InProcessGrid(toy_app(), 3), rounds=1)
    assert record_equal(result.arrays, whole.arrays)


def test_what_a_node_says_cannot_forge_a_line_of_the_log(caplog):
    log_event("left_out", node="1", reason='x\nevent=end failures=0 "')
    line = caplog.records[-1].getMessage()
    assert line == 'event=left_out node=1 reason="x\\nevent=end failures=0 \\""'


def test_an_uncalled_for_reply_is_dropped(caplog):
    class Chatty(InProcessGrid):
        def collect(self, message_ids, *, timeout):
            for reply in super().collect(message_ids, timeout=timeout):
                yield reply
                yield reply

    result = start(FedAvg(), Chatty(toy_app(), 3), rounds=1)
    assert weight(result) == pytest.approx(small_model()["weight"] + 14 / 6)
    assert "event=uncalled_for_reply round=1" in caplog.text


def test_nodes_that_cannot_evaluate_do_not_end_the_run():
    app = ClientApp()
    app.train()(train_reply)
    result = start(FedAvg(), InProcessGrid(app, 2), rounds=1)
    assert result.evaluate_metrics_clientapp == {}
    assert {f.node for f in result.history[1].failures} == {"0", "1"}


# --- evaluation, stopping, callbacks --------------------------------------------------------


def growing(server_round, arrays):
    return MetricRecord(
        {"accuracy": min(0.5, 0.1 * server_round), "loss": 1.0 / (server_round + 1)}
    )


def test_the_server_evaluates_before_the_first_round_and_after_each(grid):
    result = start(FedAvg(), grid, rounds=3, evaluate_fn=growing)
    assert [m["accuracy"] for m in result.evaluate_metrics_serverapp.values()] == pytest.approx(
        [0.0, 0.1, 0.2, 0.3]
    )


def test_nodes_evaluate_the_new_model_unless_that_is_switched_off(grid):
    """After round 1 the mean weight is 2.5 + 55/15."""
    result = start(FedAvg(), grid, rounds=1)
    assert result.evaluate_metrics_clientapp[1]["mean_weight"] == pytest.approx(2.5 + 55 / 15)


def test_evaluation_that_is_switched_off_sends_nothing(grid):
    metered = MeteredGrid(grid)
    start(FedAvg(fraction_evaluate=0.0), metered, rounds=2)
    assert metered.total.messages_down == 10


@pytest.mark.parametrize(
    ("rule", "rounds", "reason"),
    [
        (TargetReached(0.25), 3, "accuracy 0.3000 reached the target 0.25"),
        (TargetReached(0.3, metric="loss", goal="min"), 3, "loss 0.2500 reached"),
        (PatienceExhausted(3), 8, "accuracy has not improved for 3 rounds"),
        (TargetReached(0.9), 12, "all rounds are done"),
        (TargetReached(0.9, metric="unheard-of"), 12, "all rounds are done"),
        (PatienceExhausted(1, metric="unheard-of"), 12, "all rounds are done"),
    ],
)
def test_stop_rules_end_the_run_and_say_why(grid, rule, rounds, reason):
    result = start(FedAvg(stop_rules=[rule]), grid, rounds=12, evaluate_fn=growing)
    assert result.history[-1].round == rounds
    assert reason in result.stopped_because
    assert reason in repr(result)


def test_a_run_ends_after_the_round_for_which_should_stop_says_so(grid):
    heard = []

    def enough(server_round, result):
        heard.append((server_round, result.history[-1].round, dict(result.train_metrics_clientapp)))
        return result.evaluate_metrics_serverapp[server_round]["accuracy"] >= 0.2

    result = start(FedAvg(), grid, rounds=9, evaluate_fn=growing, should_stop=enough)
    assert result.history[-1].round == 2
    assert result.stopped_because == "should_stop said so after round 2"
    assert [(number, last, len(metrics)) for number, last, metrics in heard] == [
        (1, 1, 1),
        (2, 2, 2),
    ]
    # It speaks for every strategy, and is never asked before there is a round.
    started = start(OneShotAverage(), grid, should_stop=lambda number, result: number == 1)
    assert started.history[-1].round == 1


def test_a_resumed_run_that_should_stop_plays_no_further_round(grid, tmp_path):
    def enough(server_round, result):
        return server_round >= 2

    first = start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=5, should_stop=enough)
    metered = MeteredGrid(grid)
    again = start(
        FedAvg(checkpoint_dir=tmp_path, resume=True), metered, rounds=5, should_stop=enough
    )
    assert metered.total.messages_down == 0
    assert again.stopped_because == first.stopped_because
    assert record_equal(again.arrays, first.arrays)


def test_the_nodes_metrics_serve_stop_rules_where_the_server_has_none():
    record = RoundRecord(1, train_metrics={"accuracy": 0.1}, evaluate_metrics={"accuracy": 0.9})
    assert TargetReached(0.5)([record])


@pytest.mark.parametrize(
    "make",
    [
        lambda: TargetReached(0.5, goal="up"),
        lambda: PatienceExhausted(0),
        lambda: PatienceExhausted(1, goal="down"),
        lambda: FedAvg(fraction_train=1.5),
        lambda: FedAvg(fraction_evaluate=-0.1),
        lambda: FedAvg(min_nodes=0),
        lambda: FedAvg(min_nodes=3, wait_for_nodes=2),
        lambda: FedAvg(wait_seconds=-1),
        lambda: FedAvg(seed=-1),
        lambda: FedAvg(resume=True),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"must|needs"):
        make()


def test_callbacks_hear_everything_in_order(grid):
    heard = []

    class Listener(Callback):
        def on_start(self, strategy, num_rounds, finished_rounds):
            heard.append(("start", strategy, num_rounds, finished_rounds))

        def on_exchange(self, server_round, nodes):
            heard.append(("exchange", server_round, nodes))

        def on_reply(self, server_round, node, usable):
            heard.append(("reply", server_round, usable))

        def on_round_end(self, record):
            heard.append(("round", record.round))

        def on_end(self, result):
            heard.append(("end", len(result.history)))

    start(FedAvg(fraction_evaluate=0.0, callbacks=[Listener(), Callback()]), grid, rounds=1)
    replies = [("reply", 1, True)] * 5
    assert heard == [
        ("start", "FedAvg", 1, 0),
        ("exchange", 1, 5),
        *replies,
        ("round", 1),
        ("end", 2),
    ]


def test_a_one_round_strategy_plays_one_round_whatever_it_is_told(grid):
    assert start(OneShotAverage(), grid, rounds=5).history[-1].round == 1


def test_the_settings_are_logged(grid, caplog):
    caplog.set_level(logging.INFO, "flwr")
    start(FedAvg(min_nodes=4), grid, rounds=1)
    assert "event=settings min_nodes=4" in caplog.text
    assert "event=round_end round=1 asked=5 answered=5 bytes_up=" in caplog.text


def test_rounds_carry_their_own_traffic(grid):
    result = start(FedAvg(fraction_evaluate=0.0), grid, rounds=3)
    assert [record.traffic.messages_up for record in result.history] == [0, 5, 5, 5]
    model = initial_arrays().count_bytes()
    assert result.traffic.bytes_up > 3 * 5 * model
    assert len({record.traffic for record in result.history[1:]}) == 1


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
    def strategy(**kwargs):
        return FedAvg(fraction_train=0.5, fraction_evaluate=0.5, seed=3, **kwargs)

    unbroken = start(strategy(), InProcessGrid(toy_app(), 8), rounds=6, evaluate_fn=growing)
    with pytest.raises(Killed):
        start(
            strategy(checkpoint_dir=tmp_path, callbacks=[KillAfter(3)]),
            InProcessGrid(toy_app(), 8),
            rounds=6,
            evaluate_fn=growing,
        )
    resumed = start(
        strategy(checkpoint_dir=tmp_path, resume=True),
        InProcessGrid(toy_app(), 8),
        rounds=6,
        evaluate_fn=growing,
    )
    assert record_equal(resumed.arrays, unbroken.arrays)
    assert without_seconds(resumed) == without_seconds(unbroken)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(7))


class Witness(Callback):
    """Notes how a run was set up, and how it ended otherwise than by `on_end`."""

    def __init__(self):
        self.errors = []

    def on_setup(self, settings, history):
        self.settings, self.known = dict(settings), [record.round for record in history]

    def on_error(self, error):
        self.errors.append(error)
        raise RuntimeError("a callback's own trouble does not hide the run's")


def test_callbacks_hear_of_settings_earlier_rounds_and_the_error_that_ends_a_run(tmp_path):
    grid, first, second = InProcessGrid(toy_app(), 4), Witness(), Witness()
    killer = FedAvg(seed=5, checkpoint_dir=tmp_path, callbacks=[first, KillAfter(2), Callback()])
    with pytest.raises(Killed):
        start(killer, grid, rounds=3)
    assert (first.settings["seed"], first.settings["resume"], first.known) == (5, False, [0])
    assert [type(error) for error in first.errors] == [Killed]
    resumed = FedAvg(seed=5, checkpoint_dir=tmp_path, resume=True, callbacks=[second])
    start(resumed, InProcessGrid(toy_app(), 4), rounds=3)
    assert (second.known, second.errors) == ([0, 1, 2], [])


def test_a_run_killed_within_a_round_does_not_ask_the_others_again(tmp_path):
    """Node 3 is the last to be asked; the server dies while it works."""

    def die(message, context):
        raise Killed

    class Mortal(InProcessGrid):
        def collect(self, message_ids, *, timeout):
            for reply in super().collect(message_ids, timeout=timeout):
                if reply.has_error() and "Killed" in reply.error.reason:
                    raise Killed
                yield reply

    with pytest.raises(Killed):
        start(
            FedAvg(checkpoint_dir=tmp_path), Mortal(toy_app({3: die}, guarded=False), 4), rounds=2
        )
    metered = MeteredGrid(InProcessGrid(toy_app(), 4))
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=tmp_path, resume=True)
    resumed = start(strategy, metered, rounds=2)
    unbroken = start(FedAvg(), InProcessGrid(toy_app(), 4), rounds=2)
    assert record_equal(resumed.arrays, unbroken.arrays)
    assert metered.by_round[1].messages_down < 4


def test_replies_are_not_kept_when_that_is_switched_off(tmp_path):
    grid = InProcessGrid(toy_app({0: raises}), 2)
    with pytest.raises(RoundFailedError) as caught:
        start(FedAvg(min_nodes=2, checkpoint_dir=tmp_path, keep_replies=False), grid)
    assert not (tmp_path / "inbox").exists()
    assert "resume" not in str(caught.value)


def test_a_finished_run_that_is_resumed_sends_nothing(tmp_path, grid):
    first = start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=2)
    metered = MeteredGrid(grid)
    again = start(FedAvg(checkpoint_dir=tmp_path, resume=True), metered, rounds=2)
    assert metered.total.messages_down == 0
    assert record_equal(first.arrays, again.arrays)
    longer = start(FedAvg(checkpoint_dir=tmp_path, resume=True), grid, rounds=3)
    assert [record.round for record in longer.history] == [0, 1, 2, 3]


def test_without_resume_an_old_checkpoint_is_forgotten(tmp_path, grid):
    start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=3)
    fresh = start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=1)
    assert [record.round for record in fresh.history] == [0, 1]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (FedAvg(seed=9), "seed 0, this run has 9"),
        (OneShotAverage(), "strategy FedAvg, this run has OneShotAverage"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(tmp_path, grid, other, words):
    start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=1)
    other.checkpoint_dir, other.resume = tmp_path, True
    with pytest.raises(CheckpointError, match=words):
        start(other, grid)


def test_the_checkpoint_of_another_model_is_refused(tmp_path, grid):
    start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=1)
    with pytest.raises(CheckpointError, match="with model"):
        FedAvg(checkpoint_dir=tmp_path, resume=True).start(grid, floats_only())


def test_a_line_written_after_the_last_checkpoint_is_dropped_and_a_missing_one_refused(
    tmp_path, grid
):
    start(FedAvg(checkpoint_dir=tmp_path), grid, rounds=2)
    path = tmp_path / "rounds.jsonl"
    lines = path.read_text()
    path.write_text(lines + '{"round": 3, "torn')
    resumed = start(FedAvg(checkpoint_dir=tmp_path, resume=True), grid, rounds=3)
    assert [record.round for record in resumed.history] == [0, 1, 2, 3]
    path.write_text(lines.splitlines()[0] + "\n")
    with pytest.raises(CheckpointError, match="does not fit the checkpoint"):
        start(FedAvg(checkpoint_dir=tmp_path, resume=True), grid, rounds=4)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rounds.jsonl cannot be read"):
        start(FedAvg(checkpoint_dir=tmp_path, resume=True), grid, rounds=4)


def test_a_round_record_survives_json():
    record = RoundRecord(
        2,
        seconds=0.5,
        nodes_asked=("0", "1"),
        nodes_answered=("0",),
        failures=(Failure("1", "asleep"),),
        server_metrics={"accuracy": 0.5},
    )
    assert RoundRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
