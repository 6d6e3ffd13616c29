"""GEMS among hostile nodes: over the wire, with the options that bound what a node can do."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CENTERS, CLASSES, blobs, both_parts
from helpers_gems import accuracy, in_space, initial

from gems_flwr import Ball, Ellipsoid, Gems, InProcessGrid, NodeLimits, good_enough_mod
from gems_flwr.core.records import to_record
from gems_flwr.errors import RoundFailedError


def all_classes(context, seed=1):
    return blobs(range(CLASSES), seed=10 * context.node_config["partition-id"] + seed)


def own_class(context, seed=1):
    """One class on each node, as in the hardest label split."""
    node = context.node_config["partition-id"]
    return blobs([node % CLASSES], seed=10 * node + seed)


def start(strategy, lies, nodes=5, data=all_classes):
    """Play a run in which `lies` maps nodes to what they do to the content of their replies."""

    def liar_mod(message, context, call_next):
        reply = call_next(message, context)
        lie = lies.get(context.node_config["partition-id"])
        if lie and reply.has_content():
            lie(reply.content)
        return reply

    limits = NodeLimits(adaptive_answers=None)
    app = ClientApp(mods=[liar_mod, good_enough_mod(both_parts(data), limits=limits)])

    @app.train()
    def train(message, context):
        """Every node has the model of least squares, a little off."""
        node = context.node_config["partition-id"]
        weight = CENTERS + 0.01 * np.random.default_rng(node).normal(size=CENTERS.shape)
        arrays = {"weight": weight, "bias": -(CENTERS**2).sum(axis=1) / 2}
        record = to_record({key: array.astype(np.float32) for key, array in arrays.items()})
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 10})})
        return Message(content, reply_to=message)

    return strategy.start(InProcessGrid(app, nodes), initial())


def many(content, factor=10**6, change=lambda a: a.update(counts=a["counts"] * 10**6)):
    in_space(change)(content)
    if "space-meta" in content:
        meta = json.loads(content["space-meta"]["text"])
        meta["total_count"] *= factor
        content["space-meta"] = ConfigRecord({"text": json.dumps(meta)})


def flipped_many(content):
    in_space(lambda a: a.update(labels=a["labels"][::-1].copy()))(content)
    many(content)


def far_away(content):
    in_space(lambda a: a.update(center=a["center"] + np.float32(100)))(content)


def test_flipped_labels_with_a_million_samples_own_the_cone_unless_it_is_robust():
    lies = {1: flipped_many}
    assert accuracy(start(Gems(), lies).arrays) < 0.3
    result = start(Gems(robust=True), lies)
    assert accuracy(result.arrays) > 0.95
    assert set(result.details["left_out"]) == {"1"}
    assert "unlike those of the other nodes" in result.details["left_out"]["1"]
    assert set(result.details["margins"]) == {"0", "2", "3", "4"}


def test_who_counts_for_less_is_named_and_the_honest_are_not(caplog):
    plain, screened = start(Gems(), {}), start(Gems(robust=True), {})
    assert np.array_equal(plain.arrays["weight"].numpy(), screened.arrays["weight"].numpy())
    assert screened.details["left_out"] == screened.details["adjusted"] == {}
    result = start(Gems(robust=True), {1: many})
    assert "count as" in result.details["adjusted"]["1"]
    assert result.details["left_out"] == {}
    assert 'event=suspect node=1 reason="its' in caplog.text


@pytest.mark.parametrize("space", [Ball, Ellipsoid])
def test_a_far_away_space_is_left_out_by_robust(space):
    asked, lies = space(epsilon=0.9, directions=20), {1: far_away}
    owned = start(Gems(space=asked), lies)
    assert np.abs(owned.arrays["weight"].numpy()).max() > 20
    result = start(Gems(space=asked, robust=True), lies)
    assert accuracy(result.arrays) > 0.95
    assert set(result.details["left_out"]) == {"1"}


def test_too_few_plausible_spaces_fail_the_round():
    lies, space = {0: far_away, 1: far_away}, Ball(epsilon=0.9, directions=20)
    with pytest.raises(RoundFailedError, match="3 nodes sent plausible spaces, min_nodes is 4"):
        start(Gems(space=space, robust=True, min_nodes=4), lies)


def test_moments_of_another_form_than_asked_for_are_refused():
    def twice(content):
        in_space(lambda a: a.update(labels=np.zeros_like(a["labels"])))(content)

    (failure,) = start(Gems(), {1: twice}).history[1].failures
    assert "at most 1 entries of a class" in failure.reason


def test_what_cannot_be_checked_is_listed(caplog):
    """Five nodes with one class each of four: no node can tell a lie. With all classes, any."""
    result = start(Gems(robust=True), {}, data=own_class)
    assert result.details["unchecked_classes"] == list(range(CLASSES))
    assert caplog.text.count("event=unchecked classes=0,1,2,3") == 1
    assert start(Gems(robust=True), {}).details["unchecked_classes"] == []
    assert "unchecked_classes" not in start(Gems(), {}, data=own_class).details
    two = start(Gems(robust=True), {}, nodes=2)
    assert two.details["unchecked_classes"] == list(range(CLASSES))
    balls = start(Gems(space=Ball(epsilon=0.9, directions=20), robust=True), {})
    assert "which classes are behind them" in balls.details["unchecked"]
