"""Models that live on the nodes, and travel as differences in a few bits; over the in-process grid.

The model is a matrix (vectors of a few numbers are not rounded) and steps do not depend on it, so
the mean of all models walks by the mean of the steps, whatever is averaged when.
"""

import numpy as np
import pytest
from flwr.app import Message
from helpers_learners import fail, initial, walk, walking_app

from gems_flwr.compression.difference_coding import encode, encode_whole
from gems_flwr.errors import CheckpointError
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.learner_state import LearnerState
from gems_flwr.server.members import split_members
from gems_flwr.server.settings import Callback
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.nosync import NoSync
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.wire.asking import ask_for_averaging, requested_averaging
from gems_flwr.wire.keys import LOCAL_LEFT_OVER, LOCAL_NOTES, LOCAL_REFERENCE
from gems_flwr.wire.model_replies import pack_instruction
from gems_flwr.wire.packed_records import pack_bytes, packed_models
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.requests import AveragingRequest

FORMS = ["float16", "int8", "int4", "int2"]
# Half a step of rounding for a difference of at most 1; scales are rounded up by 2^-7.
HALF_STEP = {"float16": 2.0**-11, "int8": 0.5 / 127 * 1.01, "int4": 0.5 / 7 * 1.01, "int2": 0.505}
SIZE = (30, 20)


def play(strategy, app=None, nodes=5, rounds=9, grid=None, start=None):
    grid = grid or InProcessGrid(app or walking_app(size=SIZE), nodes)
    return strategy.start(grid, start or initial(SIZE), num_rounds=rounds)


def walked(node, rounds):
    return sum(walk(node, r, SIZE) for r in rounds)


def mean_walk(nodes=range(5), rounds=range(1, 10), weights=None):
    return np.average([walked(n, rounds) for n in nodes], axis=0, weights=weights)


def weights_of(result):
    return result.arrays["w"].numpy()


def memory_in(folder):
    groups, _ = CheckpointFolder(folder).load()
    return LearnerState.from_memory(groups["memory"])


def node_states(grid):
    """What each node keeps, in the order of their numbers."""
    by_number = {c["partition-id"]: grid._states[i] for i, c in grid._configs.items()}
    return [by_number[number] for number in sorted(by_number)]


def left_over_on(grid):
    left = [state.get(LOCAL_LEFT_OVER) for state in node_states(grid)]
    return [np.zeros(SIZE) if each is None else each["w"].numpy() for each in left]


PROTOCOLS = {
    "dynamic": lambda **kw: DynamicAveraging(delta=3.0, **kw),
    "nearest": lambda **kw: DynamicAveraging(delta=3.0, order="nearest", **kw),
    "total": lambda **kw: DynamicAveraging(delta=3.0, condition="total", augmentation="all", **kw),
    "checks": lambda **kw: DynamicAveraging(delta=3.0, check_every=2, **kw),
    "rate": lambda **kw: DynamicAveraging(delta=3.0, target_rate=0.5, **kw),
    "loss": lambda **kw: DynamicAveraging(delta=3.0, follow_loss=0.5, **kw),
    "every": lambda **kw: PeriodicAveraging(b=1, **kw),
    "third": lambda **kw: PeriodicAveraging(b=3, **kw),
    "fraction": lambda **kw: PeriodicAveraging(b=2, fraction=0.5, **kw),
    "weighted": lambda **kw: PeriodicAveraging(b=2, weighted=True, **kw),
    "parts": lambda **kw: PeriodicAveraging(b=2, weighted=True, fraction=0.5, **kw),
}
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
every_form = pytest.mark.parametrize("form", FORMS)


# --- what comes of it -----------------------------------------------------------------------------


@every_form
@every_protocol
def test_the_result_is_the_mean_of_all_models_but_for_what_is_left_over(protocol, form, tmp_path):
    """Error feedback: nothing is lost, it is only said later.

    A message says f − r + e − e' where e was left over before and e' after, and averaging keeps the
    (weighted) mean. So mean(f + e) + L, with what the server has left over for each node as L,
    never changes but by the steps. In the end all f are the result R: R = mean walk − mean(e) − L.
    """
    strategy = PROTOCOLS[protocol](compress=form, checkpoint_dir=tmp_path)
    grid = InProcessGrid(walking_app(size=SIZE), 5)
    result = play(strategy, grid=grid)
    counts = [1, 2, 3, 4, 5] if strategy.weighted else None
    left = np.average(left_over_on(grid), axis=0, weights=counts)
    left = left + memory_in(tmp_path).left_over["w"]
    expected = mean_walk(weights=counts)
    if protocol != "parts":  # partial averages by weight do not keep the mean, packed or not
        assert weights_of(result) + left == pytest.approx(expected, abs=2e-6)
    # Every difference here is below 2, so each of the two is off by two half steps at most.
    plain = weights_of(play(PROTOCOLS[protocol]()))
    assert np.abs(weights_of(result) - plain).max() < 4 * HALF_STEP[form]
    assert result.arrays["steps"].numpy() == 0


@pytest.mark.parametrize(
    ("protocol", "form"),
    [*((each, "int4") for each in PROTOCOLS), ("dynamic", "float16"), ("dynamic", "int8")],
)
def test_nodes_and_server_have_the_same_reference_to_the_last_bit(protocol, form, tmp_path):
    """After partial and full synchronisations, whether the last average was delivered or not."""
    for final_sync in (True, False):
        folder = tmp_path / str(final_sync)
        options = {"compress": form, "checkpoint_dir": folder, "final_sync": final_sync}
        grid = InProcessGrid(walking_app(size=SIZE), 5)
        play(PROTOCOLS[protocol](**options), grid=grid)
        learners, compared = memory_in(folder), 0
        for number, state in enumerate(node_states(grid)):
            assert state[LOCAL_NOTES]["reference"] == learners.known[str(number)][1]
            if state[LOCAL_NOTES]["reference"] == learners.reference_version:
                own = to_numpy(state[LOCAL_REFERENCE])
                assert all(np.array_equal(own[k], learners.reference[k]) for k in own)
                compared += 1
        assert compared == 5 or not final_sync


def test_the_initial_model_is_told_in_half_precision_and_the_rest_with_the_first_average(tmp_path):
    """1/3 is off by 8e-5 in half precision: nodes begin with that, the server says the rest."""
    start = initial(SIZE, np.float32)
    start["w"] = type(start["w"])(np.full(SIZE, 1 / 3, np.float32))
    seen = []

    class Watching(InProcessGrid):
        def _deliver(self, message, timeout):
            reply = super()._deliver(message, timeout)
            seen.append(self._states[message.metadata.dst_node_id][LOCAL_REFERENCE]["w"].numpy())
            return reply

    grid = Watching(walking_app(size=SIZE), 3)
    strategy = PeriodicAveraging(b=1, compress="int8", checkpoint_dir=tmp_path)
    result = play(strategy, grid=grid, rounds=3, start=start)
    assert np.abs(seen[0] - 1 / 3).max() > 7e-5
    left = np.mean(left_over_on(grid), axis=0) + memory_in(tmp_path).left_over["w"]
    expected = 1 / 3 + mean_walk(range(3), range(1, 4))
    assert weights_of(result) + left == pytest.approx(expected, abs=2e-6)


def test_models_that_are_never_averaged_come_rounded():
    result = play(NoSync(compress="int8", report_every=5))
    for node, arrays in split_members(to_numpy(result.arrays)).items():
        own = walked(int(node), range(1, 10))
        assert 0 < np.abs(arrays["w"] - own).max() <= HALF_STEP["int8"] * np.abs(own).max()
        assert arrays["steps"] == 9


@pytest.mark.parametrize("robust", ["median", "trimmed_mean", "multi_krum"])
def test_a_node_that_is_outvoted_is_outvoted_when_models_are_packed(robust):
    app = walking_app({(2, r): lambda m: {**m, "w": m["w"] + 50} for r in range(1, 5)}, size=SIZE)
    made = {"robust": robust, "liars": 1, "b": 1}
    packed = play(PeriodicAveraging(compress="int8", **made), app, nodes=6, rounds=4)
    plain = play(PeriodicAveraging(**made), app, nodes=6, rounds=4)
    # A step of 50 in one node is no scale of the others: within two roundings of theirs.
    assert np.abs(weights_of(packed) - weights_of(plain)).max() < 0.05


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "most"), [("float16", 0.54), ("int8", 0.27), ("int4", 0.15), ("int2", 0.08)]
)
@pytest.mark.parametrize("strategy", [PeriodicAveraging, DynamicAveraging])
def test_fifty_thousand_gaussian_weights_take_a_fraction_of_their_bytes(strategy, form, most):
    """Of the first model, which nobody has, half; of all others what their bits say."""
    size, options = (250, 200), {"delta": 1e-3} if strategy is DynamicAveraging else {"b": 1}

    def traffic(compress):
        grid = MeteredGrid(InProcessGrid(walking_app(size=size), 4))
        strategy(compress=compress, **options).start(grid, initial(size, np.float32), 12)
        return grid.total

    packed, plain = traffic(form), traffic("float32")
    assert packed.bytes_up <= most * plain.bytes_up
    assert packed.bytes_down <= most * plain.bytes_down
    assert packed.messages_down == plain.messages_down


def test_no_model_is_sent_whole_to_who_has_the_reference():
    """Not even by the synchronisation that ends a run which has just had one."""
    size, seen = (250, 200), []

    class Watching(InProcessGrid):
        def _deliver(self, message, timeout):
            sent = message.content.get("arrays", {})
            seen.append(sum(len(part) for part in sent.values()))
            return super()._deliver(message, timeout)

    grid = Watching(walking_app(size=size), 3)
    strategy = PeriodicAveraging(b=1, compress="int8")
    strategy.start(grid, initial(size, np.float32), num_rounds=3)
    assert len(seen) == 4 * 3  # three rounds and the delivery
    assert all(count < 0.26 * 4 * 50_000 for count in seen[3:])


@pytest.mark.parametrize("protocol", ["dynamic", "third", "fraction"])
def test_float32_is_what_was_there_before(protocol):
    """No word of it in a message, no number changed."""
    texts = []

    class Watching(InProcessGrid):
        def _deliver(self, message, timeout):
            texts.append(message.content["config"]["averaging"])
            reply = super()._deliver(message, timeout)
            assert not any("packed" in key for r in reply.content.values() for key in r)
            return reply

    said = play(PROTOCOLS[protocol](compress="float32"), grid=Watching(walking_app(size=SIZE), 5))
    unsaid = play(PROTOCOLS[protocol]())
    assert not any("compress" in text or "base" in text for text in texts)
    assert np.array_equal(weights_of(said), weights_of(unsaid))
    assert said.traffic == unsaid.traffic


# --- faults ---------------------------------------------------------------------------------------


class Troubled(InProcessGrid):
    """Node 0 loses its state, a message or a reply; in which rounds is told."""

    def __init__(self, app, nodes, forgets=(), misses=(), unheard=(), joins=0):
        super().__init__(app, nodes)
        self.forgets, self.misses, self.unheard = set(forgets), set(misses), set(unheard)
        self.joins, self.now, self.sent = joins, 0, []

    def _zero(self):
        return next(i for i, c in self._configs.items() if c["partition-id"] == 0)

    def get_node_ids(self):
        there = super().get_node_ids()
        return there - {self._zero()} if self.now + 1 < self.joins else there

    def _deliver(self, message, timeout):
        self.now = message.content["config"]["server-round"]
        if message.metadata.dst_node_id != self._zero():
            return super()._deliver(message, timeout)
        if self.now in self.forgets:
            self.forgets.discard(self.now)
            self._states.pop(message.metadata.dst_node_id, None)
        if self.now in self.misses:
            return None
        model = message.content.get("arrays")
        whole = None if model is None else "packed-layout" in model
        self.sent.append((self.now, requested_averaging(message.content).adopt, whole))
        reply = super()._deliver(message, timeout)
        return None if self.now in self.unheard else reply


@every_form
def test_a_node_that_lost_its_state_gets_the_reference_whole_and_begins_anew(form):
    grid = Troubled(walking_app(size=SIZE), 3, forgets=[3])
    result = play(DynamicAveraging(delta=1e9, compress=form), grid=grid, rounds=4)
    assert result.details["lost_states"] == ((3, "0"),)
    expected = (walked(0, [3, 4]) + walked(1, range(1, 5)) + walked(2, range(1, 5))) / 3
    assert np.abs(weights_of(result) - expected).max() < 4 * HALF_STEP[form]
    assert result.failures == ()
    assert (3, True, True) in grid.sent


@pytest.mark.parametrize("form", ["float16", "int4"])
@pytest.mark.parametrize("protocol", ["dynamic", "every", "fraction"])
@pytest.mark.parametrize("away", [{"misses": [2, 3]}, {"unheard": [3, 5, 6]}])
def test_a_node_that_missed_synchronisations_is_brought_up_to_date(protocol, away, form, tmp_path):
    """Whether it got no message, or its reply was lost: then it is further than the server knows.

    Nothing but the loss differs from the run without rounding, which has the same nodes away.
    """
    made = {"checkpoint_dir": tmp_path, "compress": form}
    grid = Troubled(walking_app(size=SIZE), 4, **away)
    result = play(PROTOCOLS[protocol](**made), grid=grid)
    plain = play(PROTOCOLS[protocol](), grid=Troubled(walking_app(size=SIZE), 4, **away))
    gone = {(number, "0") for number in away.get("misses", []) + away.get("unheard", [])}
    assert {(number, f.node) for number, f in result.failures} <= gone
    assert np.abs(weights_of(result) - weights_of(plain)).max() < 6 * HALF_STEP[form]
    learners = memory_in(tmp_path)
    for state in node_states(grid):
        assert np.array_equal(state[LOCAL_REFERENCE]["w"].numpy(), learners.reference["w"])


def test_what_rounding_took_from_a_model_that_was_lost_is_of_no_account():
    """A node that is given no new model was not averaged; it says nothing of what it said before.

    Given one, it adds what rounding had taken. Given the reference whole, it begins anew.
    """
    grid = InProcessGrid(walking_app(size=SIZE), 1)
    (node,) = grid.get_node_ids()
    start = to_numpy(initial(SIZE))

    def ask(number, model, packed=None, **request):
        content = pack_instruction(None, {}, server_round=number, seed=0)
        made = {"run": "r", "model": model, "reference": 1, "send": "always", "compress": "int4"}
        record = None if packed is None else pack_bytes(packed)
        ask_for_averaging(content, AveragingRequest(**{**made, **request}), record)
        message = Message(content, dst_node_id=node, message_type="train")
        (reply,) = grid.send_and_receive([message])
        [sent] = packed_models(reply.content).values()
        return sent.codes, sent.scales

    def encoded(weights, left_over=None):
        return encode({**start, "w": weights}, start, "int4", left_over)

    def said(each):
        return each.packed.codes, each.packed.scales

    first = ask(1, 1, encode_whole(start), adopt=True)
    assert first == said(encoded(walked(0, [1])))
    second = encoded(walked(0, [1, 2]))
    assert ask(2, 1) == said(second)  # the reply of round 1 was lost
    average = encode({**start, "w": np.ones(SIZE)}, start, "int4")
    third = ask(3, 2, average.packed, base=1)
    counted = encoded(average.decoded["w"] + walk(0, 3, SIZE), second.left_over)
    assert third == said(counted)
    anew = ask(4, 3, encode_whole(start), adopt=True)
    assert anew == said(encoded(walk(0, 4, SIZE)))


@every_form
def test_a_node_that_joins_late_gets_the_reference_whole(form):
    grid = Troubled(walking_app(size=SIZE), 4, joins=4)
    result = play(PeriodicAveraging(b=1, compress=form), grid=grid, rounds=6)
    assert [len(r.nodes_answered) for r in result.history[1:]] == [3, 3, 3, 4, 4, 4]
    assert grid.sent[:2] == [(4, True, True), (5, True, False)]
    three, four = mean_walk(range(1, 4), range(1, 4)), mean_walk(range(4), range(4, 7))
    assert np.abs(weights_of(result) - three - four).max() < 4 * HALF_STEP[form]


DIVERGED = {
    "nan": lambda model: {**model, "w": model["w"] * np.nan},
    "infinity": lambda model: {**model, "w": model["w"] + np.inf},
    "one number": lambda model: {**model, "w": np.where(np.arange(20) == 3, np.nan, model["w"])},
    "far": lambda model: {**model, "w": model["w"] * 1e28},
}


@every_form
@pytest.mark.parametrize("how", DIVERGED)
def test_a_node_that_diverges_is_named_begins_anew_and_spoils_nothing_later(how, form):
    """Its left-over went with its model: what it sends two rounds later is that of another run.

    In half precision a difference of 1e27 is cut off at 65,504, and the rest would never end.
    """
    app = walking_app({(2, 2): DIVERGED[how]}, size=SIZE)
    strategy = DynamicAveraging(delta=0.01, augmentation="all", compress=form)
    result = play(strategy, app, nodes=4, rounds=6)
    if how == "far" and form == "float16":
        # 65,504 is what arrives of it: a model like any other, which the average takes in.
        assert np.isfinite(weights_of(result)).all()
        return
    assert [(number, f.node) for number, f in result.failures] == [(2, "2")]
    assert np.abs(weights_of(result)).max() < 2
    assert [len(r.nodes_answered) for r in result.history[1:]] == [4, 3, 4, 4, 4, 4]


def test_a_handler_that_fails_leaves_what_is_left_over_as_it_was():
    grid = InProcessGrid(walking_app({(1, 3): fail}, size=SIZE), 3)
    result = play(PeriodicAveraging(b=1, compress="int4"), grid=grid, rounds=5)
    assert [(number, f.node) for number, f in result.failures] == [(3, "1")]
    plain = play(PeriodicAveraging(b=1), walking_app({(1, 3): fail}, size=SIZE), nodes=3, rounds=5)
    assert np.abs(weights_of(result) - weights_of(plain)).max() < 4 * HALF_STEP["int4"] * 0.5


# --- resuming -------------------------------------------------------------------------------------


class StopAfter(Callback):
    def __init__(self, number):
        self.number = number

    def on_round_end(self, record):
        if record.round == self.number:
            raise KeyboardInterrupt


@pytest.mark.parametrize("keep_replies", [True, False])
@pytest.mark.parametrize(
    ("protocol", "form"),
    [
        *(("dynamic", form) for form in FORMS),
        ("every", "int8"),
        ("fraction", "int4"),
        ("rate", "int4"),
        ("loss", "int8"),
    ],
)
def test_a_resumed_run_equals_the_unbroken_one(protocol, form, keep_replies, tmp_path):
    unbroken = play(PROTOCOLS[protocol](compress=form))
    grid = InProcessGrid(walking_app(size=SIZE), 5)
    made = {"checkpoint_dir": tmp_path, "keep_replies": keep_replies, "compress": form}
    for number in (2, 5, 6):
        with pytest.raises(KeyboardInterrupt):
            play(PROTOCOLS[protocol](resume=True, callbacks=[StopAfter(number)], **made), grid=grid)
    resumed = play(PROTOCOLS[protocol](resume=True, **made), grid=grid)
    assert np.array_equal(weights_of(resumed), weights_of(unbroken))
    assert resumed.details == unbroken.details


class Dies(InProcessGrid):
    """The server dies at a message, counted over all rounds, after the node has worked on it."""

    def __init__(self, app, nodes, at):
        super().__init__(app, nodes)
        self.at, self.count = at, 0

    def _deliver(self, message, timeout):
        reply = super()._deliver(message, timeout)
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return reply


@pytest.mark.parametrize("keep_replies", [True, False])
@pytest.mark.parametrize(("protocol", "form"), [("dynamic", "int4"), ("fraction", "float16")])
def test_killed_at_any_message_after_the_first_round_it_goes_on_to_the_last_bit(
    protocol, form, keep_replies, tmp_path
):
    """A node whose reply was lost with the server answers with the same bytes when asked again.

    But for the delivery that ends the run, where replies are not kept: a node that has the last
    average already has no model of its own to be asked for, however models travel.
    """
    made = {"compress": form, "keep_replies": keep_replies}
    counting = Dies(walking_app(size=SIZE), 3, at=-1)
    unbroken = play(PROTOCOLS[protocol](compress=form), grid=counting, rounds=5)
    first, last = 3, counting.count - (0 if keep_replies else 3)
    for at in range(first + 1, last + 1, 2):
        grid, folder = Dies(walking_app(size=SIZE), 3, at=at), tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            play(PROTOCOLS[protocol](checkpoint_dir=folder, **made), grid=grid, rounds=5)
        strategy = PROTOCOLS[protocol](checkpoint_dir=folder, resume=True, **made)
        resumed = play(strategy, grid=grid, rounds=5)
        assert np.array_equal(weights_of(resumed), weights_of(unbroken)), at
        assert resumed.details["synchronisations"] == unbroken.details["synchronisations"]


@pytest.mark.parametrize(
    ("first", "then"), [("int8", "int4"), ("int8", "float32"), ("float32", "int8")]
)
def test_a_checkpoint_of_another_form_is_refused(first, then, tmp_path):
    play(DynamicAveraging(compress=first, checkpoint_dir=tmp_path), rounds=2)
    with pytest.raises(CheckpointError, match=f"compress {first}, this run has {then}"):
        play(DynamicAveraging(compress=then, checkpoint_dir=tmp_path, resume=True))
