"""Loss, gradient and curvature of a linear layer on a node's samples, against autograd."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from gems_flwr.moments.loss_sums import loss_sums, losses_along
from gems_flwr.samples import Samples

CLASSES, FEATURES, COUNT = 4, 6, 90


@pytest.fixture
def problem():
    rng = np.random.default_rng(3)
    inputs = torch.from_numpy(rng.normal(size=(COUNT, FEATURES)).astype(np.float32))
    samples = Samples(inputs, torch.from_numpy(rng.integers(CLASSES, size=COUNT)))
    layer = rng.normal(size=(CLASSES, FEATURES + 1))
    return samples, layer, rng.uniform(0.5, 2, FEATURES), rng.uniform(0.5, 2, CLASSES)


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
    assert (sums.count, sums.weight) == (COUNT, pytest.approx(weights[samples.labels].sum()))


def test_the_curvature_is_half_the_hessian_by_the_biases_and_half_the_gradients_products(problem):
    """By the biases the Hessian is the sum of diag p - p p^T, for inputs there are always ones."""
    samples, layer, scale, weights = problem
    sums = loss_sums(samples, layer, scale, weights)
    weight, bias = torch.from_numpy(layer[:, :-1]), torch.from_numpy(layer[:, -1])

    def by_bias(bias, samples=samples):
        return sum_of_losses(samples, torch.cat([weight, bias[:, None]], 1), scale, weights)

    hessian = torch.autograd.functional.hessian(by_bias, bias)
    products = torch.zeros_like(hessian)
    for row in range(COUNT):
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
    directions = rng.normal(size=(2, *layer.shape))
    points = rng.normal(size=(3, 2))
    found = losses_along(samples, layer, directions, points, scale, weights)
    for point, loss in zip(points, found, strict=True):
        moved = layer + np.tensordot(point, directions, 1)
        assert loss == pytest.approx(loss_sums(samples, moved, scale, weights).loss, rel=1e-12)


def test_sums_do_not_depend_on_how_samples_are_spread(problem):
    samples, layer, scale, weights = problem
    whole = loss_sums(samples, layer, scale, weights)
    halves = [
        loss_sums(Samples(samples.inputs[part], samples.labels[part]), layer, scale, weights)
        for part in (slice(0, 40), slice(40, None))
    ]
    assert sum(h.gradient for h in halves) == pytest.approx(whole.gradient, rel=1e-10, abs=1e-12)
    assert sum(h.loss for h in halves) == pytest.approx(whole.loss, rel=1e-12)


def test_how_few_samples_stand_behind_a_row_is_noticed(problem):
    """One sample that all others drown in is many samples; one that is alone is one."""
    samples, layer, scale, weights = problem
    one = Samples(samples.inputs[:1], samples.labels[:1])
    assert loss_sums(one, layer, scale, weights).fewest == pytest.approx(1)
    assert loss_sums(samples, layer * 0.01, scale, np.ones(CLASSES)).fewest > COUNT / 3
