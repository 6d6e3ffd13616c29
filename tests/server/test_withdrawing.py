"""Nodes that leave while a run is under way: at every stage the model is that of the others."""

import json
from datetime import UTC, datetime

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import blobs, both_parts
from helpers_gems import initial, linear_app
from helpers_layerwise import initial as initial_network
from helpers_layerwise import ready_app
from helpers_learners import initial as initial_walk
from helpers_learners import walking_app

from conftest import record_equal
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.client.secure_sum_mod import secure_sum_mod
from gems_flwr.client.withdrawal import is_withdrawing
from gems_flwr.errors import NotEnoughNodesError, OptionError, RoundFailedError
from gems_flwr.receipts import load_receipts, model_digest, space_digest
from gems_flwr.runtime.checkpoint import load_arrays
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.secure.secure_sum import SecureSum
from gems_flwr.server.settings import Callback
from gems_flwr.spaces.space_files import SpaceFolder
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.model_replies import instruction_config
from gems_flwr.wire.purposes import purpose_of
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.space_requests import Ball, Cone
from gems_flwr.wire.withdrawals import pack_withdrawal, withdraws

NODES = 4
LEAVER = 1
FULL = Cone(rank="full", min_count=2)


def node_data(context):
    node = int(context.node_config["partition-id"])
    return blobs([0, 1, 2, 3], per_class=30 + 5 * node, seed=10 * node)


class Leaves:
    """An app whose node 1 leaves as soon as it is asked for something, from a round on."""

    def __init__(self, app, folder, stage=None, server_round=1):
        self.app, self.stage, self.round = app, stage, server_round
        self.flag = folder / "leave-now"
        self.asked = []

    def __call__(self, message, context):
        node = context.node_config["partition-id"]
        now = instruction_config(message.content)["server-round"]
        self.asked.append((node, now, purpose_of(message)))
        if node == LEAVER and self.stage == purpose_of(message) and now >= self.round:
            self.flag.touch()
        return self.app(message, context)

    def grid(self, nodes=range(NODES)):
        leave = {LEAVER: {"withdraw": str(self.flag)}}
        return InProcessGrid(self, [{"partition-id": n, **leave.get(n, {})} for n in nodes])


def app():
    return linear_app(node_data, limits=UNLIMITED)


def left(tmp_path, stage, strategy, server_round=1):
    """A run that node 1 leaves, and the app."""
    leaving = Leaves(app(), tmp_path, stage, server_round)
    return strategy.start(leaving.grid(), initial()), leaving


def without(strategy):
    """The run in which it never was."""
    others = [{"partition-id": n} for n in range(NODES) if n != LEAVER]
    return strategy.start(InProcessGrid(app(), others), initial())


STAGES = {
    "instead of a space": ("space", 1, {}),
    "at the verification": ("score", 1, {"verify": True}),
    "at the choice of a head": ("choice", 1, {"head": "auto"}),
    "at the audit": ("score", 1, {"audit": True, "min_nodes": 2}),
}


@pytest.mark.parametrize("space", [FULL, Cone(rank=3, min_count=2), Cone(sums=True)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_the_model_is_that_of_a_run_in_which_the_node_never_was(tmp_path, stage, space):
    purpose, server_round, options = STAGES[stage]
    if space.is_summed and ("audit" in options or "head" in options):
        pytest.skip("sums go with neither")
    result, leaving = left(tmp_path, purpose, Gems(space=space, **options), server_round)
    alone = without(Gems(space=space, **options))
    assert record_equal(result.arrays, alone.arrays)
    assert result.details["node_scores"] == alone.details["node_scores"]
    assert result.details["margins"] == alone.details["margins"]
    # Nothing was computed for the question by which it left, and nobody asked it again.
    last = max(i for i, (node, *_) in enumerate(leaving.asked) if node == LEAVER)
    assert leaving.asked[last] == (LEAVER, 1, purpose)
    # The others sent their spaces once.
    assert leaving.asked.count((0, 1, "space")) == 1
    [receipt] = result.details["withdrawals"]
    assert receipt["forgotten"]
    assert list(receipt["removed"]) == ["1"]
    assert str(LEAVER) not in result.history[1].nodes_answered
    assert result.failures[0][1].reason == "it has withdrawn from the run"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("stage", ["gradient", "losses", "score"])
@pytest.mark.parametrize("space", [FULL, Cone(sums=True)], ids=str)
def test_refinement_begins_anew_without_the_node(tmp_path, stage, kept, space):
    """All its rounds are played again: the model is that of a run without the node."""
    folder = tmp_path / "run" if kept else None
    options = {"space": space, "refine": 3, "verify": True}
    # The score is asked for in the last round, 4; the others in round 3, after a step with it.
    strategy = Gems(**options, checkpoint_dir=folder)
    result, leaving = left(tmp_path, stage, strategy, 1 if stage == "score" else 3)
    alone = without(Gems(**options))
    assert record_equal(result.arrays, alone.arrays)
    assert result.details["loss"] == alone.details["loss"]
    assert result.details["node_scores"] == alone.details["node_scores"]
    [receipt] = result.details["withdrawals"]
    assert receipt["note"] == "refinement begins anew without it"
    assert receipt["forgotten"]
    # Rounds before it left, the round itself, and all of refinement.
    before = alone.history[-1].round if stage == "score" else 3
    assert result.history[-1].round == before + alone.history[-1].round - 1
    assert leaving.asked.count((0, 1, "space")) == 1


def test_the_receipt_has_the_digests_of_models_and_space(tmp_path):
    began = datetime.now(UTC).replace(microsecond=0)
    folder = tmp_path / "run"
    alone = Gems(space=FULL).start(InProcessGrid(app(), NODES), initial())
    result, _ = left(tmp_path, "score", Gems(space=FULL, verify=True, checkpoint_dir=folder))
    [receipt] = load_receipts(folder / "receipts.json")
    assert receipt.to_json() == result.details["withdrawals"][0]
    assert receipt.model_before == model_digest(to_numpy(alone.arrays))
    assert receipt.model_after == model_digest(to_numpy(result.arrays))
    own = Gems(space=FULL, min_nodes=1, checkpoint_dir=tmp_path / "own")
    own.start(InProcessGrid(app(), [{"partition-id": LEAVER}]), initial())
    [space] = SpaceFolder(tmp_path / "own" / "spaces").load().values()
    assert receipt.removed == {"1": space_digest(space)}
    # As node_data has it: four classes of 30 + 5 n samples on node n.
    assert receipt.remaining == {"0": 4 * 30, "2": 4 * 40, "3": 4 * 45}
    assert (receipt.round, receipt.forgotten) == (1, True)
    assert began <= datetime.fromisoformat(receipt.at) <= datetime.now(UTC)


def bytes_of(space):
    """What to look for in files: rows of means and covariances in every form they may have."""
    arrays, _ = space.to_arrays()
    rows = [array.reshape(-1)[:4] for array in arrays.values() if array.dtype.kind == "f"]
    return [row.astype(kind).tobytes() for row in rows for kind in ("<f2", "<f4", "<f8")]


@pytest.mark.parametrize(("stage", "server_round"), [("score", 1), ("gradient", 3), ("losses", 2)])
def test_nothing_of_the_node_is_left_in_the_folder(tmp_path, stage, server_round):
    folder = tmp_path / "run"
    options = {"space": FULL, "refine": 3} if stage != "score" else {"space": FULL}
    own = Gems(space=FULL, min_nodes=1, checkpoint_dir=tmp_path / "own")
    own.start(InProcessGrid(app(), [{"partition-id": LEAVER}]), initial())
    [space] = SpaceFolder(tmp_path / "own" / "spaces").load().values()
    needles, sizes = bytes_of(space), []

    class Watches(Callback):
        def on_exchange(self, server_round, nodes):
            sizes.append(found(folder))

    def found(folder):
        kept = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        return any(needle in data for needle in needles for data in kept)

    strategy = Gems(**options, verify=True, checkpoint_dir=folder, callbacks=[Watches()])
    result, _ = left(tmp_path, stage, strategy, server_round)
    assert any(sizes), "the needles are of no use"
    assert not found(folder)
    assert not list(folder.rglob("1.space.safetensors"))
    _, meta = load_arrays(folder / "checkpoint.safetensors")
    receipts = meta["details"].pop("withdrawals")
    assert [list(each["removed"]) for each in receipts] == [["1"]]
    assert '"1":' not in json.dumps(meta["details"])
    assert "1" not in result.details["margins"]


def test_a_run_that_dies_after_the_withdrawal_and_is_resumed_goes_on_without_the_node(tmp_path):
    """The reply by which it left is in the inbox; what it had sent before is not."""

    class Dies(Callback):
        def on_reply(self, server_round, node, usable):
            if node == "3" and leaving.flag.exists() and not self.died:
                self.died = True
                raise KeyboardInterrupt

        died = False

    leaving = Leaves(app(), tmp_path, "score")
    options = {"space": FULL, "verify": True, "checkpoint_dir": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        Gems(**options, callbacks=[Dies()]).start(leaving.grid(), initial())
    result = Gems(**options, resume=True).start(leaving.grid(), initial())
    assert record_equal(result.arrays, without(Gems(space=FULL)).arrays)
    assert [list(each["removed"]) for each in result.details["withdrawals"]] == [["1"]]


def test_a_resumed_run_does_not_ask_a_node_that_had_left(tmp_path):
    leaving = Leaves(app(), tmp_path, "gradient", 2)
    options = {"space": FULL, "refine": 3, "checkpoint_dir": tmp_path / "run"}
    first = Gems(**options).start(
        leaving.grid(), initial(), should_stop=lambda number, result: number == 2
    )
    assert first.details["withdrawals"]
    leaving.flag.unlink()
    leaving.asked.clear()
    result = Gems(**options, resume=True).start(leaving.grid(), initial())
    asked = {purpose for node, _, purpose in leaving.asked if node == LEAVER}
    assert asked <= {"names"}
    assert record_equal(result.arrays, without(Gems(space=FULL, refine=3)).arrays)
    assert len(load_receipts(tmp_path / "run" / "receipts.json")) == 1


def test_of_sums_that_were_only_kept_as_a_total_nothing_can_be_taken_out(tmp_path):
    leaving = Leaves(app(), tmp_path, "gradient", 3)
    options = {"space": Cone(sums=True), "refine": 3, "checkpoint_dir": tmp_path / "run"}
    Gems(**options).start(leaving.grid(), initial(), should_stop=lambda n, result: n == 2)
    result = Gems(**options, resume=True).start(leaving.grid(), initial())
    [receipt] = result.details["withdrawals"]
    assert not receipt["forgotten"]
    assert "only the total" in receipt["note"]
    # And the others go on.
    assert result.details["refinement"][-1]["nodes"] == NODES - 1


@pytest.mark.parametrize(
    ("stage", "server_round", "forgotten"), [("keys", 1, True), ("score", 1, False)]
)
def test_who_leaves_a_secure_sum_is_missing_or_stays_in_the_total(
    tmp_path, stage, server_round, forgotten
):
    """No second total is asked for without it: the difference would show what it had added."""
    source = both_parts(node_data)
    client = ClientApp(mods=[secure_sum_mod(), good_enough_mod(source, limits=UNLIMITED)])

    @client.train()
    def train(message, context):
        raise NotImplementedError

    leaving = Leaves(client, tmp_path, stage, server_round)
    space = Cone(sums=True, sketch=4)
    strategy = Gems(space=space, secure=SecureSum(), refine=2, verify=True)
    result = strategy.start(leaving.grid(), initial())
    [receipt] = result.details["withdrawals"]
    assert receipt["forgotten"] is forgotten
    assert ("only the total" in receipt["note"]) is not forgotten
    asked = [what for node, _, what in leaving.asked if node == 0 and what == "moments"]
    assert len(asked) == 4


def test_refinement_by_secure_sums_goes_on_without_who_has_left(tmp_path):
    source = both_parts(node_data)
    client = ClientApp(mods=[secure_sum_mod(), good_enough_mod(source, limits=UNLIMITED)])

    @client.train()
    def train(message, context):
        raise NotImplementedError

    leaving = Leaves(client, tmp_path, "gradient", 2)
    strategy = Gems(space=Cone(sums=True, sketch=4), secure=SecureSum(), refine=3)
    result = strategy.start(leaving.grid(), initial())
    [receipt] = result.details["withdrawals"]
    assert not receipt["forgotten"]
    assert result.details["refinement"][1]["nodes"] == NODES - 1
    assert result.details["refinement"][1]["taken"]


def test_the_balls_of_earlier_rounds_go_with_the_node(tmp_path):
    """With radii that never meet, all rounds are played, with the node or without it."""
    options = {
        "space": Ball(radius="certified", epsilon=0.95),
        "on_empty": "retrain",
        "initialise": lambda server_round: to_numpy(initial(server_round)),
        "retrains": 2,
    }
    folder = tmp_path / "run"
    leaving = Leaves(linear_app(), tmp_path, "space", 2)
    result = Gems(**options, checkpoint_dir=folder).start(leaving.grid(), initial())
    assert set(SpaceFolder(folder / "spaces").load()) == {"0", "2", "3"}
    [receipt] = result.details["withdrawals"]
    assert receipt["removed"]["1"]
    assert set(result.details["margins"]) == {"0", "2", "3"}
    others = [{"partition-id": n} for n in (0, 2, 3)]
    alone = Gems(**options).start(InProcessGrid(linear_app(), others), initial())
    assert [record.round for record in alone.history] == [0, 1, 2, 3]
    assert record_equal(result.arrays, alone.arrays)


def test_two_leave_one_after_the_other_in_one_round(tmp_path):
    class Both(Leaves):
        def __call__(self, message, context):
            if context.node_config["partition-id"] == 3 and "again" in message.metadata.group_id:
                return Message(pack_withdrawal("3"), reply_to=message)
            return super().__call__(message, context)

    leaving = Both(app(), tmp_path, "score")
    result = Gems(space=FULL, verify=True).start(leaving.grid(), initial())
    others = [{"partition-id": 0}, {"partition-id": 2}]
    alone = Gems(space=FULL, verify=True).start(InProcessGrid(app(), others), initial())
    assert record_equal(result.arrays, alone.arrays)
    assert set(result.details["node_scores"]) == {"0", "2"}
    removed = [list(each["removed"]) for each in result.details["withdrawals"]]
    assert removed == [["1"], ["3"]]


def test_with_too_few_left_the_round_fails_and_says_why(tmp_path):
    with pytest.raises(RoundFailedError, match=r"3 nodes are left after \['1'\] withdrew"):
        left(tmp_path, "score", Gems(space=FULL, verify=True, min_nodes=4))
    with pytest.raises(NotEnoughNodesError, match="3 nodes are connected"):
        left(tmp_path, "train", FedAvg(min_nodes=3, min_available_nodes=4, wait_seconds=0.1))


class TestOtherStrategies:
    def test_an_average_keeps_what_was_trained_and_the_receipt_says_so(self, tmp_path):
        strategy = FedAvg(fraction_evaluate=0.0)
        leaving = Leaves(app(), tmp_path, "train", 2)
        result = strategy.start(leaving.grid(), initial(), num_rounds=3)
        [receipt] = result.details["withdrawals"]
        assert not receipt["forgotten"]
        assert "is in the model" in receipt["note"]
        assert set(receipt["remaining"]) == {"0", "2", "3"}
        rounds = [now for node, now, _ in leaving.asked if node == LEAVER]
        assert rounds == [1, 2]
        assert [record.nodes_answered for record in result.history[2:]] == [("0", "2", "3")] * 2

    def test_who_leaves_before_anything_was_sent_was_never_there(self, tmp_path):
        strategy = FedAvg(fraction_evaluate=0.0)
        leaving = Leaves(app(), tmp_path, "train", 1)
        result = strategy.start(leaving.grid(), initial(), num_rounds=2)
        [receipt] = result.details["withdrawals"]
        assert receipt["forgotten"]
        assert (receipt["removed"], receipt["model_before"]) == ({"1": None}, None)
        others = [{"partition-id": n} for n in (0, 2, 3)]
        alone = strategy.start(InProcessGrid(app(), others), initial(), num_rounds=2)
        assert record_equal(result.arrays, alone.arrays)

    def test_a_local_learner_leaves_and_the_others_go_on(self, tmp_path):
        leaving = Leaves(walking_app(), tmp_path, "train", 2)
        strategy = DynamicAveraging(delta=0.01)
        result = strategy.start(leaving.grid(), initial_walk(), num_rounds=4)
        assert [list(each["removed"]) for each in result.details["withdrawals"]] == [["1"]]
        asked = [now for node, now, what in leaving.asked if node == LEAVER and what != "names"]
        assert max(asked) == 2
        assert [record.nodes_answered for record in result.history[3:]] == [("0", "2", "3")] * 2

    def test_the_output_layer_of_a_network_is_made_anew_and_hidden_ones_stay(self, tmp_path):
        leaving = Leaves(ready_app(), tmp_path, "score", 2)
        strategy = LayerwiseGems(verify=True, checkpoint_dir=tmp_path / "run")
        result = strategy.start(leaving.grid(range(3)), initial_network())
        [receipt] = result.details["withdrawals"]
        assert not receipt["forgotten"]
        assert receipt["note"].startswith("of the layers below the output layer")
        assert receipt["removed"]["1"]
        assert set(SpaceFolder(tmp_path / "run" / "spaces").load()) == {"0", "2"}
        assert set(result.details["margins"]) == {"0", "2"}
        assert leaving.asked.count((0, 3, "space")) == 1


def test_a_node_leaves_for_itself_alone(tmp_path):
    """Replies count by id: to call oneself by another's name, or to answer for it, is no use."""

    class Liar(Leaves):
        def __call__(self, message, context):
            if context.node_config["partition-id"] == 3 and purpose_of(message) == "score":
                return Message(pack_withdrawal("1"), reply_to=message)
            return super().__call__(message, context)

    liar = Liar(app(), tmp_path)
    result = Gems(space=FULL, verify=True).start(liar.grid(), initial())
    [receipt] = result.details["withdrawals"]
    assert list(receipt["removed"]) == ["3"]
    assert set(result.details["margins"]) == {"0", "1", "2"}


def test_nothing_else_in_the_reply_of_a_leaver_is_looked_at_or_kept(tmp_path):
    secret = b"my secret data"

    class Chatty(Leaves):
        def __call__(self, message, context):
            reply = super().__call__(message, context)
            if withdraws(reply.content):
                reply.content["withdrawal"]["besides"] = secret
                seen.append(True)
            return reply

    class Watches(Callback):
        def on_reply(self, server_round, node, usable):
            files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
            kept.append(any(secret in path.read_bytes() for path in files))

    seen, kept = [], []
    chatty = Chatty(app(), tmp_path, "score")
    strategy = Gems(verify=True, checkpoint_dir=tmp_path / "run", callbacks=[Watches()])
    strategy.start(chatty.grid(), initial())
    assert seen
    assert not any(kept)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, False), ({"withdraw": False}, False), ({"withdraw": True}, True)],
)
def test_a_nodes_config_says_whether_it_leaves(config, expected):
    assert is_withdrawing(config) is expected


def test_a_file_may_say_so_while_the_node_runs(tmp_path):
    flag = tmp_path / "leave"
    assert not is_withdrawing({"withdraw": str(flag)})
    flag.touch()
    assert is_withdrawing({"withdraw": str(flag)})
    with pytest.raises(OptionError, match="expected true, false or a path, got 1"):
        is_withdrawing({"withdraw": 1})


def test_only_the_record_itself_is_a_withdrawal():
    assert withdraws(pack_withdrawal("north"))
    assert not withdraws(RecordDict())
    record = pack_withdrawal("north")
    record["withdrawal"]["withdraw"] = 1
    assert not withdraws(record)
