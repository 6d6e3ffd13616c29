"""`Gems(refine=R)`: gradient rounds over the wire, from the cone's layer towards the optimum."""

import numpy as np
import pytest
import torch
from helpers_digits import app_of, digits, failing, linear
from helpers_gems import Spoiled, accuracy, linear_app, run
from scipy.optimize import minimize

from conftest import record_equal
from gems_flwr import Cone, Gems, Head, InProcessGrid, Refine, Tune
from gems_flwr.core.records import to_numpy
from gems_flwr.errors import CheckpointError
from gems_flwr.node.limits import UNLIMITED
from gems_flwr.samples import Samples
from gems_flwr.spaces import SpaceFolder
from gems_flwr.spaces.cone import loss_sums, pool_moments
from gems_flwr.stages import public_weight

RIDGE = 1e-3


def refine(rounds, **options):
    return Refine(rounds, **{"ridge": RIDGE, **options})


def refined(parts=None, grid=InProcessGrid, limits=UNLIMITED, outer=(), **options):
    parts = parts or digits()
    options = {"space": Cone(rank=10), "refine": refine(4), **options}
    return Gems(**options).start(grid(app_of(parts, limits, *outer), len(parts)), linear())


def scale_of(folder):
    cones = list(SpaceFolder(folder / "spaces").load().values())
    return pool_moments(cones).feature_scale.astype(np.float32).astype(np.float64)


def layer_of(result, scale):
    arrays = to_numpy(result.arrays)
    return np.column_stack([arrays["weight"].astype(np.float64) * scale, arrays["bias"]])


def pooled_optimum(parts, scale, weights=None, public=None):
    """The least loss of the pooled data by scipy, and that of any layer."""
    samples = Samples(*(torch.cat(each) for each in zip(*parts, strict=True)))
    each, shape = np.ones(10) if weights is None else weights, (10, len(scale) + 1)

    def loss(flat):
        layer = flat.reshape(shape)
        sums = loss_sums(samples, layer, scale, each)
        value, gradient = sums.loss / sums.weight, sums.gradient / sums.weight
        if public is not None:
            own = loss_sums(public, layer, scale, np.ones(10))
            factor = public_weight(len(public)) / len(public)
            value, gradient = value + factor * own.loss, gradient + factor * own.gradient
        value += RIDGE * (layer**2).sum()
        return value, (gradient + 2 * RIDGE * layer).reshape(-1)

    options = {"maxiter": 5000, "maxfun": 10000, "ftol": 1e-15, "gtol": 1e-9}
    found = minimize(loss, np.zeros(np.prod(shape)), jac=True, method="L-BFGS-B", options=options)
    return found.fun, lambda layer: loss(layer.reshape(-1))[0]


# --- towards the pooled optimum ----------------------------------------------------------------


@pytest.mark.parametrize("plain", [True, False], ids=["by label", "balanced with public"])
def test_the_loss_falls_to_the_pooled_optimum_and_the_bound_holds(tmp_path, plain):
    """Against scipy on the pooled data: the loss that is reported, and how far from the least."""
    parts, public, weights, options = digits(), None, None, {}
    if not plain:
        *parts, (x, y) = digits(4)
        public = Samples(x[:300], y[:300])
        counts = np.bincount(torch.cat([y for _, y in parts]), minlength=10)
        weights = np.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts.clip(1)), 0)
        options = {"head": Head(class_weight="balanced"), "tune": Tune(x, y, count=300)}
    result = refined(parts, checkpoint_dir=tmp_path, refine=refine(6), **options)
    rounds = result.details["refinement"]
    losses = [each["loss"] for each in rounds]
    assert losses == sorted(losses, reverse=True)
    assert all(each["taken"] for each in rounds[:5])
    scale = scale_of(tmp_path)
    least, loss_at = pooled_optimum(parts, scale, weights, public)
    reached = loss_at(layer_of(result, scale))
    assert result.details["loss"] == pytest.approx(reached, rel=1e-5)
    assert 0 <= reached - least <= result.details["loss_bound"]
    assert reached - least < 0.01 * losses[0]
    # Every round's bound is about a loss that was at least that of the end.
    assert all(each["loss"] - least <= each["loss_bound"] for each in rounds)
    assert result.details["gradient_norm"] == rounds[-1]["gradient_norm"]


def test_rounds_that_would_not_help_are_not_played():
    result = refined(refine=refine(30, tolerance=1e-3))
    assert len(result.history) < 20
    assert "gain" in result.stopped_because
    assert result.details["refinement"][-1]["converged"]


# --- the same digits ---------------------------------------------------------------------------


def test_a_run_that_was_started_without_refinement_is_not_refined_later(tmp_path):
    run(Gems(checkpoint_dir=tmp_path))
    with pytest.raises(CheckpointError, match="started without refine"):
        run(Gems(checkpoint_dir=tmp_path, refine=2), resume=True)


# --- nodes that fail, or lie ---------------------------------------------------------------------


def silent(*where):
    """Return a mod that fails at (node, round, question)."""
    return failing(lambda node, number, what, _: (node, number, what) in where)


def test_a_node_that_is_missing_in_a_round_is_missing_in_its_loss_alone(tmp_path):
    """Round 3 is about the two others. The bound of round 4 is about all three again."""
    parts = digits(sort=False)
    result = refined(parts, outer=[silent((1, 3, "gradient"))], checkpoint_dir=tmp_path)
    rounds = result.details["refinement"]
    assert [each["nodes"] for each in rounds] == [3, 2, 3, 3]
    assert [(number, f.node) for number, f in result.failures] == [(3, "1")]
    least, loss_at = pooled_optimum(parts, scale_of(tmp_path))
    reached = loss_at(layer_of(result, scale_of(tmp_path)))
    assert reached - least <= result.details["loss_bound"]
    assert rounds[3]["loss"] < rounds[2]["loss"] < rounds[0]["loss"]


def test_losses_are_compared_over_those_who_sent_them():
    outer = [silent((2, 2, "losses"))]
    result = refined(digits(sort=False), outer=outer, refine=refine(2))
    first, second = result.details["refinement"]
    assert first["taken"]
    assert first["gain"] > 0
    assert second["loss"] < first["loss"] * 1.1


@pytest.mark.parametrize("what", ["gradient", "losses"])
def test_the_layer_stays_if_too_few_answer(what):
    parts = digits(sort=False)
    outer = [silent((0, 2, what), (1, 2, what))]
    result = refined(parts, outer=outer, refine=refine(1), min_nodes=2)
    assert record_equal(result.arrays, refined(parts, refine=0).arrays)
    [note] = result.details["refinement"]
    assert not note["taken"]
    assert "too few nodes" in note["reason"]


def test_if_no_step_lowers_the_loss_the_layer_stays(monkeypatch):
    """A curvature that is wrong by orders of magnitude: the next round knows better."""
    monkeypatch.setattr(
        "gems_flwr.spaces.cone.refine.LossCurvature.__call__", lambda self, layer: 1e-7 * layer
    )
    result = run(Gems(refine=2), linear_app(limits=UNLIMITED), nodes=2)
    first, second = result.details["refinement"]
    assert not first["taken"]
    assert first["reason"] == "no step lowers the loss"
    assert second["expected_gain"] < first["expected_gain"]
    assert accuracy(result.arrays) > 0.9


def scales(change):
    """Return what changes the scales of a gradient on the way."""

    def spoil(content):
        if "gradient" in content:
            before = np.frombuffer(content["gradient"]["scales"], "<f4")
            content["gradient"]["scales"] = (before * change).astype("<f4").tobytes()

    return spoil


def test_robust_leaves_out_a_gradient_that_the_moments_do_not_allow():
    """Five hundred times as long as it is; among the honest nothing is held against anyone."""

    def lie(content):
        if "gradient" in content:
            scales(500)(content)
            along = 500 * np.frombuffer(content["gradient"]["along"], "<f2").astype(np.float64)
            content["gradient"]["along"] = along.astype("<f2").tobytes()

    app = linear_app(limits=UNLIMITED)
    assert not run(Gems(refine=2, robust=True), app, nodes=6).failures
    result = run(Gems(refine=2, robust=True), Spoiled(app, lie), nodes=6)
    assert {f.node for _, f in result.failures} == {"1"}
    assert "its loss allows" in result.failures[0][1].reason
    assert accuracy(result.arrays) > 0.95


def test_a_node_counts_for_no_more_samples_than_its_moments_do():
    """A claim of a thousand times its samples moves the layer by no more than the truth."""

    def boast(content):
        if "gradient" in content:
            scales(1000)(content)
            metrics = content["metrics"]
            for key in ("num-examples", "weight-sum", "loss-sum"):
                metrics[key] = metrics[key] * 1000

    app = linear_app(limits=UNLIMITED)
    plain, boasted = run(Gems(refine=1), app), run(Gems(refine=1), Spoiled(app, boast))
    first, second = (each.details["refinement"][0] for each in (plain, boasted))
    assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-3)


def test_classes_whose_nodes_send_no_gradient_are_not_unlearned():
    """Node 1 alone has digits of its own; the loss of the others would be lower without them."""
    parts = digits()
    one = refined(parts, refine=0)
    grid = InProcessGrid(Spoiled(app_of(parts), scales(np.nan)), len(parts))
    result = Gems(space=Cone(rank=10), refine=refine(1)).start(grid, linear())
    [note] = result.details["refinement"]
    assert "sent no gradient" in note["reason"]
    assert record_equal(result.arrays, one.arrays)
