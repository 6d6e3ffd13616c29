"""`Gems(space=Cone(sums=True, sketch=…))`: all that the server looks at are totals over nodes."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from helpers_gems import Spoiled
from helpers_grids import Nameless
from sklearn.datasets import load_digits

from conftest import record_equal
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import UNLIMITED, NodeLimits
from gems_flwr.errors import OptionError, RefusedError, RoundFailedError
from gems_flwr.moments.moment_sums import mean_sections
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.secure.fixed_point import Layout
from gems_flwr.server import summing
from gems_flwr.server.refine_options import Refine
from gems_flwr.strategies.gems import Gems
from gems_flwr.wire.gradient_requests import requested_gradient, requested_losses
from gems_flwr.wire.moment_requests import requested_moment_sums
from gems_flwr.wire.space_requests import Cone
from gems_flwr.wire.summands import summand_reply, summand_words

SPACE = Cone(sums=True, sketch=6)


def digits(nodes=4):
    """The digits by label, by node."""
    x, y = load_digits(return_X_y=True)
    parts = np.array_split(np.argsort(y, kind="stable"), nodes)
    return [(torch.from_numpy(x[p] / 16).float(), torch.from_numpy(y[p])) for p in parts]


def app_of(parts, limits=UNLIMITED, fail=lambda message, node: False):
    """An app whose node fails where it is told to."""

    def data(context):
        return parts[int(context.node_config["partition-id"])]

    def failing(message, context, call_next):
        if fail(message, int(context.node_config["partition-id"])):
            raise RuntimeError("gone")
        return call_next(message, context)

    app = ClientApp(mods=[failing, good_enough_mod(both_parts(data), limits=limits)])

    @app.train()
    def train(message, context):
        raise NotImplementedError

    return app


def linear(seed=0):
    torch.manual_seed(seed)
    return ArrayRecord(torch.nn.Linear(64, 10).state_dict())


def play(app=None, nodes=4, **options):
    app = app or app_of(digits(nodes))
    return Gems(**{"space": SPACE, **options}).start(InProcessGrid(app, nodes), linear())


def accuracy(result, parts):
    weight, bias = (a.numpy() for a in result.arrays.values())
    x, y = (torch.cat([p[i] for p in parts]).numpy() for i in range(2))
    return float(np.mean((x @ weight.T + bias).argmax(axis=1) == y))


def test_a_few_directions_do_nearly_as_well_as_full_moments():
    parts = digits()
    full, small = play(space=Cone(rank="full")), play(verify=True)
    assert accuracy(small, parts) > accuracy(full, parts) - 0.02 > 0.9
    # Nodes are verified on the data that `parts` are.
    assert small.details["score"] == pytest.approx(accuracy(small, parts))
    assert small.details["node_scores"] == {}
    assert small.details["summed_nodes"] == ["0", "1", "2", "3"]
    assert small.details["directions"] == 9 + 9 + 6


def test_totals_are_the_sums_of_the_nodes_whole_numbers_bit_for_bit(monkeypatch):
    """Words that nodes send are decoded apart here, as signed integers, and added up."""
    seen, totals = {}, []

    class Watching(summing.PlainSums):
        def total(self, strategy, server_round, nodes, sections, send, **options):
            layout = Layout(sections, nodes=len(nodes))

            def watched(receivers, put):
                replies = send(receivers, put)
                seen[len(totals)] = layout, [summand_words(r.content) for r in replies]
                return replies

            totals.append(
                super().total(strategy, server_round, nodes, sections, watched, **options)
            )
            return totals[-1]

    monkeypatch.setattr("gems_flwr.server.round_methods.PlainSums", Watching)
    play(refine=1, verify=True)
    assert len(totals) == 4 + 2 + 1
    for number, total in enumerate(totals):
        layout, replies = seen[number]
        split = [layout.split(layout.unpack(words)) for words in replies]
        for parts in zip(*split, strict=True):
            section = parts[0][0]
            whole = sum(section.signed(words).astype(object) for _, words in parts)
            expected = whole.astype(np.float64) * section.step(4)
            assert np.array_equal(total.values[section.name].ravel(), expected)


def test_refinement_by_totals_steps_as_it_does_by_single_gradients():
    """From the same cone; rounding differs, and so do steps a little."""
    options = {"refine": Refine(4, ridge=1e-3, dtype="float32")}
    summed = play(**options)
    apart = play(space=Cone(rank=24), **options)
    told = [d["loss"] for d in summed.details["refinement"]]
    assert told == sorted(told, reverse=True)
    first = summed.details["refinement"][0]
    assert 0 < first["gradient_error"] < 0.05 * first["gradient_norm"]
    assert summed.details["loss"] == pytest.approx(apart.details["loss"], rel=0.02)
    assert summed.details["loss"] - summed.details["loss_bound"] <= apart.details["loss"]


class Dies(Gems):
    """Is interrupted in the middle of a round."""

    at = 0

    def _refined(self, server_round, *arguments):
        found = super()._refined(server_round, *arguments)
        if server_round == self.at:
            raise KeyboardInterrupt
        return found


Dies.__name__ = "Gems"


@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_run_equals_the_unbroken_one(tmp_path, at):
    """Also where the grid knows no names: they are asked for before anybody is in a sum."""
    options = {"space": SPACE, "refine": 3, "verify": True}
    unbroken, grid = play(**options), InProcessGrid(app_of(digits()), 4)
    strategy = Dies(**options, checkpoint_dir=tmp_path)
    strategy.at = at
    with pytest.raises(KeyboardInterrupt):
        strategy.start(grid, linear())
    grid = Nameless(app_of(digits()), 4)
    resumed = Gems(**options, checkpoint_dir=tmp_path, resume=True).start(grid, linear())
    assert record_equal(resumed.arrays, unbroken.arrays)
    timed = {"intersection_seconds": None}
    assert resumed.details | timed == unbroken.details | timed


def test_nothing_of_a_single_node_is_written(tmp_path):
    """Neither summands nor scores: what there is on disk is of all nodes together."""
    seen = []

    def fail(message, node):
        seen.append(message)
        return False

    play(app_of(digits(), fail=fail), checkpoint_dir=tmp_path, refine=1, verify=True)
    names = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]
    assert not [name for name in names if "inbox" in name or name.startswith("spaces/")], names
    texts = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert all(line["details"].get("node_scores", {}) == {} for line in texts if "details" in line)


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
            content.update(summand_reply(LIES[lie](words), name="1"))

    result = play(Spoiled(app_of(digits()), spoil), min_nodes=2)
    assert result.details["summed_nodes"] == ["0", "2", "3"]
    assert {failure.node for failure in result.history[1].failures} == {"1"}


@pytest.mark.parametrize("stage", ["scale", "means", "sketch", "covariances"])
def test_a_node_may_drop_out_of_any_sum(stage):
    def fail(message, node):
        asked = requested_moment_sums(message.content)
        return node == 2 and asked is not None and asked.stage == stage

    result = play(app_of(digits(), fail=fail))
    assert result.details["summed_nodes"] == ["0", "1", "3"]
    asked = {}

    def count(message, node):
        request = requested_moment_sums(message.content)
        asked.setdefault(node, []).append(request.stage)
        return node == 2 and request.stage == stage

    play(app_of(digits(), fail=count))
    stages = ["scale", "means", "sketch", "covariances"]
    assert asked[2] == stages[: stages.index(stage) + 1]
    assert asked[0] == stages


def test_too_few_nodes_fail_the_round():
    def fail(message, node):
        return node != 0

    with pytest.raises(RoundFailedError):
        play(app_of(digits(), fail=fail), min_nodes=2)


@pytest.mark.parametrize("what", [requested_gradient, requested_losses])
def test_the_layer_stays_if_most_of_a_class_is_missing_in_a_sum(what):
    """By label: without node 2 nobody speaks for its classes."""

    def fail(message, node):
        return node == 2 and what(message.content) is not None

    result = play(app_of(digits(), fail=fail), refine=2)
    assert record_equal(result.arrays, play().arrays)
    assert "classes [5, 6]" in result.details["refinement"][0]["reason"]


def test_a_node_that_comes_late_is_not_asked_for_gradients():
    """Its samples are in no bound."""
    asked = []

    def fail(message, node):
        if requested_gradient(message.content) is not None:
            asked.append(node)
        moments = requested_moment_sums(message.content)
        return node == 3 and moments is not None

    play(app_of([*digits(3), digits(3)[0]], fail=fail), refine=1)
    assert sorted(asked) == [0, 1, 2]


def test_heads_are_chosen_by_the_counts_of_all_nodes():
    result = play(head="auto")
    assert set(result.details["head_scores"]) >= {"cone", "nearest_mean"}
    assert result.details["head"] in result.details["head_scores"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_examples": 100}, "max_examples looks at single nodes"),
        ({"robust": True}, "robust and audit look at single nodes"),
        ({"audit": True}, "robust and audit look at single nodes"),
    ],
)
def test_what_looks_at_single_nodes_is_refused(options, reason):
    with pytest.raises(OptionError, match=reason):
        Gems(space=SPACE, **options)


@pytest.mark.parametrize("options", [{"sketch": 4}, {"sums": True, "sketch": -1}])
def test_a_sketch_needs_sums(options):
    with pytest.raises(OptionError, match="sketch must be at least 0 and with sums=True"):
        Cone(**options)


def test_a_node_shows_no_more_unmasked_than_its_samples_allow():
    """160 samples of a class: 6 directions of 64 features, one for every 25."""
    limits, counts = NodeLimits(), np.array([160, 0, 300])
    limits.check_summand("covariances", counts, 64, 6, masked=False)
    with pytest.raises(RefusedError, match=r"class 0 has 160 samples .* at most 6 directions"):
        limits.check_summand("covariances", counts, 64, 7, masked=False)
    limits.check_summand("sketch", counts, 64, 18, masked=False)
    with pytest.raises(RefusedError, match="all classes has 460 samples"):
        limits.check_summand("sketch", counts, 64, 19, masked=False)
    with pytest.raises(RefusedError, match="an exact mean of 200 features"):
        limits.check_summand("means", counts, 200, 0, masked=False)
    full = NodeLimits(largest_rank="full")
    full.check_summand("covariances", counts, 64, 60, masked=False)
    full.check_summand("means", counts, 2000, 0, masked=False)
    with pytest.raises(RefusedError, match="require_dp"):
        NodeLimits(require_dp=True).check_summand("scale", counts, 64, 0, masked=True)


def test_under_masks_the_counts_of_the_total_are_looked_at():
    """1,500 samples on all nodes show 60 directions; a class that is this node's alone shows 6."""
    limits, counts = NodeLimits(), np.array([160, 0, 300])
    several, alone = np.array([1500, 0, 1500]), np.array([160, 700, 1500])
    limits.check_summand("covariances", counts, 100, 60, masked=True, totals=several)
    limits.check_summand("means", counts, 2000, 0, masked=True, totals=several)
    with pytest.raises(RefusedError, match=r"class 0 has 160 samples .* on all nodes.* at most 6"):
        limits.check_summand("covariances", counts, 100, 60, masked=True, totals=alone)
    few = np.array([20, 0, 0])
    with pytest.raises(RefusedError, match="class 0 has 20 samples on all nodes"):
        limits.check_summand("means", few, 100, 0, masked=True, totals=few)
    for lie in (None, np.array([159, 0, 300]), np.array([1500])):
        with pytest.raises(RefusedError, match="does not say how many samples"):
            limits.check_summand("means", counts, 100, 0, masked=True, totals=lie)


def test_bytes_are_those_of_the_rings_and_a_name():
    """784 features and ten classes: 14 bits for means, 24 for pooled sums and squares."""
    layout = Layout(mean_sections(np.full(10, 600.0), 784, 1.0), nodes=5)
    assert layout.size_bytes == 10 * 8 + 2 * 3 * 784 + 10 * 784 * 14 // 8
