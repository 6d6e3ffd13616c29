"""GEMS of which the server sees sums alone: the same digits, whoever drops out when."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from helpers_gems import accuracy, initial, node_data

from gems_flwr import (
    Ball,
    Callback,
    Cone,
    Gems,
    InProcessGrid,
    NodeLimits,
    OptionError,
    RoundFailedError,
    SecureSum,
    good_enough_mod,
    secure_sum_mod,
)
from gems_flwr.__main__ import main
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.moments.class_sums import in_chunks, sum_classes
from gems_flwr.moments.total_sums import class_sums_words
from gems_flwr.offline_totals import write_difference
from gems_flwr.secure.kept_total import load_total
from gems_flwr.wire.keys import SUMMAND, WORDS
from gems_flwr.wire.moment_requests import requested_moment_sums
from gems_flwr.wire.records import to_record
from gems_flwr.wire.secure_messages import stage_word

SPACE = Cone(sums=True, sketch=2)


def app(*outer, secure=True, limits=UNLIMITED, only_sums=True):
    masks = [secure_sum_mod(only_sums=only_sums)] if secure else []
    spaces = good_enough_mod(both_parts(lambda context: node_data(context, 1)), limits=limits)
    client = ClientApp(mods=[*outer, *masks, spaces])

    @client.train()
    def train(message, context):
        raise NotImplementedError("sums of class moments need no training")

    return client


def run(client, nodes=5, *, secure=SecureSum(), **options):  # noqa: B008 - a frozen value
    strategy = Gems(**{"space": SPACE, "verify": True, "secure": secure, **options})
    return strategy.start(InProcessGrid(client, nodes), initial())


def digits(result):
    return [array.numpy().tobytes() for array in result.arrays.values()]


@pytest.mark.parametrize("options", [{}, {"refine": 2}, {"head": "lda"}, {"head": "auto"}])
def test_masks_change_no_digit(options):
    secure = run(app(), **options)
    plain = run(app(secure=False), secure=None, **options)
    assert digits(secure) == digits(plain)
    assert secure.details["score"] == plain.details["score"]
    assert accuracy(secure.arrays) > 0.95


def test_full_moments_are_those_of_plain_sums_within_rounding():
    secure = run(app(), space=Cone(sums=True))
    plain = run(app(secure=False), secure=None, space=Cone(sums=True), verify=False)
    for one, other in zip(secure.arrays.values(), plain.arrays.values(), strict=True):
        assert np.abs(one.numpy() - other.numpy()).max() < 1e-3
    assert secure.history[1].exchanges == (
        *("keys", "shares"),
        *("moments", "reveal") * 2,
        *("score", "reveal"),
    )


def test_full_moments_can_be_refined():
    result = run(app(), space=Cone(sums=True), refine=2)
    assert result.details["refinement"][0]["taken"]


def test_a_node_leaves_a_secure_sum_by_a_signed_difference(tmp_path):
    """The total without it is, to the last bit, the sum of the others' whole numbers."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "own.pem").write_bytes(private)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "3.pub").write_bytes(public)
    folder = tmp_path / "run"
    run(app(), space=Cone(sums=True), verify=False, checkpoint_dir=folder)
    kept = folder / "total.safetensors"
    total = load_total(kept)
    assert total.nodes == tuple("01234")
    context = SimpleNamespace(node_config={"partition-id": 3})
    write_difference(
        total.note.to_json(),
        *both_parts(lambda c: node_data(c, 1))(context)[0],
        node="3",
        key=tmp_path / "own.pem",
        output=tmp_path / "3.safetensors",
    )
    model = tmp_path / "model.safetensors"
    words = ["aggregate", "--total", kept, "--remove", "3", "--key", tmp_path / "3.pub"]
    words += ["--difference", tmp_path / "3.safetensors", "-o", model]
    assert main([str(word) for word in words]) == 0
    # The same run in which that node had added nothing: same grid, other total.
    without = load_total(kept)
    assert without.nodes == tuple("0124")
    parts = [class_sums_words(total.layout, own_sums(node)) for node in (0, 1, 2, 4)]
    assert (without.words == total.layout.add(parts)).all()
    receipt = json.loads((tmp_path / "model.receipts.json").read_text())
    assert "3" in str(receipt)


def own_sums(node):
    context = SimpleNamespace(node_config={"partition-id": node})
    inputs, labels = both_parts(lambda c: node_data(c, 1))(context)[0]
    return sum_classes(in_chunks(inputs, labels), 4)


def losing(stage, number, node):
    """Return a mod that loses a node at a stage of one of the sums."""

    def mod(message, context, call_next):
        content = message.content
        at = stage_word(content)
        here = context.node_config["partition-id"] == node
        if here and at == stage and dict(content["secure-sum"]).get("sum", 0) == number:
            raise ConnectionError("gone")
        return call_next(message, context)

    return mod


@pytest.mark.parametrize(
    ("stage", "number"),
    [("keys", 0), ("shares", 0)]
    + [(stage, number) for stage in ("mask", "reveal") for number in range(4)],
)
def test_a_node_may_drop_at_every_stage_of_every_sum(stage, number):
    result = run(app(losing(stage, number, 2)), nodes=7, verify=False)
    assert {failure.node for failure in result.history[1].failures} == {"2"}
    assert accuracy(result.arrays) > 0.95


def test_who_is_lost_before_the_first_sum_is_as_if_it_had_not_been_there():
    lost = run(app(losing("mask", 0, 4)))
    without = run(app(), nodes=4)
    # Rounding goes by how many could have been in the sum.
    for one, other in zip(lost.arrays.values(), without.arrays.values(), strict=True):
        assert np.abs(one.numpy() - other.numpy()).max() < 1e-3


def test_below_the_threshold_the_round_fails_and_says_why():
    client = app(losing("mask", 1, 0), losing("mask", 1, 1), losing("mask", 1, 2))
    with pytest.raises(RoundFailedError, match="the secure sum 'means' was not opened"):
        run(client)


def test_refinement_stays_where_it_is_if_a_sum_is_not_opened():
    def losing_gradients(message, context, call_next):
        config = message.content.config_records.get("config", {})
        if config.get("server-round") == 2 and context.node_config["partition-id"] < 3:
            raise ConnectionError("gone")
        return call_next(message, context)

    result = run(app(losing_gradients), refine=2)
    first, second = result.details["refinement"]
    assert not first["taken"]
    assert "not opened" in first["reason"] or "too few" in first["reason"]
    assert second["nodes"] == 5


def test_nothing_of_a_single_node_is_written(tmp_path):
    """Of every node's words and of its unmasked numbers, no 16 bytes are in any file."""
    told = []

    def listen(message, context, call_next):
        reply = call_next(message, context)
        if (words := reply.content.get(SUMMAND, {}).get(WORDS)) is not None:
            told.append(words)
        return reply

    # Once outside of the masks, once inside.
    masks = secure_sum_mod()
    spaces = good_enough_mod(both_parts(lambda c: node_data(c, 1)), limits=UNLIMITED)
    client = ClientApp(mods=[listen, masks, listen, spaces])
    client.train()(lambda message, context: None)
    strategy = Gems(space=SPACE, secure=SecureSum(), refine=1, checkpoint_dir=tmp_path)
    strategy.start(InProcessGrid(client, 5), initial())
    assert len(told) == 2 * 5 * 6
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert written
    for words in told:
        parts = [words[i : i + 16] for i in range(0, len(words) - 15, 16)]
        # Zeros are zeros anywhere.
        assert not any(part in written for part in parts if len(set(part)) > 8)


class Stop(Callback):
    """Ends the program after a round."""

    def on_round_end(self, record):
        if record.round == 2:
            raise KeyboardInterrupt


def test_a_run_that_was_interrupted_goes_on(tmp_path):
    whole = run(app(), refine=2)
    with pytest.raises(KeyboardInterrupt):
        run(app(), refine=2, checkpoint_dir=tmp_path, callbacks=[Stop()])
    assert digits(run(app(), refine=2, checkpoint_dir=tmp_path, resume=True)) == digits(whole)


def test_default_limits_answer_masked_sums_and_refuse_plain_ones():
    """A node with 120 samples of 10 features shows no exact moments, but hides in a sum."""
    assert accuracy(run(app(limits=NodeLimits()), nodes=6).arrays) > 0.95


def rare(context):
    """Every node has four classes; node 0 alone has some samples of a fifth."""
    inputs, labels = node_data(context, 1)
    if context.node_config["partition-id"] == 0:
        labels = labels.clone()
        labels[:20] = 4
    return inputs, labels


def test_a_class_that_is_rare_in_all_is_in_no_sum():
    """Twenty samples of a class that one node has: their total would be theirs."""
    seen = []

    def listen(message, context, call_next):
        request = requested_moment_sums(message.content)
        if request is not None and request.stage != "scale":
            seen.append(request.totals)
        return call_next(message, context)

    spaces = good_enough_mod(both_parts(rare), limits=NodeLimits())
    client = ClientApp(mods=[listen, secure_sum_mod(), spaces])
    client.train()(lambda message, context: None)
    model = initial()
    weight, bias = (model[key].numpy() for key in ("weight", "bias"))
    five = {"weight": np.vstack([weight, weight[:1]]), "bias": np.append(bias, bias[:1])}
    strategy = Gems(space=SPACE, refine=1, secure=SecureSum())
    result = strategy.start(InProcessGrid(client, 6), to_record(five))
    assert all(totals[4] == 0 for totals in seen)
    assert result.details["missing_classes"] == [4]
    assert result.details["refinement"][0]["taken"]


def test_a_request_for_masks_without_the_mod_is_told_which():
    with pytest.raises(RoundFailedError, match=r"mods=\[secure_sum_mod\(\), ...\]"):
        run(app(secure=False))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"space": Cone()}, "sums=True"),
        ({"space": Ball()}, "sums=True"),
        ({"robust": True}, "robust"),
        ({"audit": True}, "audit"),
        ({"max_examples": 10.0}, "max_examples"),
    ],
)
def test_what_looks_at_single_nodes_is_refused(options, said):
    with pytest.raises(OptionError, match=said):
        Gems(**{"space": SPACE, "secure": SecureSum(), **options})


def test_the_rounds_say_which_exchanges_there_were():
    result = run(app())
    assert result.history[1].exchanges == (
        *("keys", "shares"),
        *("moments", "reveal") * 4,
        *("score", "reveal"),
    )
