"""Heads from the same message, chosen by the server or by the nodes; classes that nobody sent."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from helpers_blobs import CENTERS, CLASSES, FEATURES, blobs, both_parts
from helpers_gems import accuracy, initial, linear_app, node_data
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from gems_flwr.client.limits import NodeLimits
from gems_flwr.errors import BadReplyError, ModelError, OptionError, RefusedError
from gems_flwr.intersect.aggregate import Aggregate
from gems_flwr.intersect.result import Intersection
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.samples import Samples
from gems_flwr.server.head_choice import HeadChoice
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.choice_messages import (
    MAX_CANDIDATES,
    ChoiceRequest,
    Counts,
    ask_for_choice,
    pack_choice_reply,
    take_candidates,
    unpack_choice_reply,
)
from gems_flwr.wire.records import payload_bytes, to_numpy
from gems_flwr.wire.requests import ScoreRequest
from gems_flwr.wire.space_requests import Ball, Cone, Means, NodeLayer

FULL = NodeLimits(largest_rank="full")


def play(strategy, nodes=2, **options):
    options = {"limits": FULL} | options
    return strategy.start(InProcessGrid(linear_app(**options), nodes), initial())


# --- heads that the server chooses ------------------------------------------------------------


@pytest.mark.parametrize("head", ["ridge", "lda", "nearest_mean"])
def test_every_head_knows_all_classes_in_one_round(head):
    result = play(Gems(space=Cone(rank="full"), head=head))
    assert accuracy(result.arrays) > 0.9
    assert result.details["head"] == head
    assert result.details["method"].startswith(f"head: {head}")
    assert result.details["missing_classes"] == []


def test_lda_over_nodes_is_scikit_learns_on_all_samples():
    result = play(Gems(space=Cone(rank="full"), head="lda", shrinkage=0.1, min_nodes=2))

    class Node:
        def __init__(self, node):
            self.node_config = {"partition-id": node}

    parts = [node_data(Node(node), 1) for node in range(2)]
    x, y = (np.concatenate([part[k].numpy() for part in parts]) for k in range(2))
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(x, y)
    weight = result.arrays["weight"].numpy()
    np.testing.assert_allclose(
        weight - weight.mean(axis=0), theirs.coef_ - theirs.coef_.mean(axis=0), atol=1e-3
    )


def test_the_default_head_is_the_cones_and_costs_no_exchange_more():
    plain, named = play(Gems()), play(Gems(head="cone"))
    assert np.array_equal(plain.arrays["weight"].numpy(), named.arrays["weight"].numpy())
    assert plain.details["method"] == "cones: expected pairwise logistic loss"


def test_means_alone_make_a_model():
    result = play(Gems(space=Means(groups=4), head="lda", shrinkage=0.2))
    assert accuracy(result.arrays) > 0.9
    assert set(result.details["means_only"]) == {"0", "1"}


def test_a_layered_network_can_have_another_head():
    head = LayerwiseGems(head=Gems(head="lda", shrinkage=0.3, prior="uniform"))._head()
    assert (head.head, head.shrinkage, head.prior) == ("lda", 0.3, "uniform")
    assert head.ridge is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head": "qda"}, "no linear layer.*write head='lda'"),
        ({"head": "svm"}, "head must be one of"),
        ({"head": "lda", "space": Ball()}, "write space=Cone"),
        ({"head": "lda", "select": "margin"}, "goes with select=None"),
        ({"head": "lda", "prior": 2}, "prior must be"),
        (
            {"head": "lda", "tune": 5, "public": (np.zeros((5, 6)), np.zeros(5, int))},
            "tune joins the cone objective",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_with_what_to_write(options, reason):
    with pytest.raises(OptionError, match=reason):
        Gems(**options)


# --- heads that the nodes choose --------------------------------------------------------------


@pytest.mark.parametrize("class_weight", ["counts", "balanced"])
def test_the_nodes_held_out_data_choose_the_best_head(class_weight):
    grid = MeteredGrid(InProcessGrid(linear_app(limits=FULL), 2))
    strategy = Gems(space=Cone(rank="full"), head="auto", class_weight=class_weight)
    result = strategy.start(grid, initial())
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

    result = play(Gems(space=Cone(rank="full"), head="auto"), data=both_parts(source))
    weight, bias = (result.arrays[key].numpy() for key in ("weight", "bias"))
    right = total = 0
    for node, size in ((0, 90), (1, 30)):
        x, y = blobs([0, 1, 2, 3], size, seed=node)
        right += int(((x.numpy() @ weight.T + bias).argmax(axis=1) == y.numpy()).sum())
        total += len(y)
    scores = result.details["head_scores"]
    assert scores[result.details["head"]] == pytest.approx(right / total)


@pytest.mark.parametrize(
    ("right", "chosen"),
    [([895, 910, 100], "cone"), ([890, 910, 100], "lda"), ([90, 100, 910], "ridge")],
)
def test_the_first_of_those_that_nobody_can_tell_apart_is_taken(right, chosen):
    """A standard error of 1,000 samples is sqrt(.91 * .09 / 1000) = .009.

    With a tenth of the samples the same shares are told apart three times as badly, .029.
    """
    met = {
        name: Intersection("feasible", np.zeros(1), (), 0.0, 0.0, False, name, 0, 0.0)
        for name in ("cone", "lda", "ridge")
    }
    choice = HeadChoice(met, ChoiceRequest(3))
    first = Aggregate(np.zeros(1), met["cone"])
    scale = 0.1 if chosen == "cone" else 1.0
    counts = {"n": Counts(np.array([1000.0 * scale]), np.array(right)[:, None] * scale)}
    found, details = choice.decided(counts, first, None)
    assert details["head"] == chosen
    assert found.intersection is met[chosen]
    if chosen == "cone":
        whole = {"n": Counts(np.array([1000.0]), np.array(right, float)[:, None])}
        assert choice.decided(whole, first, None)[1]["head"] == "lda"


def test_a_node_that_tells_no_scores_does_not_choose_and_the_round_goes_on():
    limits = NodeLimits(largest_rank="full", allow_scores=False)
    result = play(Gems(space=Cone(rank="full"), head="auto"), limits=limits)
    assert result.details["head"] == "cone"
    assert result.details["head_scores"] == {}


def test_private_counts_are_asked_for_where_moments_are_private():
    space = Cone(dp_epsilon=8.0, dp_clip=12.0, dp_seeded=True)
    limits = NodeLimits(require_dp=True, dp_budget=None, seeded_noise=True)
    result = play(Gems(space=space, head="auto"), limits=limits)
    assert result.details["head_scores"]
    exact = NodeLimits(require_dp=True)
    with pytest.raises(Exception, match="exact score"):
        exact.check_score(ChoiceRequest(3))
    noisy = ChoiceRequest(3, dp_epsilon=1.0)
    assert noisy.private.squared_mu == pytest.approx(4 / noisy.private.noise**2)
    # A single candidate is a score.
    one, score = ChoiceRequest(1, dp_epsilon=1.0), ScoreRequest(1.0)
    assert one.private.noise == pytest.approx(score.private.noise)


def test_one_node_cannot_decide_alone_with_a_claimed_multitude():
    """It claims a million samples on which nearest means are right and all else is wrong."""

    def spoil(content):
        if "choice" not in content:
            return
        right = np.zeros(content["choice"]["right"].numpy().shape, np.float32)
        right[-1] = 1e6
        content["choice"] = ArrayRecord(
            {"seen": Array(np.array([1e6], np.float32)), "right": Array(right)}
        )

    strategy = Gems(space=Cone(rank="full"), head="auto", max_examples=100)
    result = play(strategy, nodes=4, spoil=spoil)
    scores = result.details["head_scores"]
    assert scores["cone"] > 0.7


# --- messages ---------------------------------------------------------------------------------


def reply(seen, right):
    return pack_choice_reply(Counts(np.array(seen), np.array(right)), name="n")


@pytest.mark.parametrize(
    ("seen", "right", "reason"),
    [
        ([5.0], [[6.0], [0.0]], "nowhere above"),
        ([5.0], [[-1.0], [0.0]], "at least 0"),
        ([-5.0], [[0.0], [0.0]], "'seen' must be"),
        ([1e13], [[0.0], [0.0]], "'seen' must be"),
        ([5.0, 1.0], [[0.0, 0.0]] * 2, "shape"),
        ([5.0], [[0.0]] * 3, "shape"),
        ([np.nan], [[0.0], [0.0]], "NaN"),
    ],
)
def test_impossible_counts_are_refused(seen, right, reason):
    with pytest.raises(BadReplyError, match=reason):
        unpack_choice_reply(reply(seen, right), ChoiceRequest(2), 4)
    with pytest.raises(BadReplyError, match="expected an ArrayRecord"):
        unpack_choice_reply(RecordDict(), ChoiceRequest(2), 4)


def test_an_answer_is_small():
    assert payload_bytes(reply([5.0] * 10, [[1.0] * 10] * 12)) < 1000


def test_candidates_come_out_as_they_went_in():
    layers = [{"weight": np.full((2, 3), i, np.float32), "bias": np.ones(2)} for i in range(3)]
    content = RecordDict({"config": ConfigRecord()})
    ask_for_choice(content, ChoiceRequest(3), layers)
    taken = take_candidates(content, ChoiceRequest(3))
    assert [layer["weight"][0, 0] for layer in taken] == [0, 1, 2]
    assert not content.array_records
    with pytest.raises(ModelError, match="expected 3 candidates"):
        take_candidates(content, ChoiceRequest(3))
    ask_for_choice(content, ChoiceRequest(2), layers)
    with pytest.raises(ModelError, match="is none of 2"):
        take_candidates(content, ChoiceRequest(2))
    with pytest.raises(OptionError, match="candidates must be from 1"):
        ChoiceRequest(MAX_CANDIDATES + 1)


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


@pytest.mark.parametrize("head", ["cone", "lda"])
@pytest.mark.parametrize("rank", ["full", 20])
def test_a_class_of_few_samples_on_every_node_is_predicted(rank, head):
    """Below min_count, 32, and below what a rank of 20 needs."""
    result = play(Gems(space=Cone(rank=rank), head=head), data=with_few(12))
    assert result.details["means_only"] == {"0": [3], "1": [3]}
    assert result.details["missing_classes"] == []
    assert recall(result.arrays, 3) > 0.9


def test_sums_are_judged_by_their_total():
    """Twenty samples on either node: 40 of 32 that are needed."""
    result = play(Gems(space=Cone(sums=True)), data=with_few(20))
    assert result.details["means_only"] == {}
    assert recall(result.arrays, 3) > 0.9
    small = play(Gems(space=Cone(sums=True)), data=with_few(9))
    assert small.details["means_only"] == {"all nodes": [3]}
    assert recall(small.arrays, 3) > 0.9


def test_a_node_that_has_not_opened_its_sums_sends_none_of_a_small_class():
    """The server receives sums one by one; what is in them is full moments."""
    x, y = blobs([0, 1], 60)
    layer = (torch.zeros(CLASSES, FEATURES), None, Samples(x[:70], y[:70]), 0)
    asked = Cone(rank="full", sums=True)
    for limits, sent in ((FULL, [60, 10]), (NodeLimits(), [60, 0])):
        shown = (limits.rank_cap, limits.mean_rule, limits.least_in_sums)
        sums = limits.narrowed(asked).build(NodeLayer(*layer, *shown))
        assert isinstance(sums, ClassSums)
        assert sums.counts[:2].tolist() == sent
        limits.check_release(sums)
    with pytest.raises(RefusedError, match="largest_rank"):
        NodeLimits().check_release(FULL.narrowed(asked).build(NodeLayer(*layer, None, None, 2)))


def test_a_class_that_nobody_sent_is_said_in_log_and_result(caplog):
    """Seven samples: less than a mean may have."""
    with caplog.at_level(logging.WARNING):
        result = play(Gems(space=Cone(rank="full")), data=with_few(7))
    assert result.details["missing_classes"] == [3]
    assert result.details["withheld"] == {"0": [3], "1": [3]}
    assert result.details["status"] == "incomplete"
    assert any("missing_classes" in record.getMessage() for record in caplog.records)
    assert recall(result.arrays, 3) == 0


def test_what_everybody_sent_is_not_called_incomplete():
    assert play(Gems(space=Cone(rank="full"))).details["status"] == "feasible"


def test_the_node_decides_how_few_samples_a_mean_may_have():
    for least, missing in ((5, []), (13, [3])):
        limits = NodeLimits(largest_rank="full", min_mean_count=least)
        result = play(Gems(space=Cone(rank="full")), data=with_few(12), limits=limits)
        assert result.details["missing_classes"] == missing
    with pytest.raises(OptionError, match="min_mean_count must be at least 2"):
        NodeLimits(min_mean_count=1)
    assert NodeLimits.of_node({"min-mean-count": 30}).min_mean_count == 30


def test_a_means_request_below_the_nodes_own_count_is_refused():
    with pytest.raises(RefusedError, match="min_count"):
        NodeLimits(min_count=20).narrowed(Means(min_count=5))
    assert NodeLimits().narrowed(Means()) == Means()
    with pytest.raises(RefusedError, match="require_dp"):
        NodeLimits(require_dp=True).narrowed(Means())
    assert CENTERS.shape == (CLASSES, FEATURES)
