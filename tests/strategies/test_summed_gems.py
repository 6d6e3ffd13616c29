"""`Gems(space=Cone(sums=True, sketch=…))`: the server looks at totals alone, masked or not."""

import json

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from helpers_digits import accuracy_of, app_of, digits, failing, linear
from helpers_gems import Spoiled, accuracy, initial, node_data
from helpers_grids import kind_of
from helpers_secure import losing

from conftest import record_equal
from gems_flwr import Cone, Gems, InProcessGrid, NodeLimits, Refine, SecureSum, good_enough_mod
from gems_flwr.core import Disclosure, Group
from gems_flwr.core.records import to_record
from gems_flwr.core.sums import PlainSums, summand_record, summand_words
from gems_flwr.errors import OptionError, RefusedError, RoundFailedError
from gems_flwr.node.limits import UNLIMITED
from gems_flwr.secure.fixed_point import Layout
from gems_flwr.spaces.cone import mean_sections

SPACE = Cone(sums=True, sketch=6)
STAGES = ["scale", "means", "sketch", "covariances"]


def play(*outer, parts=None, spoil=None, **options):
    parts = parts or digits(4)
    app = app_of(parts, UNLIMITED, *outer)
    grid = InProcessGrid(app if spoil is None else Spoiled(app, spoil), len(parts))
    return Gems(**{"space": SPACE, **options}).start(grid, linear())


def stage_asked(message):
    """Which sum of moments a message asks for, if any."""
    if kind_of(message.content) != "moments":
        return None
    return json.loads(message.content["question"]["text"]).get("stage", "scale")


# --- plain sums -------------------------------------------------------------------------------


def test_a_few_directions_do_nearly_as_well_as_full_moments():
    parts = digits(4)
    full, small = play(space=Cone(rank="full")), play(verify=True)
    assert accuracy_of(small, parts) > accuracy_of(full, parts) - 0.02 > 0.9
    # Nodes are verified on the data that `parts` are.
    assert small.details["score"] == pytest.approx(accuracy_of(small, parts))
    assert small.details["node_scores"] == {}
    assert small.details["summed_nodes"] == ["0", "1", "2", "3"]
    assert small.details["directions"] == 9 + 9 + 6
    assert set(small.details["margins"]) == {"all nodes"}


def test_totals_are_the_sums_of_the_nodes_whole_numbers_bit_for_bit(monkeypatch):
    """Words that nodes send are decoded apart here, as signed integers, and added up."""
    sent, totals = [], []

    def listen(message, context, call_next):
        reply = call_next(message, context)
        sent.append(summand_words(reply.content))
        return reply

    class Watching(PlainSums):
        def total(self, round, question, sections, nodes, at_least):
            sent.clear()
            total = super().total(round, question, sections, nodes, at_least)
            totals.append((Layout(sections, nodes=len(nodes)), total, list(sent)))
            return total

    monkeypatch.setattr("gems_flwr.strategies.loop.PlainSums", Watching)
    play(listen, refine=1, verify=True)
    assert len(totals) == 4 + 2 + 1
    for layout, total, words in totals:
        split = [layout.split(layout.unpack(each)) for each in words]
        for parts in zip(*split, strict=True):
            section = parts[0][0]
            whole = sum(section.signed(each).astype(object) for _, each in parts)
            expected = whole.astype(np.float64) * section.step(4)
            assert np.array_equal(total.values[section.name].ravel(), expected)


def test_refinement_by_totals_steps_as_it_does_by_single_gradients():
    """From the same cone; rounding differs, and so do steps a little."""
    refine = Refine(4, ridge=1e-3)
    summed, apart = play(refine=refine), play(space=Cone(rank=24), refine=refine)
    losses = [each["loss"] for each in summed.details["refinement"]]
    assert losses == sorted(losses, reverse=True)
    first = summed.details["refinement"][0]
    assert 0 < first["gradient_error"] < 0.05 * first["gradient_norm"]
    assert summed.details["loss"] == pytest.approx(apart.details["loss"], rel=0.02)
    assert summed.details["loss"] - summed.details["loss_bound"] <= apart.details["loss"]


@pytest.mark.parametrize("secure", [None, SecureSum()])
def test_nothing_of_a_single_node_is_written(tmp_path, secure):
    """Neither summands nor scores: of every node's words no 16 bytes are in any file."""
    sent = []

    def listen(message, context, call_next):
        reply = call_next(message, context)
        sent.append(summand_words(reply.content) or b"")
        return reply

    play(listen, checkpoint_dir=tmp_path, refine=1, verify=True, secure=secure)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert written
    assert not list(tmp_path.glob("inbox/*"))
    assert not list(tmp_path.glob("spaces/*"))
    chunks = [words[i : i + 16] for words in sent for i in range(0, len(words) - 15, 16)]
    assert chunks
    # Zeros are zeros anywhere.
    assert not any(chunk in written for chunk in chunks if len(set(chunk)) > 8)


LIES = {
    "too short": lambda words: words[:-1],
    "nothing": lambda words: b"",
    # The first number is a count of 64 bits.
    "too large": lambda words: b"\xff" * 7 + b"\x7f" + words[8:],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_summand_that_is_none_leaves_its_node_out_by_name(lie):
    def spoil(content):
        if (words := summand_words(content)) is not None:
            content.update(summand_record(LIES[lie](words)))

    result = play(spoil=spoil, min_nodes=2)
    assert result.details["summed_nodes"] == ["0", "2", "3"]
    assert {failure.node for failure in result.history[1].failures} == {"1"}


@pytest.mark.parametrize("stage", [STAGES[0], STAGES[3]])
def test_a_node_may_drop_out_of_any_sum(stage):
    asked = {}

    def fails(node, number, what, message):
        asked.setdefault(node, []).append(stage_asked(message))
        return node == 2 and asked[node][-1] == stage

    result = play(failing(fails))
    assert result.details["summed_nodes"] == ["0", "1", "3"]
    assert asked[2] == STAGES[: STAGES.index(stage) + 1]
    assert asked[0] == STAGES


def test_too_few_nodes_fail_the_round():
    with pytest.raises(RoundFailedError):
        play(failing(lambda node, *_: node != 0), min_nodes=2)


@pytest.mark.parametrize("what", ["gradient-sum", "losses-sum"])
def test_the_layer_stays_if_most_of_a_class_is_missing_in_a_sum(what):
    """By label: without node 2 no node has its classes."""
    result = play(failing(lambda node, _, asked, __: node == 2 and asked == what), refine=2)
    assert record_equal(result.arrays, play().arrays)
    assert "classes [5, 6]" in result.details["refinement"][0]["reason"]


def test_a_node_that_comes_late_is_not_asked_for_gradients():
    """Its samples are in no bound."""
    asked = []

    def fails(node, number, what, message):
        if what == "gradient-sum":
            asked.append(node)
        return node == 3 and what == "moments"

    play(failing(fails), parts=[*digits(3), digits(3)[0]], refine=1)
    assert sorted(asked) == [0, 1, 2]


@pytest.mark.parametrize("options", [{"sketch": 4}, {"sums": True, "sketch": -1}])
def test_a_sketch_needs_sums(options):
    with pytest.raises(OptionError, match="sketch must be at least 0 and with sums=True"):
        Cone(**options)


def test_bytes_are_those_of_the_rings_and_a_name():
    """784 features and ten classes: 14 bits for means, 24 for pooled sums and squares."""
    layout = Layout(mean_sections(np.full(10, 600.0), 784, 1.0), nodes=5)
    assert layout.size_bytes == 10 * 8 + 2 * 3 * 784 + 10 * 784 * 14 // 8


def shown(counts, features, directions, masked=0, *, has_mean=False):
    groups = [Group(f"class {i}", n, directions, has_mean) for i, n in enumerate(counts) if n]
    return Disclosure("moments", features, tuple(groups), masked_with=masked)


def test_a_node_shows_no_more_than_its_samples_allow():
    """160 samples of a class: 6 directions of 64 features, one for every 25."""
    limits, full = NodeLimits(), NodeLimits(largest_rank="full")
    limits.allow(shown([160, 0, 300], 64, 6))
    full.allow(shown([160, 0, 300], 64, 60))
    full.allow(shown([160], 2000, 0, has_mean=True))
    limits.allow(shown([1500, 0, 1500], 100, 60, masked=5))
    for refused, reason in (
        (shown([160, 0, 300], 64, 7), r"class 0 has 160 samples .* at most 6 directions"),
        (shown([160], 200, 0, has_mean=True), "an exact mean of 200 features"),
        (shown([160], 100, 60, masked=5), r"160 samples .* on all nodes.* at most 6"),
        (shown([20], 100, 0, masked=5, has_mean=True), "class 0 has 20 samples on all nodes"),
    ):
        with pytest.raises(RefusedError, match=reason):
            limits.allow(refused)


# --- secure sums --------------------------------------------------------------------------------


def secure_app(*outer, limits=UNLIMITED, source=lambda context: node_data(context, 1)):
    app = ClientApp(mods=[*outer, good_enough_mod(both_parts(source), limits=limits)])
    app.train()(lambda message, context: None)
    return app


def run(app, nodes=5, *, model=None, **options):
    options = {"space": Cone(sums=True, sketch=2), "secure": SecureSum(), **options}
    return Gems(**options).start(InProcessGrid(app, nodes), model or initial())


@pytest.mark.parametrize("options", [{"head": "auto"}, {"refine": 2}, {"space": Cone(sums=True)}])
def test_masks_change_no_digit(options):
    options = {"verify": True, **options}
    secure, plain = run(secure_app(), **options), run(secure_app(), secure=None, **options)
    assert record_equal(secure.arrays, plain.arrays)
    assert secure.details["score"] == plain.details["score"]
    assert accuracy(secure.arrays) > 0.95


@pytest.mark.parametrize("stage", ["secure-keys", "mask", "secure-opening"])
def test_a_node_may_drop_at_every_stage(stage):
    result = run(secure_app(losing(stage, [2])), nodes=7)
    assert {failure.node for failure in result.history[1].failures} == {"2"}
    assert accuracy(result.arrays) > 0.95


def test_refinement_stays_where_it_is_if_a_sum_is_not_opened():
    outer = failing(lambda node, number, *_: number == 2 and node < 3)
    first, second = run(secure_app(outer), refine=2).details["refinement"]
    assert not first["taken"]
    assert "not opened" in first["reason"] or "too few" in first["reason"]
    assert second["nodes"] == 5


def test_default_limits_answer_masked_sums_and_refuse_plain_ones():
    """A node with 120 samples of 10 features shows no exact moments, but hides in a sum."""
    app = secure_app(limits=NodeLimits(only_sums=True))
    assert accuracy(run(app, nodes=6).arrays) > 0.95
    with pytest.raises(RoundFailedError, match="only_sums"):
        run(app, nodes=6, secure=None)


def test_a_class_that_is_rare_in_all_is_in_no_sum():
    """Twenty samples of a class that one node has: their total would be theirs."""

    def rare(context):
        inputs, labels = node_data(context, 1)
        if context.node_config["partition-id"] == 0:
            labels = labels.clone()
            labels[:20] = 4
        return inputs, labels

    seen = []

    def listen(message, context, call_next):
        if stage_asked(message) not in (None, "scale"):
            seen.append(json.loads(message.content["question"]["text"])["totals"])
        return call_next(message, context)

    weight, bias = (initial()[key].numpy() for key in ("weight", "bias"))
    five = {"weight": np.vstack([weight, weight[:1]]), "bias": np.append(bias, bias[:1])}
    app = secure_app(listen, limits=NodeLimits(), source=rare)
    result = run(app, nodes=6, model=to_record(five), refine=1)
    assert seen
    assert all(totals[4] == 0 for totals in seen)
    assert result.details["missing_classes"] == [4]
    assert result.details["refinement"][0]["taken"]


@pytest.mark.parametrize(("features", "samples"), [(2, 200), (6, 200), (30, 100)])
def test_nodes_at_their_default_limits_answer_masked_sums_of_small_layers(features, samples):
    """The server asks for no more directions than there are features, or samples to hide them."""
    centers = np.random.default_rng(9).normal(size=(2, features)) * 3

    def data(context):
        rng = np.random.default_rng(context.node_config["partition-id"])
        y = np.arange(samples) % 2
        x = (centers[y] + rng.normal(size=(samples, features))).astype(np.float32)
        return (x, y), (x, y)

    app = ClientApp(mods=[good_enough_mod(data)])
    app.train()(lambda message, context: None)
    strategy = Gems(space=Cone(sums=True, sketch=20), secure=SecureSum(), verify=True)
    layer = {"weight": np.zeros((2, features), "f4"), "bias": np.zeros(2, "f4")}
    result = strategy.start(InProcessGrid(app, 4), to_record(layer))
    assert result.failures == ()
    assert result.details["score"] > 0.9


def test_a_sum_of_two_nodes_is_not_opened():
    """Of three two could open it, but each of them would know what the other has sent."""
    with pytest.raises(
        RoundFailedError, match="0 of 3 nodes can open it with those left, 2 gave their numbers"
    ):
        run(secure_app(losing("mask", [2])), nodes=3, min_nodes=2)
