"""Heads from the same message, chosen by the server or by the nodes; classes that no node sent."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from helpers_blobs import blobs, both_parts
from helpers_gems import accuracy, initial, linear_app

from gems_flwr import Cone, Gems, Head, InProcessGrid, Means, NodeLimits, Tolerance
from gems_flwr.core.records import to_numpy
from gems_flwr.errors import BadReplyError, ModelError, OptionError
from gems_flwr.samples import Samples
from gems_flwr.spaces import OutputLayer
from gems_flwr.stages.judge import MAX_CANDIDATES, Counts, Judge, decided

FULL = NodeLimits(largest_rank="full", adaptive_answers=None)
SPACE = Cone(rank="full")


def play(strategy, nodes=2, **options):
    options = {"limits": FULL} | options
    return strategy.start(InProcessGrid(linear_app(**options), nodes), initial())


# --- heads that the server chooses ------------------------------------------------------------


@pytest.mark.parametrize("head", ["ridge", "lda", "nearest_mean"])
def test_every_head_knows_all_classes_in_one_round(head):
    result = play(Gems(space=SPACE, head=head))
    assert accuracy(result.arrays) > 0.9
    assert result.details["head"] == head
    assert result.details["method"].startswith(f"head: {head}")
    assert result.details["missing_classes"] == []


def test_means_alone_make_a_model_that_can_be_refined():
    space = Means(groups=4)
    result = play(Gems(space=space, head=Head("lda", shrinkage=0.2)))
    assert accuracy(result.arrays) > 0.9
    assert set(result.details["means_only"]) == {"0", "1"}
    refined = play(Gems(space=space, refine=2, robust=True))
    losses = [each["loss"] for each in refined.details["refinement"]]
    assert losses == sorted(losses, reverse=True)


# --- heads that the nodes choose --------------------------------------------------------------


@pytest.mark.parametrize("class_weight", ["counts", "balanced"])
def test_the_nodes_held_out_data_choose_the_best_head(class_weight):
    result = play(Gems(space=SPACE, head=Head("auto", class_weight=class_weight)))
    scores = result.details["head_scores"]
    assert scores[result.details["head"]] >= max(scores.values()) - 0.01
    assert {"cone", "nearest_mean"} <= scores.keys()
    assert accuracy(result.arrays) > 0.9
    by_class = class_weight == "balanced"
    assert ("cone, by counts" in scores) == by_class
    assert any("prior uniform" in name for name in scores) == by_class


def test_the_scores_are_those_of_all_held_out_samples_together():
    """Node 0 has three times as many held-out samples as node 1, which counts for a quarter."""

    def source(context):
        node = context.node_config["partition-id"]
        return blobs([0, 1, 2, 3], 90 if node == 0 else 30, seed=node)

    result = play(Gems(space=SPACE, head="auto", verify=True), data=both_parts(source))
    weight, bias = (result.arrays[key].numpy() for key in ("weight", "bias"))
    right = total = 0
    for node, size in ((0, 90), (1, 30)):
        x, y = blobs([0, 1, 2, 3], size, seed=node)
        hits = int(((x.numpy() @ weight.T + bias).argmax(axis=1) == y.numpy()).sum())
        assert result.details["node_scores"][str(node)] == pytest.approx(hits / len(y))
        right, total = right + hits, total + len(y)
    scores = result.details["head_scores"]
    assert scores[result.details["head"]] == pytest.approx(right / total)


@pytest.mark.parametrize(
    ("right", "samples", "chosen"),
    [
        ([895, 910, 100], 100, "cone"),
        ([895, 910, 100], 1000, "lda"),
        ([90, 100, 910], 1000, "ridge"),
    ],
)
def test_the_first_of_those_that_cannot_be_told_apart_is_taken(right, samples, chosen):
    """A standard error of 1,000 samples is sqrt(.91 * .09 / 1000) = .009.

    With a tenth of the samples the same shares are told apart three times as badly, .029.
    """
    counts = Counts(np.array([float(samples)]), np.array(right)[:, None] * samples / 1000)
    best, scores = decided(["cone", "lda", "ridge"], [counts], None)
    assert best == chosen
    assert scores["ridge"] == pytest.approx(right[2] / 1000)


def test_a_node_that_reports_no_scores_does_not_choose_and_the_round_goes_on():
    limits = NodeLimits(largest_rank="full", allow_scores=False)
    result = play(Gems(space=SPACE, head="auto", verify=True), limits=limits)
    assert result.details["head"] == "cone"
    assert result.details["head_scores"] == result.details["node_scores"] == {}


def test_private_counts_are_asked_for_where_moments_are_private():
    space = Cone(dp_epsilon=8.0, dp_clip=12.0, dp_seeded=True)
    limits = NodeLimits(require_dp=True, dp_budget=None, seeded_noise=True)
    result = play(Gems(space=space, head="auto", verify=True), limits=limits)
    assert result.details["head_scores"]
    assert all(0 <= score <= 1 for score in result.details["node_scores"].values())
    noisy = Judge(np.zeros((3, 4, 6), np.float32), dp_epsilon=1.0)
    assert noisy.private.squared_mu == pytest.approx(4 / noisy.private.noise**2)
    assert Judge(dp_epsilon=1.0).private.candidates == 1


def test_one_node_cannot_decide_alone_with_a_claimed_multitude():
    """It claims a million samples on which the last candidate is right and all else is wrong."""

    def spoil(content):
        if "counts" in content:
            count = len(content["counts"]["right"]) // 4
            content["counts"] = counts_of([1e6], [0.0] * (count - 1) + [1e6])

    strategy = Gems(space=SPACE, head="auto", tolerance=Tolerance(max_examples=100))
    scores = play(strategy, nodes=4, spoil=spoil).details["head_scores"]
    assert scores["cone"] > 0.7


# --- messages ---------------------------------------------------------------------------------

LAYER = OutputLayer("weight", "bias", 4, 6)
SAMPLES = Samples(torch.zeros(3, 6), torch.zeros(3))


def counts_of(seen, right):
    raw = {"seen": seen, "right": right}
    return ConfigRecord({key: np.asarray(value, "<f4").tobytes() for key, value in raw.items()})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (counts_of([5.0], [6.0, 0.0]), "nowhere above"),
        (counts_of([1e13], [0.0, 0.0]), "'seen' must be from 0"),
        (counts_of([5.0, 1.0], [0.0, 0.0]), "'seen' must have 4 bytes"),
        (None, "expected a ConfigRecord"),
    ],
)
def test_impossible_counts_are_refused(record, reason):
    question = Judge(np.zeros((2, 4, 6)), np.zeros((2, 4)), layer=LAYER)
    with pytest.raises(BadReplyError, match=reason):
        question.read(RecordDict({} if record is None else {"counts": record}))


def test_candidates_that_are_none_are_refused():
    with pytest.raises(OptionError, match=f"from 1 to {MAX_CANDIDATES} candidates"):
        Judge(np.zeros((MAX_CANDIDATES + 1, 4, 6)))
    node = SimpleNamespace(output_layer=lambda p: LAYER, inputs=lambda p: SAMPLES, masked_with=0)
    for weights, biases, reason in (
        (np.zeros((2, 4, 5)), None, r"candidates of shape \(4, 5\)"),
        (np.zeros((2, 4, 6)), np.zeros((1, 4)), "have no biases"),
    ):
        with pytest.raises(ModelError, match=reason):
            Judge(weights, biases).counts(node)


# --- no class vanishes ------------------------------------------------------------------------


def with_few(few, seed=0):
    """Node 0 has classes 0 and 1, node 1 has class 2; both have few samples of class 3."""

    def source(context):
        node = context.node_config["partition-id"]
        x, y = blobs([0, 1] if node == 0 else [2], 60, seed=node + seed)
        small, of = blobs([3], few, seed=7 + node)
        return torch.cat([x, small]), torch.cat([y, of])

    return both_parts(source)


def recall(arrays, label):
    x, y = blobs([label], 200, seed=99)
    weight, bias = (to_numpy(arrays)[key] for key in ("weight", "bias"))
    return float(((x.numpy() @ weight.T + bias).argmax(axis=1) == y.numpy()).mean())


@pytest.mark.parametrize(("rank", "head"), [("full", "cone"), (20, "cone"), ("full", "lda")])
def test_a_class_of_few_samples_on_every_node_is_predicted(rank, head):
    """Below min_count, 32, and below what a rank of 20 needs."""
    result = play(Gems(space=Cone(rank=rank), head=head), data=with_few(12))
    assert result.details["means_only"] == {"0": [3], "1": [3]}
    assert result.details["missing_classes"] == []
    assert result.details["status"] == "feasible"
    assert recall(result.arrays, 3) > 0.9


def test_sums_are_judged_by_their_total():
    """Twenty samples on either node: 40 of 32 that are needed."""
    result = play(Gems(space=Cone(sums=True)), data=with_few(20))
    assert result.details["means_only"] == {}
    assert recall(result.arrays, 3) > 0.9


def test_a_class_that_no_node_sent_is_in_log_and_result(caplog):
    """Seven samples: less than a mean may have."""
    with caplog.at_level(logging.WARNING):
        result = play(Gems(space=SPACE), data=with_few(7))
    assert result.details["missing_classes"] == [3]
    assert result.details["withheld"] == {"0": [3], "1": [3]}
    assert result.details["status"] == "incomplete"
    assert any("missing_classes" in record.getMessage() for record in caplog.records)
    assert recall(result.arrays, 3) == 0
