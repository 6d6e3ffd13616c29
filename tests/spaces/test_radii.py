"""Radii against dense grids and steepest rays; axes against autograd."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers_construct import a_problem, blobs
from helpers_fisher import fisher_diagonal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.spaces.ball import (
    LayerData,
    accuracy,
    accuracy_curve,
    build_ball,
    build_ellipsoid,
    find_extent,
    linear_fisher,
    random_directions,
    relative_axes,
    required_correct,
)
from gems_flwr.spaces.ball import layer_data as layer_module

SHAPES = st.sampled_from([(3, True), (2, True), (1, True), (4, False), (1, False)])


def good_enough(data, epsilon):
    """Return whether a flat model is right on enough samples, from its scores alone."""
    x, y = data.augmented(slice(None))

    def good(w):
        scores = x @ data.matrix(torch.from_numpy(w).to(data.weight)[None])[0].T
        return accuracy(scores, y) >= epsilon - 1e-9

    return good


# --- along rays -------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), SHAPES, st.booleans(), st.floats(0.1, 0.95))
def test_the_exact_ray_is_where_a_dense_grid_first_fails(seed, shape, axes, epsilon):
    data = a_problem(seed, outputs=shape[0], bias=shape[1], axes=axes)
    good = good_enough(data, epsilon)
    center = data.center.astype(np.float64)
    directions = next(iter(random_directions(data, 3, seed))).double()
    for u in directions:
        try:
            radius = accuracy_curve(data, [u[None]]).radius(epsilon)
        except NotGoodEnoughError:
            assert not good(center)
            return
        grid = np.linspace(0, min(radius, 12) * (1 - 1e-7), 200)
        assert all(good(center + r * u.numpy()) for r in grid)
        if np.isfinite(radius):
            assert not good(center + radius * (1 + 1e-7) * u.numpy())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_the_curve_holds_the_radius_of_every_accuracy(seed):
    data = a_problem(seed)
    directions = next(iter(random_directions(data, 6, seed))).double()
    curve = accuracy_curve(data, [directions])
    assert np.all(curve.radii[1:] <= curve.radii[:-1])
    for k in range(1, round(curve.accuracy * curve.count) + 1):
        epsilon = k / curve.count
        alone = min(accuracy_curve(data, [u[None]]).radius(epsilon) for u in directions)
        assert curve.radius(epsilon) == pytest.approx(alone)
    with pytest.raises(NotGoodEnoughError):
        curve.radius(1.0)


def test_a_sample_that_becomes_right_counts():
    """Two equal inputs x = 1 of classes 0 and 1; scores 1 - R and R - 0.5.

    Class 0 is ahead until R = 0.75, class 1 after: one of the two is always right, but at
    R = 0.75 itself they tie and none is, which is the first radius that fails 1/2.
    """
    data = LayerData(
        torch.tensor([[1.0], [0.0]]),
        torch.tensor([0.0, -0.5]),
        torch.tensor([[1.0], [1.0]]),
        torch.tensor([0, 1]),
    )
    ray = torch.tensor([[-1.0, 0.0, 0.0, 1.0]])
    assert accuracy_curve(data, [ray]).radius(0.5) == pytest.approx(0.75)
    more = dataclasses.replace(
        data,
        inputs=torch.tensor([[1.0], [1.0], [0.1], [0.1]]),
        labels=torch.tensor([0, 1, 0, 1]),
    )
    # x = 0.1: class 0 scores 0.1 (1 - R), class 1 R - 0.5; they cross at R = 6 / 11, so that
    # the fourth has become right, and the third wrong, before the first is lost at 0.75.
    assert accuracy_curve(more, [ray]).radius(0.5) == pytest.approx(6 / 11)


def test_chunks_change_nothing(monkeypatch):
    data, search = a_problem(5, n=300), {"method": "sampled", "directions": 40, "seed": 3}
    whole = find_extent(data, 0.6, **search)[0].value
    monkeypatch.setattr(layer_module, "CHUNK_BYTES", 2000)
    assert find_extent(data, 0.6, **search)[0].value == pytest.approx(whole, rel=1e-6)


def test_required_correct_rounds_up_but_not_on_rounding_errors():
    assert required_correct(0.7, 10) == 7
    assert required_correct(0.71, 10) == 8
    assert required_correct(0.4, 1000) == 400


@pytest.mark.parametrize("method", ["sampled", "certified"])
def test_a_centre_that_is_not_good_enough_has_no_radius(method):
    with pytest.raises(NotGoodEnoughError, match="reaches"):
        find_extent(a_problem(0), 1.0, method)


@pytest.mark.parametrize(
    "build",
    [
        lambda d: LayerData(d.weight[0], d.bias, d.inputs, d.labels),
        lambda d: LayerData(d.weight, d.bias, d.inputs[:, :2], d.labels),
        lambda d: LayerData(d.weight, d.bias, d.inputs, d.labels[:3]),
        lambda d: LayerData(d.weight, d.bias, d.inputs, d.labels + 9),
        lambda d: accuracy_curve(d, []),
    ],
)
def test_malformed_problems_are_refused(build):
    with pytest.raises(ValueError, match="expected"):
        build(a_problem(0))


# --- honest radii -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(3, True), (2, True), (1, True), (4, False)]),
    st.booleans(),
)
def test_every_model_in_a_certified_space_is_good_enough(seed, shape, ellipsoid):
    """Random models and, much harder, the models along the worst directions."""
    data = a_problem(seed, outputs=shape[0], bias=shape[1])
    epsilon = 0.8 * accuracy(*data.scores())
    build = build_ellipsoid if ellipsoid else build_ball
    try:
        space = build(data, epsilon, "certified")
    except NotGoodEnoughError:
        return
    assert space.radius.method == "certified"
    good = good_enough(data, epsilon)
    rng = np.random.default_rng(seed)
    center = space.center.astype(np.float64)
    axes = space.radii if ellipsoid else np.full(len(center), space.radius.value)
    for _ in range(60):
        u = rng.normal(size=len(center))
        u *= rng.uniform() ** (1 / len(center)) / np.linalg.norm(u)
        assert good(center + axes * u)
    for u in _steepest(dataclasses.replace(data, axes=torch.tensor(axes).double())):
        assert good(center + (1 - 1e-6) * u)


def _steepest(data):
    """Yield for each sample and rival the surface point that lowers that margin most."""
    x, y = data.augmented(slice(None))
    for i in range(len(x)):
        for j in range(data.num_classes):
            if j == int(y[i]):
                continue
            push = torch.zeros_like(data.center_matrix())
            if len(push) > 1:
                push[j] += x[i]
                push[int(y[i])] -= x[i]
            else:
                push[0] += x[i] * (1 if j else -1)
            scaled = data.on_surface(data.flat(push[None]))
            yield data.on_surface(scaled / scaled.norm())[0].numpy()


def test_certified_radii_are_far_below_sampled_ones_in_many_dimensions():
    data = blobs(features=200)
    certified, sampled = (find_extent(data, 0.7, m)[0] for m in ("certified", "sampled"))
    assert 5 * certified.value < sampled.value
    assert (certified.method, certified.directions, sampled.method) == ("certified", 0, "sampled")


# --- axes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [3, 1])
def test_the_closed_form_fisher_is_that_of_torch_func(outputs):
    data = a_problem(4, outputs=outputs)
    layer = nn.Linear(4, outputs).double()
    with torch.no_grad():
        layer.weight.copy_(data.weight)
        layer.bias.copy_(data.bias)
    general = fisher_diagonal(layer, data.inputs, chunk=7)
    flat = torch.cat([general["weight"].reshape(-1), general["bias"]])
    torch.testing.assert_close(flat, linear_fisher(data))


def test_axes_follow_equation_5():
    """Equal F give a ball; F of (1, 2, 100) with c = 0.1 gives (1, 1/2, 0.1)."""
    assert relative_axes(torch.full((4,), 3.0)).tolist() == [1.0] * 4
    expected = torch.tensor([1.0, 0.5, 0.1])
    torch.testing.assert_close(relative_axes(torch.tensor([1.0, 2.0, 100.0]), 0.1, 0.0), expected)
    assert relative_axes(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert relative_axes(torch.tensor([1.0, 9.0]), floor=1.0).tolist() == [1.0, 1.0]


def test_damped_axes_are_those_of_the_released_code():
    """1/(F + 1e-5), divided by the largest, at least 0.1: in NumPy, weight by weight."""
    fisher = np.array([0.0, 1e-6, 1e-5, 4e-5, 8.9e-5, 9.1e-5, 0.3])
    inverse = 1 / (np.abs(fisher) + 1e-5)
    expected = np.maximum(0.1, inverse / inverse.max())
    axes = relative_axes(torch.from_numpy(fisher))
    np.testing.assert_allclose(axes.numpy(), expected, rtol=1e-12)
    # Without a dead pixel the least F plus the damping has the full length.
    axes = relative_axes(torch.tensor([2e-5, 5e-5]))
    torch.testing.assert_close(axes, torch.tensor([1.0, 0.5]))


def test_an_ellipsoid_is_longest_where_the_model_is_least_sensitive():
    data = a_problem(8)
    space = build_ellipsoid(data, 0.5, "sampled", directions=50, floor=0.2, curve=True)
    fisher = linear_fisher(data).numpy()
    assert np.argmax(space.radii) == np.argmin(fisher)
    assert space.radii.max() == pytest.approx(space.radius.value, rel=1e-6)
    assert space.radii.min() >= 0.2 * space.radius.value * (1 - 1e-6)
    # The curve is that of the same axes.
    assert space.at(0.5).radii == pytest.approx(space.radii, rel=1e-6)
