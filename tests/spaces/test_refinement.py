"""Steps by curvature from moments, safeguards, and the bound on what is left."""

import dataclasses
import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

from gems_flwr.samples import Samples
from gems_flwr.spaces import input_length, screen_gradients, screen_losses
from gems_flwr.spaces.cone import (
    NUMBERS_PER_SAMPLE,
    PUSHES,
    Evaluation,
    LossCurvature,
    build_cone,
    candidates,
    choose,
    damping_after,
    gradient_parts,
    loss_bound,
    loss_sums,
    losses_along,
    mean_directions,
    mean_values,
    points_at,
    pool_moments,
    propose,
    sum_steps,
)
from gems_flwr.spaces.cone import conjugate_gradients as solve

CLASSES, FEATURES, RIDGE = 3, 5, 1e-2
ONES = np.ones(CLASSES)


def some_samples(seed=0, count=240, spread=1.5):
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=count)
    centers = rng.normal(size=(CLASSES, FEATURES))
    inputs = centers[labels] + spread * rng.normal(size=(count, FEATURES))
    return Samples(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels))


def evaluation(samples, layer, scale, dtype=None):
    """What the server knows of the loss at a layer, rounded as on the wire."""
    sums = loss_sums(samples, layer, scale, ONES)
    gradient, errors = sums.gradient, np.zeros(CLASSES)
    if dtype == "int8":
        scales = np.abs(gradient).max(axis=1)
        gradient = np.rint(gradient / scales[:, None] * 127) * scales[:, None] / 127
        errors = scales / 254 * (1 + 1e-9)
    count = sums.count
    return Evaluation(layer, sums.loss / count, gradient / count, errors / count, ("all",))


def optimum(samples, scale, ridge):
    """The least loss that scipy finds, and where."""

    def loss(flat):
        layer = flat.reshape(CLASSES, -1)
        seen = evaluation(samples, layer, scale)
        return seen.full_loss(ridge), seen.full_gradient(ridge).reshape(-1)

    start = np.zeros(CLASSES * (FEATURES + 1))
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-15})
    return found.fun, found.x.reshape(CLASSES, -1)


# --- sums of a node ---------------------------------------------------------------------------


@pytest.fixture
def problem():
    rng = np.random.default_rng(3)
    layer = rng.normal(size=(CLASSES, FEATURES + 1))
    scale, weights = rng.uniform(0.5, 2, FEATURES), rng.uniform(0.5, 2, CLASSES)
    return some_samples(3, count=90), layer, scale, weights


def sum_of_losses(samples, layer, scale, weights):
    """The same sum in torch: `layer` may be differentiated twice."""
    inputs = samples.inputs.double() / torch.from_numpy(scale)
    logits = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1) @ layer.T
    return cross_entropy(logits, samples.labels, torch.from_numpy(weights), reduction="sum")


def test_loss_and_gradient_are_those_of_autograd(problem):
    samples, layer, scale, weights = problem
    sums = loss_sums(samples, layer, scale, weights)
    leaf = torch.from_numpy(layer).requires_grad_()
    loss = sum_of_losses(samples, leaf, scale, weights)
    loss.backward()
    assert sums.loss == pytest.approx(loss.item(), rel=1e-12)
    assert sums.gradient == pytest.approx(leaf.grad.numpy(), rel=1e-10, abs=1e-10)
    assert (sums.count, sums.weight) == (90, pytest.approx(weights[samples.labels].sum()))


def test_the_curvature_is_half_the_hessian_by_the_biases_and_half_the_gradients_products(problem):
    """By the biases the Hessian is the sum of diag p - p p^T, for inputs there are always ones."""
    samples, layer, scale, weights = problem
    sums = loss_sums(samples, layer, scale, weights)
    weight, bias = torch.from_numpy(layer[:, :-1]), torch.from_numpy(layer[:, -1])

    def by_bias(bias, samples=samples):
        return sum_of_losses(samples, torch.cat([weight, bias[:, None]], 1), scale, weights)

    hessian = torch.autograd.functional.hessian(by_bias, bias)
    products = torch.zeros_like(hessian)
    for row in range(len(samples)):
        one = Samples(samples.inputs[row : row + 1], samples.labels[row : row + 1])
        gradient = torch.autograd.functional.jacobian(partial(by_bias, samples=one), bias)
        products += torch.outer(gradient, gradient) / weights[one.labels[0]]
    half = ((hessian + products) / 2).numpy()
    assert sums.curvature.sum(axis=0) == pytest.approx(half, rel=1e-9, abs=1e-12)
    pooled = loss_sums(samples, layer, scale, weights, by_class=False)
    assert pooled.curvature[0] == pytest.approx(half, rel=1e-9, abs=1e-12)
    own = Samples(samples.inputs[samples.labels == 2], samples.labels[samples.labels == 2])
    only = loss_sums(own, layer, scale, weights)
    assert sums.curvature[2] == pytest.approx(only.curvature[2], rel=1e-12)


def test_losses_along_directions_are_those_of_the_moved_layers(problem):
    samples, layer, scale, weights = problem
    rng = np.random.default_rng(5)
    directions, points = rng.normal(size=(2, *layer.shape)), rng.normal(size=(3, 2))
    found = losses_along(samples, layer, directions, points, scale, weights).sum(axis=0)
    for point, loss in zip(points, found, strict=True):
        moved = layer + np.tensordot(point, directions, 1)
        assert loss == pytest.approx(loss_sums(samples, moved, scale, weights).loss, rel=1e-12)


def test_a_sum_that_one_sample_makes_up_is_rounded_away(problem):
    """Parts are what samples add; a step is three times a part where all but one are next to 0."""
    samples, layer, scale, weights = problem
    parts = gradient_parts(samples, layer, scale, weights)
    sums = loss_sums(samples, layer, scale, weights)
    assert parts[:, -2].sum() == pytest.approx(sums.loss)
    assert (np.abs(sums.gradient).max(axis=1) <= parts[:, :-2].sum(axis=0)).all()
    alone = np.full((50, 1), 1e-9)
    alone[7] = 2.0
    assert sum_steps(alone, np.zeros(50), 1000)[0] == pytest.approx(PUSHES * 2, rel=0.01)
    even = sum_steps(np.ones((50, 1)), np.zeros(50), 100)
    assert even == pytest.approx(PUSHES * (1 - NUMBERS_PER_SAMPLE * 50 / 100))
    assert sum_steps(np.ones((50, 1)), np.zeros(50), 45) == 0


# --- curvature --------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "by_class"), [("full", True), (2, False)])
def test_products_are_those_with_the_matrix_written_out(rank, by_class):
    """H = sum_c G_c (x) A_c + 2 ridge, where A_c is the second moment of inputs and a one."""
    samples = some_samples()
    cone = build_cone(samples.inputs, samples.labels, CLASSES, rank=rank, min_count=2)
    moments = pool_moments([cone])
    scale, rng = moments.feature_scale, np.random.default_rng(1)
    layer = rng.normal(size=(CLASSES, FEATURES + 1))
    sums = loss_sums(samples, layer, scale, ONES, by_class=by_class)
    softmax = sums.curvature / sums.count
    curvature = LossCurvature.of(moments, scale, softmax, RIDGE, ONES)
    written = 2 * RIDGE * np.eye(layer.size)
    for entry, label in enumerate(cone.labels):
        mean = np.append(mean_values(cone)[entry] / scale, 1.0)
        second = np.outer(mean, mean)
        second[:-1, :-1] += cone.covariance.dense_matrix(entry) / np.outer(scale, scale)
        mixed = softmax[label] if by_class else softmax[0] * moments.shares[entry]
        written += np.kron(mixed, second)
    assert curvature(layer).reshape(-1) == pytest.approx(written @ layer.reshape(-1), rel=1e-5)
    assert np.linalg.eigvalsh(written).min() >= 2 * RIDGE - 1e-12
    found = solve(curvature, layer, 0.0)
    assert curvature(found) == pytest.approx(layer, rel=1e-2, abs=1e-3)


def test_a_class_without_moments_bends_the_loss_where_all_the_others_lie():
    """Withheld by all nodes, it is in their gradients all the same."""
    samples = some_samples()
    sent = samples.labels != 2
    cone = build_cone(samples.inputs[sent], samples.labels[sent], CLASSES, rank=2, min_count=2)
    moments = pool_moments([cone])
    layer = np.random.default_rng(1).normal(size=(CLASSES, FEATURES + 1))
    softmax = np.zeros((CLASSES, CLASSES, CLASSES))
    softmax[2] = np.eye(CLASSES)
    scale = moments.feature_scale
    curvature = LossCurvature.of(moments, scale, softmax, RIDGE, ONES)
    pooled = LossCurvature.of(moments, scale, softmax[2:], RIDGE, ONES)
    assert curvature(layer) == pytest.approx(pooled(layer), rel=1e-9)
    assert (layer * curvature(layer)).sum() > 10 * 2 * RIDGE * (layer**2).sum()


def test_directions_of_class_means_hold_the_class_means():
    samples = some_samples()
    cone = build_cone(samples.inputs, samples.labels, CLASSES, rank=2, min_count=2)
    moments = pool_moments([cone])
    scale = moments.feature_scale
    basis = mean_directions(moments, scale)
    means = np.column_stack([mean_values(cone) / scale, np.ones(CLASSES)])
    assert basis @ basis.T == pytest.approx(np.eye(CLASSES), abs=1e-9)
    assert means @ basis.T @ basis == pytest.approx(means, abs=1e-6)
    assert len(mean_directions(moments, scale, most=2)) == 2


# --- steps ------------------------------------------------------------------------------------


def test_with_the_true_hessian_the_first_step_is_newtons():
    rng = np.random.default_rng(2)
    root = rng.normal(size=(6, 6))
    hessian = root @ root.T + np.eye(6)
    seen = Evaluation(np.zeros((2, 3)), 1.0, rng.normal(size=(2, 3)), np.zeros(2))
    found = propose([seen], lambda v: (hessian @ v.reshape(-1)).reshape(2, 3), 0.0, 0.0)
    newton = np.linalg.solve(hessian, seen.gradient.reshape(-1))
    assert found.direction.reshape(-1) == pytest.approx(-newton, rel=1e-3)
    assert found.gain == pytest.approx(seen.gradient.reshape(-1) @ newton / 2, rel=1e-3)


def test_a_step_agrees_with_what_the_last_one_has_shown():
    """The secant equation: if the gradient is what the last step changed, that step undoes it."""
    rng = np.random.default_rng(4)
    step = rng.normal(size=(2, 3))
    before = Evaluation(np.zeros((2, 3)), 1.0, np.zeros((2, 3)), np.zeros(2))
    after = Evaluation(step, 1.0, 3 * step + 0.1 * rng.normal(size=(2, 3)), np.zeros(2))
    found = propose([before, after], lambda v: v, 0.0, 0.0)
    assert found.direction == pytest.approx(-step, rel=1e-9)
    # What other nodes have shown does not count.
    before = dataclasses.replace(before, nodes=("a", "b"))
    found = propose([before, after], lambda v: v, 0.0, 0.0)
    assert found.direction == pytest.approx(-after.gradient)


def test_a_step_is_taken_only_if_it_lowers_the_loss():
    assert choose([1.0, 1.2, 0.9, 0.95]) == 2
    assert choose([1.0, 1.2, 1.0, 1.5]) == 0
    assert choose([1.0, 1.0 - 1e-9]) == 0  # rounding is no gain
    assert damping_after(1e-6, 0) > damping_after(1e-6, 3)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.sampled_from([0.3, 1.5, 6.0]))
def test_the_loss_never_rises_and_ends_at_the_optimum(seed, spread):
    """On any data: eight rounds by moments of rank 2, gradients rounded to int8."""
    samples = some_samples(seed, spread=spread)
    cone = build_cone(samples.inputs, samples.labels, CLASSES, rank=2, min_count=2)
    moments = pool_moments([cone])
    scale = moments.feature_scale
    layer = np.random.default_rng(seed).normal(size=(CLASSES, FEATURES + 1))
    history, losses = [], []
    for _ in range(8):
        sums = loss_sums(samples, layer, scale, ONES)
        history.append(evaluation(samples, layer, scale, "int8"))
        losses.append(history[-1].full_loss(RIDGE))
        curvature = LossCurvature.of(moments, scale, sums.curvature / sums.count, RIDGE, ONES)
        found = propose(history, curvature, RIDGE, 1e-6)
        assert found.gain > 0
        points = points_at(layer, found.direction, candidates())
        layer = points[choose([evaluation(samples, p, scale).full_loss(RIDGE) for p in points])]
    assert all(after <= before for before, after in itertools.pairwise(losses))
    least, _ = optimum(samples, scale, RIDGE)
    assert losses[-1] - least < 0.02 * losses[0]


# --- the bound --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([None, "int8"]), st.sampled_from([1e-4, 1e-2, 1.0]))
def test_no_layer_is_better_than_the_bound_says(seed, dtype, ridge):
    samples = some_samples(seed)
    rng, scale = np.random.default_rng(seed), np.ones(FEATURES)
    least, best = optimum(samples, scale, ridge)
    layers = [best + rng.normal(size=best.shape) * 10.0 ** -rng.integers(0, 4) for _ in range(3)]
    history = [evaluation(samples, layer, scale, dtype) for layer in layers]
    exact = evaluation(samples, layers[-1], scale)
    for known in (history, history[:2], history[:1], []):
        bound = loss_bound(layers[-1], exact.loss, known, ridge)
        assert bound >= exact.full_loss(ridge) - least
        assert bound <= exact.full_loss(ridge) * (1 + 1e-6)


def test_at_the_optimum_the_bound_is_next_to_nothing():
    """And elsewhere, with one exact gradient, no more than |g|^2 / (2 mu), mu = 2 ridge."""
    samples, scale = some_samples(), np.ones(FEATURES)
    _, best = optimum(samples, scale, RIDGE)
    seen = evaluation(samples, best, scale)
    assert loss_bound(best, seen.loss, [seen], RIDGE) < 1e-6
    near = evaluation(samples, best + 0.01, scale)
    squared = float((near.full_gradient(RIDGE) ** 2).sum())
    bound = loss_bound(near.layer, near.loss, [near], RIDGE)
    assert bound <= squared / (4 * RIDGE) * (1 + 1e-6) + 1e-8


# --- lies -------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.01, 1.0, 30.0]))
def test_no_honest_gradient_and_no_honest_losses_are_held_against_a_node(seed, size):
    samples = some_samples(seed)
    cone = build_cone(samples.inputs, samples.labels, CLASSES, rank=2, min_count=2)
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.3, 3, FEATURES)
    layer, step = size * rng.normal(size=(2, CLASSES, FEATURES + 1))
    tried, weights = candidates(), rng.uniform(0.2, 3, CLASSES)
    layers = points_at(layer, step, tried)
    sums = loss_sums(samples, layer, scale, weights)
    zeros = {"errors": np.zeros(CLASSES), "withheld": np.zeros(CLASSES)}
    sent = {"a": SimpleNamespace(**vars(sums), **zeros)}
    told = np.array([loss_sums(samples, each, scale, weights).loss for each in layers])
    about = {"a": cone}, layers, scale, weights, sent, tried
    assert not screen_gradients(sent, {"a": cone}, scale, weights, layer)
    assert not screen_losses({"a": told}, *about)
    told[2] += 1e12
    assert screen_losses({"a": told}, *about)


def test_the_length_of_inputs_is_in_the_moments():
    samples, scale = some_samples(), np.linspace(0.3, 3, FEATURES)
    cone = build_cone(samples.inputs, samples.labels, CLASSES, rank="full", min_count=2)
    scaled = samples.inputs.double().numpy() / scale
    length = np.sqrt((scaled**2).sum(axis=1).mean() + 1)
    assert input_length(pool_moments([cone]), scale) == pytest.approx(length, rel=1e-4)
