"""Protocols whose models live on the nodes, over the in-process grid."""

import json

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp
from helpers_learners import fail, initial, start_model, walk, walking_app

from gems_flwr.averaging.distances import squared_distance
from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.errors import RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.members import split_members
from gems_flwr.server.settings import Callback
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.nosync import NoSync
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.strategies.serial import Serial
from gems_flwr.wire.asking import ask_for_averaging, wants_name
from gems_flwr.wire.model_replies import pack_instruction, pack_name, unpack_name
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.requests import AveragingRequest


def play(strategy, app=None, nodes=5, rounds=12, grid=None, size=3):
    grid = grid or InProcessGrid(app or walking_app(size=size), nodes)
    return strategy.start(grid, initial(size), num_rounds=rounds)


def walked(node, rounds, size=3):
    return sum(walk(node, r, size) for r in rounds)


def mean_walk(nodes, rounds, weights=None):
    return np.average([walked(n, rounds) for n in nodes], axis=0, weights=weights)


# --- what every protocol comes to ---------------------------------------------------------------

PROTOCOLS = [
    DynamicAveraging(delta=0.05),
    DynamicAveraging(delta=0.05, check_every=3, augmentation="random"),
    DynamicAveraging(delta=0.05, condition="total", augmentation="all"),
    DynamicAveraging(delta=0.05, order="nearest"),
    DynamicAveraging(delta=0.1, target_rate=0.5),
    DynamicAveraging(delta=0.05, follow_loss=0.5),
    DynamicAveraging(delta=1e9),
    PeriodicAveraging(b=1),
    PeriodicAveraging(b=5),
    PeriodicAveraging(b=4, fraction=0.5),
]


@pytest.mark.parametrize("strategy", PROTOCOLS, ids=lambda s: f"{type(s).__name__}")
def test_the_last_synchronisation_gives_the_mean_of_all_models(strategy):
    """Steps do not depend on the model, so whatever is averaged when, the mean walks alike."""
    result = play(strategy)
    assert result.arrays["w"].numpy() == pytest.approx(mean_walk(range(5), range(1, 13)))
    assert result.arrays["steps"].numpy() == 0


@pytest.mark.parametrize("strategy", [*PROTOCOLS, NoSync()], ids=lambda s: f"{type(s).__name__}")
def test_losses_are_summed_over_nodes_and_batches(strategy):
    """Node k reports k + t in round t: Σ_t Σ_k (k + t) = 12·(0+…+4) + 5·(1+…+12) = 510."""
    details = play(strategy).details
    assert details["cumulative_loss"] == 510
    assert details["batches"] == 60
    assert details["correct"] == 30
    assert details["node_loss"]["4"] == 12 * 4 + 78
    json.dumps(details)


def test_weights_are_the_samples_of_a_round():
    """Node k has k + 1 samples."""
    result = play(PeriodicAveraging(b=4, weighted=True))
    # Between averagings of all nodes the weighted mean walks by the weighted mean of the steps.
    expected = mean_walk(range(5), range(1, 13), weights=[1, 2, 3, 4, 5])
    assert result.arrays["w"].numpy() == pytest.approx(expected)


def test_periodic_averaging_moves_two_models_per_node_and_period():
    """Rounds 4 and 8: five up each; the first model, and the averages of 4 and 8, five down each.

    The average of round 12 stays pending without a last synchronisation.
    """
    details = play(PeriodicAveraging(b=4, final_sync=False)).details
    assert details["models_up"] == 15
    assert details["models_down"] == 15
    assert details["synchronisations"] == ((4, 5), (8, 5), (12, 5))


def test_a_fraction_is_averaged_and_the_others_go_on_alone():
    details = play(PeriodicAveraging(b=4, fraction=0.4, final_sync=False), nodes=5).details
    assert [count for _, count in details["synchronisations"]] == [2, 2, 2]
    assert details["full_synchronisations"] == ()


def test_without_synchronisation_all_models_are_kept_side_by_side():
    result = play(NoSync(report_every=5))
    members = split_members(to_numpy(result.arrays))
    for node, arrays in members.items():
        assert arrays["w"] == pytest.approx(walked(int(node), range(1, 13)))
        assert arrays["steps"] == 12
    assert result.details["models_up"] == 5
    assert NoSync().score([np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]])], np.array([1]))[
        "accuracy"
    ] == pytest.approx(0.5)


# --- bytes --------------------------------------------------------------------------------------


def test_a_quiet_round_moves_no_model():
    """500 weights are 4,000 bytes; a quiet message has some hundred."""
    grid = MeteredGrid(InProcessGrid(walking_app(size=500), 5))
    play(DynamicAveraging(delta=1e9, final_sync=False), grid=grid, size=500, rounds=6)
    first, *quiet = [grid.by_round[r] for r in range(1, 7)]
    assert first.bytes_down > 5 * 4000
    assert all(t.bytes_up < 5 * 250 and t.bytes_down < 5 * 250 for t in [*quiet])


def test_only_violators_and_those_asked_send_their_models():
    """Node 0 takes a step of length √3·10, the others stay near: it alone sends, one is asked.

    (10, 10, 10) and about 0 have a mean of squared norm 75 > 40; with three it is about 33.
    """
    app = walking_app({(0, 2): lambda model: {**model, "w": np.full(3, 10.0)}})
    result = play(DynamicAveraging(delta=40, final_sync=False), app, nodes=9, rounds=2)
    assert result.details["violations"] == 1
    assert result.details["models_up"] == 4  # doubling: one, then two more
    assert result.details["queries"] == 3
    assert result.details["synchronisations"] == ((2, 4),)


def test_messages_go_out_only_when_a_check_is_due():
    calls = []
    grid = MeteredGrid(InProcessGrid(walking_app(calls=calls), 3))
    play(DynamicAveraging(delta=1e9, check_every=4, final_sync=False), grid=grid, rounds=10)
    assert sorted(r for r, t in grid.by_round.items() if t.messages_down) == [4, 8, 10]
    # Every handler saw every round, as if it had been asked round by round.
    assert sorted(calls) == [(node, r) for node in range(3) for r in range(1, 11)]


# --- faults -------------------------------------------------------------------------------------


def test_a_node_that_fails_is_out_of_the_round_and_keeps_its_state():
    app = walking_app({(1, 3): fail})
    result = play(PeriodicAveraging(b=1), app, nodes=3, rounds=5)
    assert [(number, f.node) for number, f in result.failures] == [(3, "1")]
    assert "the disk is full" in result.failures[0][1].reason
    # Its step of round 3 never happened. The others' average of round 3 has two members; node 1
    # still got the average of round 2 in round 4, because it had not acknowledged it.
    up_to_2 = mean_walk(range(3), [1, 2])
    two = up_to_2 + (walk(0, 3, 3) + walk(2, 3, 3)) / 2
    expected = (2 * two + up_to_2) / 3 + mean_walk(range(3), [4, 5])
    assert result.arrays["w"].numpy() == pytest.approx(expected)
    assert result.details["lost_states"] == ()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda model: {**model, "w": model["w"] * np.nan}, "array 'w' holds NaN"),
        (lambda model: {**model, "w": np.ones(4) * 9}, "shape"),
    ],
    ids=["nan", "shape"],
)
def test_an_unusable_model_is_rejected_by_name_and_the_node_begins_anew(bad, words):
    app = walking_app({(2, 2): bad})
    result = play(DynamicAveraging(delta=0.01, augmentation="all"), app, nodes=4, rounds=6)
    assert {(number, f.node) for number, f in result.failures} == {(2, "2")}
    assert words in result.failures[0][1].reason
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert len(result.history[3].nodes_answered) == 4


def test_too_few_usable_replies_fail_the_round():
    app = walking_app({(n, 2): fail for n in range(3)})
    with pytest.raises(RoundFailedError, match="1 of 4 nodes"):
        play(DynamicAveraging(delta=1, min_nodes=2), app, nodes=4)


class Forgetful(InProcessGrid):
    """Its first node restarts, without its state, before a round."""

    def __init__(self, app, nodes, before_round):
        super().__init__(app, nodes)
        self.before_round = before_round

    def push_messages(self, messages):
        messages = list(messages)
        if any(m.content["config"]["server-round"] == self.before_round for m in messages):
            self._states.pop(self.node(0), None)
            self.before_round = None
        return super().push_messages(messages)

    def node(self, number):
        return next(i for i, c in self._configs.items() if c["partition-id"] == number)


def test_a_node_that_lost_its_state_says_so_and_begins_from_the_reference():
    grid = Forgetful(walking_app(), 3, before_round=3)
    result = play(DynamicAveraging(delta=1e9), grid=grid, rounds=4)
    assert result.details["lost_states"] == ((3, "0"),)
    # Nodes 1 and 2 walked all the way; node 0 has walked since round 3 from the initial model.
    expected = (walked(0, [3, 4]) + walked(1, range(1, 5)) + walked(2, range(1, 5))) / 3
    assert result.arrays["w"].numpy() == pytest.approx(expected)
    assert result.failures == ()


class Nameless(InProcessGrid):
    """Knows its nodes by their ids only; they are too slow to say their names when asked."""

    def get_nodes(self):
        return []

    def _deliver(self, message, timeout):
        return None if wants_name(message.content) else super()._deliver(message, timeout)


@pytest.mark.parametrize("delta", [1e9, 0.01])
def test_nodes_that_tell_their_names_only_with_their_replies_are_the_same_nodes(delta):
    """Nobody knows who they are before: as if they all had been under load."""
    known = play(DynamicAveraging(delta=delta, augmentation="all"), rounds=4)
    nameless = Nameless(walking_app(), 5)
    result = play(DynamicAveraging(delta=delta, augmentation="all"), grid=nameless, rounds=4)
    assert result.arrays["w"].numpy() == pytest.approx(known.arrays["w"].numpy())
    assert result.details["models_up"] == known.details["models_up"]
    assert result.details["models_down"] == known.details["models_down"]
    assert result.details["lost_states"] == ()
    assert result.failures == ()


class Absent(InProcessGrid):
    """Its first node does not answer in some rounds."""

    def __init__(self, app, nodes, rounds):
        super().__init__(app, nodes)
        self.rounds = rounds

    def _deliver(self, message, timeout):
        away = message.content["config"]["server-round"] in self.rounds
        number = self._configs[message.metadata.dst_node_id]["partition-id"]
        return None if away and number == 0 else super()._deliver(message, timeout)


def test_a_node_that_missed_a_full_synchronisation_gets_the_reference_before_its_next_check():
    class Watching(Absent):
        def _deliver(self, message, timeout):
            seen.append((message.content["config"]["server-round"], set(message.content)))
            return super()._deliver(message, timeout)

    seen = []
    grid = Watching(walking_app(), 3, rounds=[2])
    strategy = DynamicAveraging(delta=0.001, augmentation="all", final_sync=False)
    result = play(strategy, grid=grid, rounds=3)
    assert [(n, f.node) for n, f in result.failures] == [(2, "0")]
    # Round 1 was a full synchronisation that node 0 took part in and has yet to be told of; of
    # round 2 it has missed the new reference. Both come in round 3: the other nodes get one model.
    sent = [keys & {"arrays", "reference"} for number, keys in seen if number == 3]
    assert sum(len(each) for each in sent[:3]) == 4


def test_an_outdated_message_changes_nothing():
    app = walking_app()
    grid = InProcessGrid(app, 1)
    (node,) = grid.get_node_ids()

    def ask(server_round, **request):
        content = pack_instruction(None, {}, server_round=server_round, seed=0)
        full = {"run": "r", "model": 1, "reference": 0, "adopt": True, **request}
        model = initial() if full["adopt"] else None
        ask_for_averaging(content, AveragingRequest(**full), model)
        message = Message(content, dst_node_id=node, message_type="train")
        (reply,) = grid.send_and_receive([message])
        return reply

    def weights():
        reply = ask(9, steps=0, send="always", adopt=False)
        return reply.content["arrays"]["w"].numpy()

    ask(9)
    before = weights()
    late = ask(8, model=5)
    assert "round 8 came after round 9" in late.error.reason
    # The same round once more is answered without training, and the model is not taken over again.
    assert not ask(9).has_error()
    assert np.array_equal(weights(), before)
    # Another run is another matter.
    assert not ask(1, run="other").has_error()


# --- resuming, order ----------------------------------------------------------------------------


class StopAfter(Callback):
    def __init__(self, number):
        self.number = number

    def on_round_end(self, record):
        if record.round == self.number:
            raise KeyboardInterrupt


@pytest.mark.parametrize("keep_replies", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: DynamicAveraging(delta=0.05, **kw),
        lambda **kw: DynamicAveraging(delta=0.05, check_every=2, target_rate=0.5, **kw),
        lambda **kw: DynamicAveraging(delta=0.05, follow_loss=0.5, **kw),
        lambda **kw: PeriodicAveraging(b=3, fraction=0.5, **kw),
    ],
    ids=["dynamic", "rate", "loss", "periodic"],
)
def test_a_resumed_run_equals_the_unbroken_one(make, keep_replies, tmp_path):
    """The nodes have gone on living while the server was away."""
    unbroken = play(make())
    grid = InProcessGrid(walking_app(), 5)
    options = {"checkpoint_dir": tmp_path, "keep_replies": keep_replies}
    with pytest.raises(KeyboardInterrupt):
        play(make(callbacks=[StopAfter(7)], **options), grid=grid)
    resumed = play(make(resume=True, **options), grid=grid)
    assert np.array_equal(resumed.arrays["w"].numpy(), unbroken.arrays["w"].numpy())
    assert resumed.details == unbroken.details


def test_an_interrupted_round_trains_nobody_twice(tmp_path):
    """The server dies in the middle of round 3, after two nodes have trained."""

    class DiesOnce(InProcessGrid):
        dead = False

        def _deliver(self, message, timeout):
            if message.content["config"]["server-round"] == 3 and not self.dead:
                self.count = getattr(self, "count", 0) + 1
                if self.count == 3:
                    self.dead = True
                    raise KeyboardInterrupt
            return super()._deliver(message, timeout)

    calls = []
    grid = DiesOnce(walking_app(calls=calls), 4)
    options = {"delta": 0.05, "checkpoint_dir": tmp_path, "keep_replies": False}
    with pytest.raises(KeyboardInterrupt):
        play(DynamicAveraging(**options), grid=grid, rounds=5)
    resumed = play(DynamicAveraging(resume=True, **options), grid=grid, rounds=5)
    assert len(calls) == len(set(calls)) == 4 * 5
    unbroken = play(DynamicAveraging(delta=0.05), nodes=4, rounds=5)
    assert np.array_equal(resumed.arrays["w"].numpy(), unbroken.arrays["w"].numpy())


def test_the_result_does_not_depend_on_the_order_of_arrival():
    class Backwards(InProcessGrid):
        def collect(self, message_ids, *, timeout):
            return reversed(list(super().collect(message_ids, timeout=timeout)))

    for strategy in (DynamicAveraging(delta=0.05), PeriodicAveraging(b=2)):
        one = play(strategy, grid=InProcessGrid(walking_app(), 7))
        other = play(strategy, grid=Backwards(walking_app(), 7))
        assert np.array_equal(one.arrays["w"].numpy(), other.arrays["w"].numpy())
        assert one.details == other.details


# --- thresholds that move -----------------------------------------------------------------------


def deltas(result):
    return [record.train_metrics["delta"] for record in result.history[1:]]


def test_a_target_rate_steers_the_threshold_until_it_is_met():
    strategy = DynamicAveraging(delta=0.001, target_rate=0.5, augmentation="all", final_sync=False)
    result = play(strategy, rounds=150)
    late = [r.train_metrics["synchronised"] for r in result.history[-80:]]
    assert 2 * np.mean(late) / 5 == pytest.approx(0.5, abs=0.15)
    assert deltas(result)[-1] > 10 * 0.001


def test_a_threshold_that_follows_the_loss_rises_with_it():
    """The toy's loss of round t is t + 2 on average, three times the first at t = 7."""
    seen = deltas(play(DynamicAveraging(delta=0.5, follow_loss=1.0), rounds=10))
    assert seen[0] == 0.5
    assert sorted(seen) == seen
    assert seen[-1] > 0.5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DynamicAveraging(delta=0), "delta must be"),
        (lambda: DynamicAveraging(check_every=0), "must be >= 1, got 0"),
        (lambda: DynamicAveraging(fraction_train=0.5), "fraction_train must be 1"),
        (lambda: DynamicAveraging(target_rate=3), "target_rate must be in"),
        (lambda: DynamicAveraging(follow_loss=-1), "follow_loss must be"),
        (lambda: DynamicAveraging(follow_loss=1, target_rate=1), "cannot both"),
        (lambda: PeriodicAveraging(b=0), "must be >= 1, got 0"),
        (lambda: PeriodicAveraging(fraction=0), "fraction must be"),
        (lambda: NoSync(report_every=0), "must be >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# --- the mod and the reference run --------------------------------------------------------------


def test_the_mod_does_nothing_for_other_strategies(grid):
    calls = []
    app = ClientApp(mods=[dynamic_averaging_mod()])

    @app.train()
    def train(message, context):
        calls.append(message.content)
        return Message(pack_name("x"), reply_to=message)

    content = pack_instruction(initial(), {}, server_round=1, seed=0)
    inner = InProcessGrid(app, 1)
    (node,) = inner.get_node_ids()
    (reply,) = inner.send_and_receive([Message(content, node, "train")])
    assert unpack_name(reply.content) == "x"
    assert "arrays" in calls[0]


def test_a_node_keeps_its_counters_when_it_is_given_an_average():
    """The handler counts its steps in an integer array: three rounds, three averages, three."""
    result = play(NoSync(), rounds=3)
    assert split_members(to_numpy(result.arrays))["0"]["steps"] == 3
    seen = []
    app = walking_app({(0, 3): lambda model: seen.append(model["steps"]) or model})
    play(PeriodicAveraging(b=1), app, rounds=3)
    assert seen[0] == 3


def test_the_server_and_the_nodes_measure_the_same_distance():
    """Buffers named to the strategy are told to the nodes."""
    app = walking_app({(n, 2): lambda m: {**m, "w": m["w"] + 100} for n in range(3)})
    result = play(DynamicAveraging(delta=1, buffers=("w",), final_sync=False), app, nodes=3)
    assert result.details["violations"] == 0
    assert squared_distance(start_model(), {"w": np.ones(3)}, ignore=["w"]) == 0


def test_a_serial_learner_sends_nothing():
    def learn(server_round, arrays, memory):
        metrics = {"loss-sum": 2.0, "batches": 4.0, "correct-share-sum": 1.0}
        kept = {"t": memory.get("t", np.zeros(1)) + 1}
        return {**arrays, "w": arrays["w"] + kept["t"]}, kept, metrics

    result = play(Serial(learn=learn), rounds=3)
    assert result.arrays["w"].numpy() == pytest.approx([6, 6, 6])
    assert result.details["cumulative_loss"] == 6
    assert result.traffic.bytes_down == 0
    with pytest.raises(NotImplementedError):
        Serial(learn=learn).aggregate([])
    with pytest.raises(NotImplementedError):
        NoSync().aggregate([])
