"""Protocols whose models live on the nodes, over the in-process grid."""

import json

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from helpers_learners import (
    Troubled,
    asks_for_name,
    fail,
    initial,
    mean_walk,
    walk,
    walked,
    walking_app,
)

from gems_flwr import (
    DynamicAveraging,
    InProcessGrid,
    MeteredGrid,
    NoSync,
    PeriodicAveraging,
    SecureSum,
    Serial,
)
from gems_flwr.core.records import pack_instruction, to_numpy
from gems_flwr.errors import BadReplyError
from gems_flwr.strategies.learner_questions import Learn, SendModel
from gems_flwr.strategies.members import split_models


def play(strategy, app=None, nodes=5, rounds=12, grid=None, size=3, **options):
    grid = grid or InProcessGrid(app or walking_app(size=size), nodes)
    return strategy.start(grid, initial(size), num_rounds=rounds, **options)


# --- what every protocol comes to ---------------------------------------------------------------

PROTOCOLS = [
    DynamicAveraging(delta=0.05),
    DynamicAveraging(delta=0.05, check_every=3, augmentation="random"),
    DynamicAveraging(delta=0.05, condition="total", augmentation="all"),
    PeriodicAveraging(b=5),
    PeriodicAveraging(b=4, fraction=0.5),
    NoSync(report_every=5),
]


@pytest.mark.parametrize("strategy", PROTOCOLS, ids=lambda s: type(s).__name__)
def test_the_last_synchronisation_gives_the_mean_of_all_models_and_the_sum_of_all_losses(strategy):
    """Steps do not depend on the model, so whatever is averaged when, the mean walks alike.

    Node k reports k + t in round t: Σ_t Σ_k (k + t) = 12·(0+…+4) + 5·(1+…+12) = 510.
    """
    result = play(strategy)
    if isinstance(strategy, NoSync):
        members = split_models(to_numpy(result.arrays))
        for node, arrays in members.items():
            assert arrays["w"] == pytest.approx(walked(int(node), range(1, 13)))
            assert arrays["steps"] == 12
        assert result.details["models_up"] == 5
    else:
        assert result.arrays["w"].numpy() == pytest.approx(mean_walk(range(5), range(1, 13)))
        assert result.arrays["steps"].numpy() == 0
    assert result.details["cumulative_loss"] == 510
    assert result.details["batches"] == 60
    assert result.details["correct"] == 30
    assert result.details["node_loss"]["4"] == 12 * 4 + 78
    json.dumps(result.details)


def test_periodic_averaging_moves_two_models_per_node_and_period():
    """Rounds 4 and 8: five up each; the first model, and the averages of 4 and 8, five down each.

    The average of round 12 stays pending without a last synchronisation.
    """
    details = play(PeriodicAveraging(b=4, final_sync=False)).details
    assert details["models_up"] == 15
    assert details["models_down"] == 15
    assert details["synchronisations"] == ((4, 5), (8, 5), (12, 5))


def test_a_node_keeps_its_counters_when_it_is_given_an_average():
    """The handler counts its steps in an integer array: three rounds, three averages, three."""
    seen = []
    app = walking_app({(0, 3): lambda model: seen.append(model["steps"]) or model})
    play(PeriodicAveraging(b=1), app, rounds=3)
    assert seen[0] == 3


# --- bytes --------------------------------------------------------------------------------------


def test_a_quiet_round_moves_no_model():
    """500 weights are 4,000 bytes; a quiet message has some hundred."""
    result = play(DynamicAveraging(delta=1e9, final_sync=False), size=500, rounds=6)
    first, *quiet = [record.traffic for record in result.history[1:]]
    assert first.bytes_down > 5 * 4000
    assert all(t.bytes_up < 5 * 200 and t.bytes_down < 5 * 250 for t in quiet)


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
    strategy = DynamicAveraging(delta=1e9, check_every=4, final_sync=False)
    result = play(strategy, walking_app(calls=calls), nodes=3, rounds=10)
    assert [r.round for r in result.history if r.traffic.messages_down] == [4, 8, 10]
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


LIES = [
    ({"squared-distance": -1.0}, "'squared-distance' is -1"),
    ({"squared-distance": None}, "'squared-distance' is missing"),
    ({"batches": -3}, "'batches' is -3"),
    ({"batches": 0.5}, "'batches' is 0.5"),
    ({"correct-share-sum": -1.0}, "'correct-share-sum' is -1"),
    ({"num-examples": 0}, "'num-examples' is 0"),
]


@pytest.mark.parametrize(("lie", "words"), LIES)
def test_what_a_learner_says_of_itself_is_checked(lie, words):
    honest = {"num-examples": 1, "squared-distance": 1.0, "batches": 1, "correct-share-sum": 0.5}
    metrics = {key: value for key, value in {**honest, **lie}.items() if value is not None}
    question = Learn("r", 0, 0, measure=True)
    with pytest.raises(BadReplyError, match=words):
        question.read(RecordDict({"metrics": MetricRecord(metrics)}))
    assert question.read(RecordDict({"metrics": MetricRecord(honest)})).squared_distance == 1


def test_a_node_that_lost_its_state_starts_from_the_reference_in_the_same_round():
    grid = Troubled(walking_app(), 3, forgets=[3])
    result = play(DynamicAveraging(delta=1e9), grid=grid, rounds=4)
    assert result.details["lost_states"] == ((3, "0"),)
    # Nodes 1 and 2 walked all the way; node 0 has walked since round 3 from the initial model.
    expected = (walked(0, [3, 4]) + walked(1, range(1, 5)) + walked(2, range(1, 5))) / 3
    assert result.arrays["w"].numpy() == pytest.approx(expected)
    assert result.failures == ()


@pytest.mark.parametrize("delta", [1e9, 0.01])
def test_nodes_that_say_their_names_only_with_their_replies_are_the_same_nodes(delta):
    """The grid knows their ids only, and they are too slow to say their names when asked."""

    class Nameless(InProcessGrid):
        def get_nodes(self):
            return []

        def _deliver(self, message, timeout):
            return None if asks_for_name(message) else super()._deliver(message, timeout)

    known = play(DynamicAveraging(delta=delta, augmentation="all"), rounds=4)
    nameless = Nameless(walking_app(), 5)
    result = play(DynamicAveraging(delta=delta, augmentation="all"), grid=nameless, rounds=4)
    assert result.arrays["w"].numpy() == pytest.approx(known.arrays["w"].numpy())
    for key in ("models_up", "models_down", "lost_states"):
        assert result.details[key] == known.details[key]
    assert result.failures == ()


def test_a_node_that_missed_a_full_synchronisation_gets_the_reference_before_its_next_check():
    grid = Troubled(walking_app(), 3, misses=[2])
    strategy = DynamicAveraging(delta=0.001, augmentation="all", final_sync=False)
    result = play(strategy, grid=grid, rounds=3)
    assert [(n, f.node) for n, f in result.failures] == [(2, "0")]
    # Round 1 was a full synchronisation whose average node 0 has yet to be given; of round 2 it
    # has missed the new reference. Both come in round 3: the other nodes get one model.
    sent = [content.keys() & {"arrays", "reference"} for r, _, content in grid.sent if r == 3]
    assert sum(len(each) for each in sent[:3]) == 4


def test_repeated_and_outdated_messages_change_nothing():
    grid = InProcessGrid(walking_app(), 1)
    (node,) = grid.get_node_ids()

    def ask(server_round, kind=Learn, model=1, run="r", adopt=True):
        question = kind(run, model, 0, adopt)
        content = pack_instruction(None, {}, server_round=server_round, seed=0)
        content.update(question.to_records())
        if adopt:
            content["arrays"] = initial()
        (reply,) = grid.send_and_receive([Message(content, node, "train")])
        return reply

    def weights():
        return ask(9, SendModel, adopt=False).content["arrays"]["w"].numpy()

    ask(9)
    before = weights()
    assert "round 8 came after round 9" in ask(8, model=5).error.reason
    # The same round once more is answered without training, and the model is not taken over again.
    assert not ask(9).has_error()
    assert np.array_equal(weights(), before)
    # Another run is another matter.
    assert not ask(1, run="other").has_error()


# --- resuming, order ----------------------------------------------------------------------------


def test_an_interrupted_round_trains_no_node_twice(tmp_path):
    """The server dies in the middle of round 3, after two nodes have trained."""
    calls = []
    unbroken = play(
        DynamicAveraging(delta=0.05), grid=(whole := Troubled(walking_app(), 4)), rounds=5
    )
    at = next(i for i, (r, *_) in enumerate(whole.sent, 1) if r == 3) + 1
    grid = Troubled(walking_app(calls=calls), 4, dies=at)
    with pytest.raises(KeyboardInterrupt):
        play(DynamicAveraging(delta=0.05, checkpoint_dir=tmp_path), grid=grid, rounds=5)
    strategy = DynamicAveraging(delta=0.05, checkpoint_dir=tmp_path)
    resumed = play(strategy, grid=grid, rounds=5, resume=True)
    assert len(calls) == len(set(calls)) == 4 * 5
    assert np.array_equal(resumed.arrays["w"].numpy(), unbroken.arrays["w"].numpy())


# --- settings, the serial reference --------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DynamicAveraging(delta=0), "delta must be"),
        (lambda: DynamicAveraging(check_every=0), "must be >= 1, got 0"),
        (lambda: PeriodicAveraging(b=0), "must be >= 1, got 0"),
        (lambda: PeriodicAveraging(fraction=0), "fraction must be"),
        (lambda: NoSync(report_every=0), "must be >= 1"),
        (lambda: PeriodicAveraging(secure=SecureSum()), "looks at the replies of single nodes"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_serial_learner_sends_nothing():
    def learn(server_round, arrays, memory):
        metrics = {"loss-sum": 2.0, "batches": 4.0, "correct-share-sum": 1.0}
        kept = {"t": memory.get("t", np.zeros(1)) + 1}
        return {**arrays, "w": arrays["w"] + kept["t"]}, kept, metrics

    result = play(
        Serial(learn=learn), grid=MeteredGrid.around(InProcessGrid(walking_app(), 2)), rounds=3
    )
    assert result.arrays["w"].numpy() == pytest.approx([6, 6, 6])
    assert result.details["cumulative_loss"] == 6
    assert result.traffic.bytes_down == 0
