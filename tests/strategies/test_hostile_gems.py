"""GEMS among hostile nodes: over the wire, with the options that bound what a node can do."""

import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CENTERS, CLASSES, FEATURES, TEST, blobs, both_parts

from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.errors import RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.gems import Gems
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid


def all_classes(context, seed=1):
    return blobs(range(CLASSES), seed=10 * context.node_config["partition-id"] + seed)


def own_class(context, seed=1):
    """One class on each node, as in the hardest label split."""
    node = context.node_config["partition-id"]
    return blobs([node % CLASSES], seed=10 * node + seed)


def app_with_liars(lies, data=all_classes):
    """Return an app in which `lies` maps nodes to what they do to their replies' content."""

    def liar_mod(message, context, call_next):
        reply = call_next(message, context)
        lie = lies.get(context.node_config["partition-id"])
        if lie and reply.has_content():
            lie(reply.content)
        return reply

    app = ClientApp(mods=[liar_mod, good_enough_mod(both_parts(data))])

    @app.train()
    def train(message, context):
        """Every node has the model of least squares, a little off."""
        node = context.node_config["partition-id"]
        weight = CENTERS + 0.01 * np.random.default_rng(node).normal(size=CENTERS.shape)
        bias = -(CENTERS**2).sum(axis=1) / 2
        arrays = {"weight": weight.astype(np.float32), "bias": bias.astype(np.float32)}
        metrics = MetricRecord({"num-examples": 10})
        content = RecordDict({"arrays": to_record(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def in_arrays(change):
    def lie(content):
        if "space" in content:
            arrays = to_numpy(content["space"])
            content["space"] = to_record(arrays | change(arrays))

    return lie


def in_meta(change):
    def lie(content):
        if "space-meta" in content:
            meta = json.loads(content["space-meta"]["json"])
            change(meta)
            content["space-meta"] = ConfigRecord({"json": json.dumps(meta)})

    return lie


def both(*lies):
    def lie(content):
        for each in lies:
            each(content)

    return lie


FLIPPED = in_arrays(lambda a: {"labels": a["labels"][::-1].copy()})


def many(content):
    in_arrays(lambda a: {"counts": a["counts"] * 10**6})(content)
    in_meta(lambda m: m.__setitem__("total_count", m["total_count"] * 10**6))(content)


def far_away(content):
    in_arrays(lambda a: {"center": a["center"] + np.float32(100)})(content)


def start(strategy, lies, nodes=5, data=all_classes):
    first = ArrayRecord(
        {
            "weight": Array(np.zeros((CLASSES, FEATURES), np.float32)),
            "bias": Array(np.zeros(CLASSES, np.float32)),
        }
    )
    return strategy.start(InProcessGrid(app_with_liars(lies, data), nodes), first)


def accuracy(result):
    weight = torch.from_numpy(result.arrays["weight"].numpy())
    scores = TEST[0] @ weight.T + torch.from_numpy(result.arrays["bias"].numpy())
    return float((scores.argmax(1) == TEST[1]).float().mean())


def test_flipped_labels_with_a_million_samples_own_the_cone_unless_it_is_robust():
    lies = {1: both(FLIPPED, many)}
    assert accuracy(start(Gems(), lies)) < 0.3
    result = start(Gems(robust=True), lies)
    assert accuracy(result) > 0.95
    assert set(result.details["left_out"]) == {"1"}
    assert "unlike those of the other nodes" in result.details["left_out"]["1"]
    assert set(result.details["margins"]) == {"0", "2", "3", "4"}


def test_a_cap_on_samples_alone_already_gives_the_liar_no_more_than_its_share():
    """Capped at the true number, one of five liars about all labels cannot win any class."""
    assert accuracy(start(Gems(max_examples=240), {1: both(FLIPPED, many)})) > 0.9
    summed = Gems(space=Cone(sums=True), max_examples=240)

    def boast(content):
        arrays = to_numpy(content["class-sums"])
        flipped = {key: (array[::-1] * np.float32(1e6)) for key, array in arrays.items()}
        content["class-sums"] = to_record(flipped)

    assert accuracy(start(summed, {1: boast})) > 0.9
    assert accuracy(start(Gems(space=Cone(sums=True)), {1: boast})) < 0.3


def test_honest_cones_give_the_same_layer_with_and_without_screening():
    plain, screened = start(Gems(), {}), start(Gems(robust=True), {})
    assert np.array_equal(plain.arrays["weight"].numpy(), screened.arrays["weight"].numpy())
    assert screened.details["left_out"] == {}
    assert screened.details["adjusted"] == {}


def test_who_counts_for_less_is_told(caplog):
    result = start(Gems(robust=True), {1: many})
    assert "count as" in result.details["adjusted"]["1"]
    assert result.details["left_out"] == {}
    assert 'event=suspect node=1 reason="its' in caplog.text


@pytest.mark.parametrize("space", [Ball, Ellipsoid])
def test_a_far_away_space_is_left_out_by_subset_and_by_robust(space):
    options = {"space": space(epsilon=0.9, directions=20)}
    owned = start(Gems(**options), {1: far_away})
    assert np.abs(owned.arrays["weight"].numpy()).max() > 20
    for defence in ({"on_empty": "subset"}, {"robust": True}):
        result = start(Gems(**options, **defence), {1: far_away})
        assert accuracy(result) > 0.95
        assert set(result.details["left_out"]) == {"1"}
    subset = start(Gems(**options, on_empty="subset"), {1: far_away})
    assert subset.details["subset_proved"]
    assert subset.details["empty"]


def garbage(content):
    """Claim every class, all in the same wrong place, as sure as can be."""
    if "space" not in content:
        return
    arrays = to_numpy(content["space"])
    entries = np.arange(CLASSES)
    means = CENTERS[::-1].astype(np.float32)
    triangles = np.repeat(arrays["triangles"][:1], CLASSES, axis=0)
    counts = np.repeat(arrays["counts"][:1] * 4, CLASSES)
    arrays = {"labels": entries, "means": means, "triangles": triangles, "counts": counts}
    content["space"] = to_record(arrays)
    in_meta(lambda m: m.__setitem__("total_count", int(counts.sum())))(content)


def test_where_classes_are_on_single_nodes_the_scores_of_the_others_convict():
    """One node for each class, two for class 0; one of those two claims all classes."""
    lies = {0: garbage}
    plain = start(Gems(), lies, nodes=5, data=own_class)
    assert accuracy(plain) < 0.6
    result = start(Gems(audit=True, verify=True), lies, nodes=5, data=own_class)
    assert set(result.details["left_out"]) == {"0"}
    assert "the others gain" in result.details["left_out"]["0"]
    assert accuracy(result) > 0.9
    assert set(result.details["node_scores"]) == {str(n) for n in range(5)}


def test_an_audit_among_honest_nodes_convicts_nobody():
    plain = start(Gems(), {}, nodes=3, data=own_class)
    audited = start(Gems(audit=True), {}, nodes=3, data=own_class)
    assert audited.details["left_out"] == {}
    assert np.array_equal(plain.arrays["weight"].numpy(), audited.arrays["weight"].numpy())


def test_too_few_plausible_spaces_fail_the_round():
    lies = {0: far_away, 1: far_away}
    with pytest.raises(RoundFailedError, match="3 nodes sent plausible spaces, min_nodes is 4"):
        start(Gems(space=Ball(epsilon=0.9, directions=20), robust=True, min_nodes=4), lies)


def test_moments_of_another_form_than_asked_for_are_refused():
    def twice(content):
        if "space" in content:
            arrays = to_numpy(content["space"])
            doubled = {key: np.concatenate([a, a]) for key, a in arrays.items()}
            content["space"] = to_record(doubled)
        in_meta(lambda m: m.__setitem__("total_count", 2 * m["total_count"]))(content)

    (failure,) = start(Gems(), {1: twice}).history[1].failures
    assert "at most 1 entries of a class" in failure.reason


def test_sums_that_no_samples_can_have_are_refused():
    def impossible(content):
        arrays = to_numpy(content["class-sums"])
        content["class-sums"] = to_record(arrays | {"outers": arrays["outers"] * 0})

    (failure,) = start(Gems(space=Cone(sums=True)), {1: impossible}).history[1].failures
    assert "a negative variance" in failure.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_empty": "subset"}, "for cones there is robust=True"),
        ({"space": "ball", "epsilon": "auto", "robust": True}, "neither"),
        ({"space": "ball", "on_empty": "relax", "robust": True}, "which on_empty='relax' chooses"),
        ({"space": Cone(sums=True), "audit": True}, "sums=True shows nothing"),
        ({"space": "ball", "audit": True}, "audit needs cones"),
    ],
)
def test_defences_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Gems(**options)


def test_classes_that_too_few_nodes_hold_are_listed_as_unchecked(caplog):
    """Five nodes with one class each of four: nobody can tell a lie. With all classes, any."""
    result = start(Gems(robust=True), {}, data=own_class)
    assert result.details["unchecked_classes"] == list(range(CLASSES))
    assert caplog.text.count("event=unchecked classes=0,1,2,3") == 1
    everywhere = start(Gems(robust=True), {})
    assert everywhere.details["unchecked_classes"] == []
    assert "unchecked_classes" not in start(Gems(), {}, data=own_class).details


def test_two_nodes_cannot_be_held_against_each_other_and_the_result_says_so():
    result = start(Gems(robust=True), {}, nodes=2)
    assert result.details["unchecked_classes"] == list(range(CLASSES))


def test_balls_say_that_models_do_not_tell_of_classes():
    details = start(Gems(space=Ball(epsilon=0.9, directions=20), robust=True), {}).details
    assert "which classes are behind them" in details["unchecked"]
