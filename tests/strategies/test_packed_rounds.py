"""Strategies that hand out a model every round, with `compress`; over the in-process grid."""

import json

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam, FedAvgM
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from helpers_grids import Nameless
from helpers_multi_model import SHAPES, pulling_app, start_models
from helpers_packed import (
    FORMS,
    HALF_STEP,
    PackedGrid,
    arrays_equal,
    furthest,
    initial,
    packed_app,
)

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.client.fault_reply_mod import fault_reply_mod
from gems_flwr.errors import CheckpointError, MissingModError, OptionError, RoundFailedError
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.secure.secure_sum import SecureSum
from gems_flwr.server import model_links
from gems_flwr.server.members import join_models
from gems_flwr.server.model_links import without_links
from gems_flwr.server.settings import Callback
from gems_flwr.server.state import ServerState
from gems_flwr.strategies.ensemble import Ensemble
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.flower_strategy import FlowerStrategy
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.local_models import LocalModels
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.strategies.pooled import Pooled
from gems_flwr.strategies.serial import Serial
from gems_flwr.wire.asking import wants_name
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.withdrawals import pack_withdrawal

FLOWERS = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
MAKERS = {
    "fedavg": lambda **kw: FedAvg(**kw),
    "no evaluation": lambda **kw: FedAvg(fraction_evaluate=0.0, **kw),
    "half": lambda **kw: FedAvg(fraction_train=0.5, fraction_evaluate=0.5, seed=3, **kw),
    "once": lambda **kw: OneShotAverage(**kw),
    "momentum": lambda **kw: FlowerStrategy(
        inner=FedAvgM(**FLOWERS, server_learning_rate=1.0, server_momentum=0.3), **kw
    ),
    "adam": lambda **kw: FlowerStrategy(inner=FedAdam(**FLOWERS, eta=0.05, tau=0.1), **kw),
}


def play(strategy, app=None, nodes=4, rounds=4, grid=None, start=None):
    grid = grid or InProcessGrid(app or packed_app(), nodes)
    return strategy.start(grid, start or initial(), num_rounds=rounds)


def sent_to(grid, node):
    return [(number, kind[0], how) for number, kind, each, how in grid.sent if each == node]


# --- what comes of it -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("maker", MAKERS)
def test_the_result_is_that_of_whole_models_but_for_rounding(maker, form):
    """Differences here are below 4: a node's model is off by two half steps of that at most.

    Half of what the model was off before a round is left after it, since nodes go half of the way,
    so over the rounds that adds up to twice as much; the momentum makes it half as much again.
    """
    result, plain = play(MAKERS[maker](compress=form)), play(MAKERS[maker]())
    off = furthest(result.arrays, plain.arrays)
    assert off < 4 * HALF_STEP[form] * 2 * 2 * 1.5
    assert off > 0
    assert result.failures == ()
    # Biases travel as they are.
    if maker in ("fedavg", "once", "half"):
        assert np.allclose(result.arrays["b"].numpy(), plain.arrays["b"].numpy(), atol=1e-6)


def test_what_is_left_over_is_said_later():
    """Nodes that always go one step: after n rounds the sum is off by one rounding, not by n.

    In 4 bits a step of 1/30 beside one of 1 is 0 in every single message, and would never be told.
    """
    step = np.full((40, 25), 1 / 30, np.float32)
    step[:, ::5] = 1.0
    app = ClientApp(mods=[compression_mod()])

    @app.train()
    def train(message, context):
        arrays = to_numpy(message.content["arrays"])
        moved = to_record({**arrays, "w": arrays["w"] + step})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    strategy = FedAvg(compress="int4", fraction_evaluate=0.0)
    result = play(strategy, app, nodes=2, rounds=30)
    off = np.abs(result.arrays["w"].numpy() - initial()["w"].numpy() - 30 * step)
    assert off.max() < 2 * HALF_STEP["int4"]


@pytest.mark.parametrize("sampling", ["lvr", "gvr", "stale", "mifa", "random", "full"])
def test_several_models_travel_packed(sampling, monkeypatch):
    """Both shapes are matrices here; model by model within rounding of what whole ones give."""
    monkeypatch.setitem(SHAPES, "a", (6, 50))
    monkeypatch.setitem(SHAPES, "b", (20, 10))
    made = {"budget": 4, "sampling": sampling, "seed": 2}

    def go(**options):
        grid = InProcessGrid(pulling_app(), 5)
        return MultiModel(**made, **options).start(
            grid, to_record(join_models(start_models())), num_rounds=5
        )

    packed, plain = go(compress="float16"), go()
    assert packed.failures == ()
    # Goals go up to 10, and a draw weighs an update by what it stands for.
    assert furthest(packed.arrays, plain.arrays) < 0.1
    assert packed.traffic.bytes_up < 0.6 * plain.traffic.bytes_up
    assert packed.traffic.bytes_down < 0.6 * plain.traffic.bytes_down


@pytest.mark.parametrize("strategy", [LocalModels, Ensemble])
def test_models_that_stay_apart_come_rounded(strategy):
    packed, plain = play(strategy(compress="int8")), play(strategy())
    assert 0 < furthest(packed.arrays, plain.arrays) < 4 * 2 * HALF_STEP["int8"]


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "most"), [("float16", 0.54), ("int8", 0.27), ("int4", 0.15)])
def test_fifty_thousand_weights_take_a_fraction_of_their_bytes(form, most):
    """Ten rounds with evaluation: the first model goes down in half precision."""
    size = (250, 200)
    packed = play(FedAvg(compress=form, fraction_evaluate=0.0), rounds=10, start=initial(size))
    plain = play(FedAvg(fraction_evaluate=0.0), rounds=10, start=initial(size))
    assert packed.traffic.bytes_up <= most * plain.traffic.bytes_up
    assert packed.traffic.bytes_down <= (most + 0.03) * plain.traffic.bytes_down


def test_a_node_that_has_evaluated_a_model_gets_no_second_copy():
    grid = PackedGrid(packed_app(), 3)
    play(FedAvg(compress="int8"), grid=grid, rounds=3)
    assert sent_to(grid, 1) == [
        (1, "t", "whole"),
        (1, "e", "packed"),
        (2, "t", "none"),
        (2, "e", "packed"),
        (3, "t", "none"),
        (3, "e", "packed"),
    ]


def test_float32_changes_no_byte_and_no_number():
    """Beside Flower's own FedAvg, summed in the same order: equal to the last bit."""
    grid = PackedGrid(packed_app(), 3)
    said = play(FedAvg(compress="float32"), grid=grid)
    assert {how for *_, how in grid.sent} == {"plain"}
    unsaid = play(FedAvg(), packed_app(mods=[fault_reply_mod]), nodes=3)
    assert arrays_equal(said.arrays, unsaid.arrays)
    assert said.traffic == unsaid.traffic
    ordered = InProcessGrid(packed_app(mods=[fault_reply_mod]), 3)
    theirs = FlowersFedAvg().start(ordered, initial(), num_rounds=4)
    assert furthest(said.arrays, theirs.arrays) < 1e-6


def test_flower_has_nothing_to_warn_of(caplog):
    """Of a record that is replaced by one of another type it does, in every message."""
    play(FedAvg(compress="int8"))
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == []


# --- who has what ---------------------------------------------------------------------------------


def test_nodes_with_different_models_all_get_what_they_lack():
    """Half of the nodes a round: all start from the global model, within one rounding of it."""
    seen, globals_ = [], []

    def note(number, arrays):
        globals_.append(to_numpy(arrays)["w"])

    grid = PackedGrid(packed_app(seen=seen), 6)
    strategy = FedAvg(compress="int8", fraction_train=0.5, fraction_evaluate=0.5, seed=1)
    strategy.start(grid, initial(), num_rounds=8, evaluate_fn=note)
    for number, kind, _, arrays in seen:
        model = globals_[number - (kind == "train")]
        assert np.abs(arrays["w"] - model).max() < 4 * HALF_STEP["int8"]
    for node in range(6):
        assert [how for *_, how in sent_to(grid, node)].count("whole") <= 1


@pytest.mark.parametrize("maker", ["fedavg", "half", "adam"])
def test_a_node_that_lost_its_state_is_sent_the_whole_model_and_counts(maker):
    grid = PackedGrid(packed_app(), 4, forgets=[3])
    result = play(MAKERS[maker](compress="int8"), grid=grid, rounds=5)
    assert result.failures == ()
    assert furthest(result.arrays, play(MAKERS[maker](), rounds=5).arrays) < 0.1
    if maker == "fedavg":
        assert sent_to(grid, 0)[4:6] == [(3, "t", "none"), (3, "t", "whole")]


def test_a_reply_that_was_lost_leaves_nothing_over():
    """Its node is further than the server knows, and is sent the whole model."""
    grid = PackedGrid(packed_app(), 3, unheard=[2])
    result = play(FedAvg(compress="int4", fraction_evaluate=0.0), grid=grid, rounds=4)
    assert [(number, f.node) for number, f in result.failures] == [(2, "0")]
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert len(result.history[3].nodes_answered) == 3


DIVERGED = {
    "nan": lambda model: {**model, "w": model["w"] * np.nan},
    "infinity": lambda model: {**model, "w": model["w"] + np.inf},
    "far": lambda model: {**model, "w": model["w"] * np.float32(1e30)},
}


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("how", DIVERGED)
def test_a_node_that_diverged_once_is_named_once(how, form):
    """Else what is left over of 1e30 would be in its models for rounds to come."""
    app = packed_app({(1, 2): DIVERGED[how]})
    result = play(FedAvg(compress=form, fraction_evaluate=0.0), app, rounds=5)
    assert [(number, f.node) for number, f in result.failures] == [(2, "1")]
    assert np.abs(result.arrays["w"].numpy()).max() < 10


def test_nodes_without_a_name_on_the_grid_tell_it_through_the_mod():
    """As on Ray and on a SuperLink; the mod is the only one that the app has."""
    result = play(FedAvg(compress="int8"), grid=Nameless(packed_app(), 4))
    assert result.failures == ()
    assert result.history[1].nodes_answered == ("0", "1", "2", "3")
    assert arrays_equal(result.arrays, play(FedAvg(compress="int8")).arrays)


def test_a_strategy_of_flowers_that_calls_the_model_otherwise_is_packed_too():
    inner = FedAvgM(**FLOWERS, arrayrecord_key="weights")
    grid = PackedGrid(packed_app(key="weights"), 3)
    result = play(FlowerStrategy(inner=inner, compress="int8"), grid=grid)
    plain = FlowerStrategy(inner=FedAvgM(**FLOWERS, arrayrecord_key="weights"))
    same = play(plain, packed_app(key="weights"), nodes=3)
    assert result.traffic.bytes_down < 0.6 * same.traffic.bytes_down
    assert result.traffic.bytes_up < 0.6 * same.traffic.bytes_up


def test_a_server_in_double_precision_has_nodes_in_single():
    """FedAdam's model is float64 from the second round on; who comes then trains in float32."""
    grid = PackedGrid(packed_app(), 4, forgets=[3])
    result = play(MAKERS["adam"](compress="int8"), grid=grid, rounds=5)
    ups = [record.traffic.bytes_up for record in result.history[1:]]
    assert max(ups) < 1.2 * min(ups)


def test_beyond_the_limit_of_memory_nodes_get_whole_models(monkeypatch, tmp_path):
    """Room for one model: those that have another are sent the next one whole."""
    monkeypatch.setattr(model_links, "MOST_BYTES", 5000)
    grid = PackedGrid(packed_app(), 6)
    made = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "seed": 1, "checkpoint_dir": tmp_path}
    result = play(FedAvg(compress="int8", **made), grid=grid, rounds=8)
    groups, _ = CheckpointFolder(tmp_path).load()
    assert sum(array.nbytes for key, array in groups["memory"].items() if key[-2:] == "/w") == 4000
    assert result.failures == ()
    whole = [how for *_, how in grid.sent].count("whole")
    assert 6 < whole < len(grid.sent)
    assert (
        furthest(
            result.arrays,
            play(FedAvg(**{**made, "checkpoint_dir": None}), nodes=6, rounds=8).arrays,
        )
        < 0.1
    )


class Learning(InProcessGrid):
    """The grid does not know names, and nodes do not tell them until they train."""

    def get_nodes(self):
        return []

    def _deliver(self, message, timeout):
        return None if wants_name(message.content) else super()._deliver(message, timeout)


def test_nodes_that_tell_their_names_with_their_replies_keep_what_they_have(monkeypatch):
    monkeypatch.setitem(SHAPES, "a", (6, 50))
    monkeypatch.setitem(SHAPES, "b", (20, 10))

    def whole_models(kind):
        whole = []

        class Counting(kind):
            def _deliver(self, message, timeout):
                records = message.content.config_records.values()
                whole.extend(record for record in records if "packed-layout" in record)
                return super()._deliver(message, timeout)

        strategy = MultiModel(budget=4, sampling="full", compress="int8", seed=2)
        grid = Counting(pulling_app(), 4)
        result = strategy.start(grid, to_record(join_models(start_models())), num_rounds=4)
        assert result.failures == ()
        return len(whole)

    # Four nodes with two models, but for one that lacks the second: each whole once.
    assert whole_models(InProcessGrid) == whole_models(Learning) == 7


@pytest.mark.parametrize("make", [FedAvg, MultiModel])
def test_nodes_that_are_renamed_between_rounds_keep_what_they_have(make, monkeypatch, tmp_path):
    """With several models the memory is made anew under new names, and must not lose this."""
    monkeypatch.setitem(SHAPES, "a", (6, 50))
    several = make is MultiModel
    options = {"sampling": "full"} if several else {}
    strategy = make(compress="int8", checkpoint_dir=tmp_path, **options)
    app, start = pulling_app() if several else packed_app(), initial()
    play(strategy, app, start=to_record(join_models(start_models())) if several else start)
    groups, _ = CheckpointFolder(tmp_path).load()
    before = ServerState(groups["arrays"], (), memory=groups["memory"])
    after = strategy._renamed(before, {"1": "one"})
    assert after.memory.keys() == before.memory.keys()
    old, new = (json.loads(each.memory["links/notes"].tobytes()) for each in (before, after))
    for kind in ("held", "counted"):
        assert new[kind]["one"] == old[kind]["1"]
        assert new[kind].keys() == {"0", "one", "2", "3"} & (old[kind].keys() | {"one"})
    assert not several or b'"one"' in b"".join(
        a.tobytes() for a in without_links(after.memory).values()
    )


def test_a_node_that_left_is_not_in_the_checkpoint(tmp_path):
    class Leaving(PackedGrid):
        def _deliver(self, message, timeout):
            reply = super()._deliver(message, timeout)
            if self.sent[-1][0] == 3 and self.number(message.metadata.dst_node_id) == 2:
                reply.content = pack_withdrawal("2")
            return reply

    grid = Leaving(packed_app(), 4)
    result = play(FedAvg(compress="int8", checkpoint_dir=tmp_path), grid=grid, rounds=5)
    assert result.history[-1].nodes_answered == ("0", "1", "3")
    groups, _ = CheckpointFolder(tmp_path).load()
    notes = groups["memory"]["links/notes"].tobytes().decode()
    assert '"1":' in notes
    assert '"2":' not in notes


# --- resuming -------------------------------------------------------------------------------------


class StopAfter(Callback):
    def __init__(self, number):
        self.number = number

    def on_round_end(self, record):
        if record.round == self.number:
            raise KeyboardInterrupt


@pytest.mark.parametrize("keep_replies", [True, False])
@pytest.mark.parametrize("maker", ["fedavg", "half", "adam"])
def test_a_resumed_run_equals_the_unbroken_one(maker, keep_replies, tmp_path):
    unbroken = play(MAKERS[maker](compress="int4"), rounds=6)
    grid = InProcessGrid(packed_app(), 4)
    made = {"compress": "int4", "checkpoint_dir": tmp_path, "keep_replies": keep_replies}
    for number in (1, 3):
        strategy = MAKERS[maker](resume=True, callbacks=[StopAfter(number)], **made)
        with pytest.raises(KeyboardInterrupt):
            play(strategy, grid=grid, rounds=6)
    resumed = play(MAKERS[maker](resume=True, **made), grid=grid, rounds=6)
    assert arrays_equal(resumed.arrays, unbroken.arrays)


@pytest.mark.parametrize("maker", ["no evaluation", "half"])
@pytest.mark.parametrize("keep_replies", [True, False])
def test_killed_at_any_message_it_goes_on_to_the_last_bit(maker, keep_replies, tmp_path):
    """Nodes that have trained in the round are further than the checkpoint, and answer the same.

    But where nodes were evaluating and replies are not kept: then they begin from a whole model.
    """
    counting = PackedGrid(packed_app(), 4)
    unbroken = play(MAKERS[maker](compress="int4"), grid=counting, rounds=4)
    for at in range(5, counting.count + 1):
        kind = counting.sent[at - 1][1]
        grid, made = PackedGrid(packed_app(), 4, dies=at), {"compress": "int4"}
        made |= {"checkpoint_dir": tmp_path / str(at), "keep_replies": keep_replies}
        with pytest.raises(KeyboardInterrupt):
            play(MAKERS[maker](**made), grid=grid, rounds=4)
        resumed = play(MAKERS[maker](resume=True, **made), grid=grid, rounds=4)
        assert resumed.failures == ()
        if kind == "train" or keep_replies:
            assert arrays_equal(resumed.arrays, unbroken.arrays), at
        else:
            assert furthest(resumed.arrays, unbroken.arrays) < 4 * 4 * HALF_STEP["int4"]


def test_a_node_never_takes_one_model_for_another_of_an_interrupted_round(tmp_path):
    """It had evaluated a model that the resumed round, without another node, does not make again.

    Were models counted, both would have the same number.
    """
    seen = []
    app = packed_app(seen=seen)
    grid = PackedGrid(app, 3, dies=3 + 3 + 3 + 2)
    made = {"compress": "int4", "checkpoint_dir": tmp_path, "keep_replies": False}
    with pytest.raises(KeyboardInterrupt):
        play(FedAvg(**made), grid=grid)
    del seen[:]
    behind = {(2, 2): lambda model: {**model, "w": model["w"] * np.nan}}
    grid._app = packed_app(behind, seen=seen)
    models = {}
    FedAvg(resume=True, **made).start(
        grid, initial(), num_rounds=3, evaluate_fn=lambda r, a: models.update({r: to_numpy(a)["w"]})
    )
    for number, kind, node, arrays in seen:
        if kind == "evaluate":
            off = np.abs(arrays["w"] - models[number]).max()
            assert off < 4 * HALF_STEP["int4"], (number, node)


@pytest.mark.parametrize(
    ("first", "then"), [("int8", "int4"), ("int8", "float32"), ("float32", "int8")]
)
def test_a_checkpoint_of_another_form_is_refused(first, then, tmp_path):
    play(FedAvg(compress=first, checkpoint_dir=tmp_path), rounds=2)
    with pytest.raises(CheckpointError, match=f"compress {first}, this run has {then}"):
        play(FedAvg(compress=then, checkpoint_dir=tmp_path, resume=True))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["fedavg", "once", "momentum"])
@pytest.mark.parametrize("mods", [[], [fault_reply_mod]])
def test_nodes_without_the_mod_are_told_to_have_it(maker, mods):
    with pytest.raises((MissingModError, RoundFailedError), match=r"compression_mod\(\)"):
        play(MAKERS[maker](compress="int8"), packed_app(mods=mods))


class Mixed:
    """An app whose node 1 has no mod."""

    def __init__(self, mods):
        self.with_mod, self.without = packed_app(), packed_app(mods=mods)

    def __call__(self, message, context):
        lacks = context.node_config["partition-id"] == 1
        return (self.without if lacks else self.with_mod)(message, context)


@pytest.mark.parametrize("mods", [[], [fault_reply_mod]])
def test_one_node_without_the_mod_is_told_by_name_and_the_others_go_on(mods):
    result = play(FedAvg(compress="int8", fraction_evaluate=0.0), Mixed(mods), rounds=2)
    assert [(number, f.node) for number, f in result.failures] == [(1, "1"), (2, "1")]
    assert "ClientApp(mods=[compression_mod()" in result.failures[0][1].reason
    assert result.history[2].nodes_answered == ("0", "2", "3")


def test_a_mod_of_ours_around_it_does_not_take_it_for_missing():
    app = packed_app(mods=[fault_reply_mod, compression_mod()])
    assert play(FedAvg(compress="int8"), app).failures == ()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedAvg(compress="int3"), "compress must be one of"),
        (lambda: FedAvg(compress="int8", secure=SecureSum()), "take one of the two"),
        (lambda: Gems(compress="int8"), "other things than models"),
        (lambda: Serial(learn=lambda arrays, rounds: None, compress="int8"), "other things"),
        (
            lambda: Pooled(fit=lambda *_: None, input_shape=(2,), compress="int8"),
            "other things than models",
        ),
        (lambda: MultiModel(sampling="scaffold", compress="int8"), "control variates"),
    ],
)
def test_what_cannot_be_compressed_is_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def test_a_model_with_nothing_to_round_is_refused_before_the_first_message():
    start = to_record({"b": np.zeros(5, np.float32)})
    with pytest.raises(OptionError, match="nothing to compress"):
        play(FedAvg(compress="int8"), start=start)


def test_another_loop_cannot_pack():
    inner = FedAvg(compress="int8")
    wrapped = DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 1.0, 2)
    with pytest.raises(OptionError, match="start FedAvg by itself"):
        wrapped.start(InProcessGrid(packed_app(), 3), initial(), num_rounds=1)
