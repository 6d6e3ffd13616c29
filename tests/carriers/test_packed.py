"""Models as differences to what the receiver has: rounds, nodes, resuming, lies."""

import json

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam, FedAvgM
from helpers_grids import Nameless
from helpers_packed import (
    HALF_STEP,
    TAMPERED,
    PackedGrid,
    arrays_equal,
    furthest,
    initial,
    packed_app,
)

from gems_flwr import FedAvg, FlowerStrategy, InProcessGrid, good_enough_mod
from gems_flwr.carriers import pack_bytes, packed, packed_models
from gems_flwr.compression import encode, encode_whole
from gems_flwr.core.folder import CheckpointFolder
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.errors import (
    CheckpointError,
    MissingModError,
    OptionError,
    RoundFailedError,
)

FLOWERS = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
MAKERS = {
    "fedavg": lambda **kw: FedAvg(**kw),
    "half": lambda **kw: FedAvg(fraction_train=0.5, fraction_evaluate=0.5, seed=3, **kw),
    "momentum": lambda **kw: FlowerStrategy(
        inner=FedAvgM(**FLOWERS, server_learning_rate=1.0, server_momentum=0.3), **kw
    ),
    "adam": lambda **kw: FlowerStrategy(inner=FedAdam(**FLOWERS, eta=0.05, tau=0.1), **kw),
}


def play(strategy, app=None, nodes=4, rounds=4, grid=None, start=None, **options):
    grid = grid or InProcessGrid(app or packed_app(), nodes)
    return strategy.start(grid, start or initial(), num_rounds=rounds, **options)


def sent_to(grid, node):
    return [(number, kind[0], how) for number, kind, each, how in grid.sent if each == node]


# --- what comes of it -----------------------------------------------------------------------------


@pytest.mark.parametrize(("maker", "form"), [("half", "int4"), ("momentum", "int8")])
def test_the_result_is_that_of_whole_models_but_for_rounding(maker, form):
    """Differences here are below 4: a node's model is off by two half steps of that at most.

    Half of what the model was off before a round is left after it, since nodes go half of the way,
    so over the rounds that adds up to twice as much; the momentum makes it half as much again.
    """
    result, plain = play(MAKERS[maker](compress=form)), play(MAKERS[maker]())
    assert 0 < furthest(result.arrays, plain.arrays) < 4 * HALF_STEP[form] * 2 * 2 * 1.5
    assert result.failures == ()
    # Biases travel as they are.
    if maker == "half":
        assert np.allclose(result.arrays["b"].numpy(), plain.arrays["b"].numpy(), atol=1e-6)


@pytest.mark.parametrize(("form", "most"), [("int8", 0.27), ("int4", 0.15)])
def test_fifty_thousand_weights_take_a_fraction_of_their_bytes(form, most):
    """Ten rounds: the first model goes down in half precision."""
    size = (250, 200)
    small = play(FedAvg(compress=form, fraction_evaluate=0.0), rounds=10, start=initial(size))
    plain = play(FedAvg(fraction_evaluate=0.0), rounds=10, start=initial(size))
    assert small.traffic.bytes_up <= most * plain.traffic.bytes_up
    assert small.traffic.bytes_down <= (most + 0.03) * plain.traffic.bytes_down


def test_a_node_that_has_evaluated_a_model_gets_no_second_copy():
    grid = PackedGrid(packed_app(), 3)
    play(FedAvg(compress="int8"), grid=grid, rounds=3)
    assert [each for each in sent_to(grid, 1) if each[0]] == [
        (1, "t", "whole"),
        (1, "e", "packed"),
        (2, "t", "none"),
        (2, "e", "packed"),
        (3, "t", "none"),
        (3, "e", "packed"),
    ]


# --- who has what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["fedavg", "adam"])
def test_a_node_that_lost_its_state_is_sent_the_whole_model_and_counts(maker):
    """FedAdam's model is float64 from the second round on; who comes then trains in float32."""
    grid = PackedGrid(packed_app(), 4, forgets=[3])
    result = play(MAKERS[maker](compress="int8"), grid=grid, rounds=5)
    assert result.failures == ()
    assert furthest(result.arrays, play(MAKERS[maker](), rounds=5).arrays) < 0.1
    ups = [record.traffic.bytes_up for record in result.history[1:]]
    assert max(ups) < 1.2 * min(ups)
    if maker == "fedavg":
        third = [how for number, _, how in sent_to(grid, 0) if number == 3]
        assert third[:2] == ["none", "whole"]


def test_a_reply_that_was_lost_leaves_nothing_over():
    """Its node is further than the server knows, and is sent the whole model."""
    grid = PackedGrid(packed_app(), 3, unheard=[2])
    result = play(FedAvg(compress="int4", fraction_evaluate=0.0), grid=grid, rounds=4)
    assert [(number, f.node) for number, f in result.failures] == [(2, "0")]
    assert len(result.history[3].nodes_answered) == 3


def test_a_node_that_diverged_once_is_named_once():
    """Else what is left over of 1e30 would be in its models for rounds to come."""
    app = packed_app({(1, 2): lambda model: {**model, "w": model["w"] * np.float32(1e30)}})
    result = play(FedAvg(compress="int4", fraction_evaluate=0.0), app, rounds=5)
    assert [(number, f.node) for number, f in result.failures] == [(2, "1")]
    assert np.abs(result.arrays["w"].numpy()).max() < 10


def test_nodes_without_a_name_on_the_grid_say_it_through_the_mod():
    """As on Ray and on a SuperLink."""
    result = play(FedAvg(compress="int8"), grid=Nameless(packed_app(), 4))
    assert result.failures == ()
    assert result.history[1].nodes_answered == ("0", "1", "2", "3")
    assert arrays_equal(result.arrays, play(FedAvg(compress="int8")).arrays)


def test_a_strategy_of_flowers_that_calls_the_model_otherwise_is_packed_too():
    def go(**options):
        inner = FedAvgM(**FLOWERS, arrayrecord_key="weights")
        app = packed_app(key="weights")
        return play(FlowerStrategy(inner=inner, **options), app, nodes=3).traffic

    small, plain = go(compress="int8"), go()
    assert small.bytes_down < 0.6 * plain.bytes_down
    assert small.bytes_up < 0.6 * plain.bytes_up


def test_beyond_the_limit_of_memory_nodes_get_whole_models(monkeypatch, tmp_path):
    """Room for one model: those that have another are sent the next one whole."""
    monkeypatch.setattr(packed, "MOST_BYTES", 5000)
    grid = PackedGrid(packed_app(), 6)
    made = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "seed": 1}
    strategy = FedAvg(compress="int8", checkpoint_dir=tmp_path, **made)
    result = play(strategy, grid=grid, rounds=8)
    groups, _ = CheckpointFolder(tmp_path).load()
    assert sum(array.nbytes for key, array in groups["memory"].items() if key[-2:] == "/w") == 4000
    assert result.failures == ()
    assert 6 < [how for *_, how in grid.sent].count("whole") < len(grid.sent)
    assert furthest(result.arrays, play(FedAvg(**made), nodes=6, rounds=8).arrays) < 0.1


# --- resuming -------------------------------------------------------------------------------------


def test_killed_at_any_message_it_goes_on_to_the_last_bit(tmp_path):
    """Nodes that have trained in the round are further than the checkpoint, and answer the same."""
    counting = PackedGrid(packed_app(), 4)
    unbroken = play(MAKERS["half"](compress="int4"), grid=counting, rounds=4)
    for at in range(5, counting.count + 1, 2):
        grid, made = PackedGrid(packed_app(), 4, dies=at), {"compress": "int4"}
        made |= {"checkpoint_dir": tmp_path / str(at)}
        with pytest.raises(KeyboardInterrupt):
            play(MAKERS["half"](**made), grid=grid, rounds=4)
        resumed = play(MAKERS["half"](**made), grid=grid, rounds=4, resume=True)
        assert resumed.failures == ()
        assert arrays_equal(resumed.arrays, unbroken.arrays), at


def test_a_checkpoint_of_another_form_is_refused(tmp_path):
    play(FedAvg(compress="int8", checkpoint_dir=tmp_path), rounds=2)
    with pytest.raises(CheckpointError, match="compress=int8"):
        play(FedAvg(compress="int4", checkpoint_dir=tmp_path), resume=True)


# --- refusals -------------------------------------------------------------------------------------


def test_nodes_without_the_mod_are_named_with_what_to_write():
    with pytest.raises((MissingModError, RoundFailedError), match=r"good_enough_mod\(\)"):
        play(FedAvg(compress="int8"), packed_app(mods=[]))
    apps = packed_app(), packed_app(mods=[])

    def mixed(message, context):
        return apps[context.node_config["partition-id"] == 1](message, context)

    result = play(FedAvg(compress="int8", fraction_evaluate=0.0), mixed, rounds=2)
    assert [(number, f.node[:1]) for number, f in result.failures] == [(1, "1"), (2, "1")]
    assert "ClientApp(mods=[good_enough_mod()" in result.failures[0][1].reason
    assert result.history[2].nodes_answered == ("0", "2", "3")


def test_a_model_with_nothing_to_round_is_refused_before_the_first_message():
    start = to_record({"b": np.zeros(5, np.float32)})
    with pytest.raises(OptionError, match="nothing to compress"):
        play(FedAvg(compress="int8"), start=start)


def test_another_loop_cannot_pack():
    inner = FedAvg(compress="int8")
    wrapped = DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 1.0, 2)
    with pytest.raises(OptionError, match="start FedAvg by itself"):
        wrapped.start(InProcessGrid(packed_app(), 3), initial(), num_rounds=1)


# --- one node, message by message -----------------------------------------------------------------

BASE = {"w": np.zeros((20, 30), np.float32), "b": np.zeros(3, np.float32)}
STEP = np.random.default_rng(1).normal(size=(20, 30)).astype(np.float32)
MODEL = {**BASE, "w": BASE["w"] + STEP}
FIRST = encode(MODEL, BASE, "int4")


class Node:
    """One node that adds a step, and the messages of a server to it.

    `extra` are further records of its reply.
    """

    def __init__(self, **extra):
        app = ClientApp(mods=[good_enough_mod()])

        @app.train()
        def train(message, context):
            content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
            for key, record in message.content.array_records.items():
                arrays = to_numpy(record)
                content[key] = to_record({**arrays, "w": arrays["w"] + STEP})
            content.update({key: to_record(arrays) for key, arrays in extra.items()})
            return Message(content, reply_to=message)

        self.grid = InProcessGrid(app, 1)
        (self.id,) = self.grid.get_node_ids()

    def ask(self, number, records, models=None, run="r"):
        content = RecordDict({key: pack_bytes(each) for key, each in (models or {}).items()})
        packing = {"run": run, "form": "int4", "round": number, "records": records}
        content["compression"] = ConfigRecord({"json": json.dumps(packing)})
        message = Message(content, dst_node_id=self.id, message_type="train")
        (reply,) = self.grid.send_and_receive([message])
        return reply.content

    def given(self):
        reply = self.ask(1, {"arrays": (0, 5, 0)}, {"arrays": encode_whole(BASE)})
        return packed_models(reply)["arrays"]

    @property
    def state(self):
        return {key: str(record) for key, record in self.grid._states[self.id].items()}


def needs_base(content):
    return content["compression"]["needs-base"] is True and not packed_models(content)


@pytest.mark.parametrize(
    ("number", "counted", "left_over"),
    [(1, 0, None), (2, 0, None), (2, 1, FIRST.left_over)],
    ids=["asked again", "lost or refused", "counted"],
)
def test_what_is_left_over_is_added_once_the_model_before_has_counted(number, counted, left_over):
    node = Node()
    assert node.given() == FIRST.packed
    expected = encode(MODEL, BASE, "int4", left_over).packed
    # However often it is asked in a round, it answers the same.
    for _ in range(2):
        reply = node.ask(number, {"arrays": (5, 5, counted)})
        assert packed_models(reply)["arrays"] == expected


def test_a_node_that_lacks_one_of_two_models_says_so_and_stays_as_it_was():
    """Also of the one that it could read: else it would have one model under another's number."""
    node = Node()
    node.given()
    before = node.state
    models = {"arrays": FIRST.packed, "model/b": FIRST.packed}
    assert needs_base(node.ask(2, {"arrays": (5, 6, 1), "model/b": (8, 9, 0)}, models))
    assert node.state == before
    # What was kept of another run does not count.
    assert needs_base(node.ask(2, {"arrays": (5, 5, 1)}, run="another"))


def test_a_model_under_another_name_is_packed_and_one_beside_it_is_not():
    """A gradient looks like a model; under the model's name there is just one."""
    node = Node(gradient={**BASE, "w": STEP})
    reply = node.ask(1, {"arrays": (0, 5, 0)}, {"arrays": encode_whole(BASE)})
    assert set(packed_models(reply)) == {"arrays"}
    assert np.array_equal(reply["gradient"]["w"].numpy(), STEP)
    assert json.loads(reply["compression"]["json"]) == {"arrays": 5}


# --- nodes that lie -------------------------------------------------------------------------------


def note(text):
    """Return what changes what a reply says its packed model is a difference to."""

    def tamper(content):
        content["compression"] = ConfigRecord({"json": text})

    return tamper


def no_record(content):
    content["compression"] = ArrayRecord([np.zeros(2)])


def asks_again(content):
    content.clear()
    content["compression"] = ConfigRecord({"needs-base": True})


NOTES = {
    "number unknown": (note('{"my-model":17}'), "difference to number 17"),
    "number missing": (note("{}"), "difference to number 0"),
    "number a list": (note('{"my-model":[1]}'), "difference to number [1]"),
    "note no json": (note("{"), "no JSON"),
    "note no record": (no_record, "JSON"),
    "asks again": (asks_again, "asks again"),
}


def lied_to(tamper, **options):
    grid = PackedGrid(packed_app(), 4, tamper={(2, 2): tamper})
    return play(FedAvg(compress="int8", fraction_evaluate=0.0, **options), grid=grid)


@pytest.mark.parametrize("how", [*TAMPERED, *NOTES])
def test_a_reply_that_is_no_packed_model_is_named_and_the_others_go_on(how):
    tamper, words = {**TAMPERED, **NOTES}[how]
    result = lied_to(tamper)
    [(number, failure)] = result.failures
    assert (number, failure.node) == (2, "2")
    assert any(word in failure.reason for word in words.split("|")), failure.reason
    assert result.history[2].nodes_answered == ("0", "1", "3")
    assert result.history[4].nodes_answered == ("0", "1", "2", "3")
    assert np.abs(result.arrays["w"].numpy()).max() < 10


def test_no_more_models_are_unpacked_than_a_node_was_given_and_no_fault_of_ours_ends_a_run(
    monkeypatch,
):
    """Each costs some bytes on the wire, and a model's memory here."""
    opened, real = [], packed.open_packed

    def breaks(*each):
        opened.append(1)
        if len(opened) == 1:
            raise ZeroDivisionError("not foreseen")
        return real(*each)

    monkeypatch.setattr(packed, "open_packed", breaks)
    result = lied_to(TAMPERED["many"][0])
    assert len(opened) == 4 * 4 - 1
    assert "not foreseen" in result.failures[0][1].reason
    assert len(result.failures) == 2
