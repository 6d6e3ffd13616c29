"""Certified radii are sound, worst directions are worse than random ones, Fisher axes agree."""

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
from gems_flwr.radii.fisher_axes import DAMPING, linear_fisher, relative_axes
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.layer_radius import (
    build_ball,
    build_ellipsoid,
    find_radius,
    good_enough,
    radius_curve,
)
from gems_flwr.radii.quality import Quality
from gems_flwr.radii.worst import worst_curve


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(3, True), (2, True), (1, True), (4, False)]),
    st.booleans(),
    st.sampled_from(["accuracy", "loss"]),
)
def test_every_model_in_a_certified_space_is_good_enough(seed, shape, ellipsoid, measure):
    """Random models and, much harder, the models along the worst directions."""
    data = a_problem(seed, outputs=shape[0], bias=shape[1])
    scores, y = data.scores()
    reached = Quality(1.0, measure).score(scores, y)
    quality = Quality(0.8 * reached if measure == "accuracy" else reached + 0.5, measure)
    build = build_ellipsoid if ellipsoid else build_ball
    try:
        space = build(data, quality, "certified")
    except NotGoodEnoughError:
        return
    assert space.radius.method == "certified"
    good = good_enough(data, quality)
    rng = np.random.default_rng(seed)
    center = space.center.astype(np.float64)
    axes = space.radii if ellipsoid else np.full(len(center), space.radius.value)
    for _ in range(60):
        u = rng.normal(size=len(center))
        u *= rng.uniform() ** (1 / len(center)) / np.linalg.norm(u)
        assert good(center + axes * u)
    shaped = LayerData(
        data.weight, data.bias, data.inputs, data.labels, torch.tensor(axes).double()
    )
    for u in _steepest(shaped):
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
            yield data.unit_on_surface(data.flat(push[None]))[0].numpy()


@pytest.mark.parametrize("measure", ["accuracy", "loss"])
def test_the_order_is_certified_worst_sampled_in_many_dimensions(measure):
    data = blobs(features=200)
    quality = Quality(0.7 if measure == "accuracy" else 0.8, measure)
    radii = {m: find_radius(data, quality, m) for m in ("certified", "worst", "sampled")}
    assert radii["certified"].value < radii["worst"].value
    assert 5 * radii["worst"].value < radii["sampled"].value
    assert {m: r.method for m, r in radii.items()} == {m: m for m in radii}
    assert radii["certified"].directions == 0


def test_a_model_just_beyond_the_worst_radius_really_fails():
    data = blobs(features=50)
    curve, count = worst_curve(data, 0.7)
    assert count >= data.num_classes + 2
    ball = build_ball(data, Quality(0.7), "worst")
    assert ball.radius.value == pytest.approx(curve.radius(0.7))
    assert ball.radius.directions == count


def test_curves_of_all_methods_start_at_the_same_accuracy():
    data = blobs(features=20)
    curves = [radius_curve(data, m, 0.5) for m in ("sampled", "worst", "certified")]
    assert len({round(c.accuracy, 9) for c in curves}) == 1
    with pytest.raises(ValueError, match="method"):
        radius_curve(data, "growing")
    with pytest.raises(NotGoodEnoughError):
        curves[0].radius(1.0)


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


def test_sampled_labels_average_to_the_exact_expectation():
    data = a_problem(4, n=30)
    exact = linear_fisher(data)
    runs = torch.stack([linear_fisher(data, "sampled", seed) for seed in range(400)])
    torch.testing.assert_close(runs.mean(0), exact, rtol=0.1, atol=0.02)
    layer = nn.Sequential(nn.Linear(4, 3)).double()
    one, two = (fisher_diagonal(layer, data.inputs, "sampled", seed=1) for _ in range(2))
    torch.testing.assert_close(one, two)


def test_a_fisher_of_a_few_samples_is_that_of_samples_of_the_data():
    data = a_problem(4, n=30)
    each = [
        linear_fisher(dataclasses.replace(data, inputs=data.inputs[[i]], labels=data.labels[[i]]))
        for i in range(30)
    ]
    one = linear_fisher(data, seed=3, samples=1)
    assert sum(bool(torch.allclose(one, other)) for other in each) == 1
    assert not torch.allclose(one, linear_fisher(data, seed=4, samples=1))
    torch.testing.assert_close(linear_fisher(data, samples=30), torch.stack(each).mean(0))


def test_axes_follow_equation_5():
    """Equal F give a ball; F of (1, 2, 100) with c = 0.1 gives (1, 1/2, 0.1); F = 0 gives 1."""
    assert relative_axes(torch.full((4,), 3.0)).tolist() == [1.0] * 4
    expected = torch.tensor([1.0, 0.5, 0.1, 1.0])
    torch.testing.assert_close(relative_axes(torch.tensor([1.0, 2.0, 100.0, 0.0])), expected)
    assert relative_axes(torch.zeros(2)).tolist() == [1.0, 1.0]
    for fisher, floor in ((torch.ones(2), 1.5), (torch.tensor([-1.0]), 0.1)):
        with pytest.raises(ValueError, match="expected"):
            relative_axes(fisher, floor)


def test_damped_axes_are_those_of_the_released_code():
    """1/(F + 1e-5), divided by the largest, at least 0.1: in NumPy, weight by weight."""
    fisher = np.array([0.0, 1e-6, 1e-5, 4e-5, 8.9e-5, 9.1e-5, 0.3])
    inverse = 1 / (np.abs(fisher) + 1e-5)
    expected = np.maximum(0.1, inverse / inverse.max())
    axes = relative_axes(torch.from_numpy(fisher), 0.1, DAMPING)
    np.testing.assert_allclose(axes.numpy(), expected, rtol=1e-12)
    # Without a dead pixel the least F plus the damping has the full length.
    axes = relative_axes(torch.tensor([2e-5, 5e-5]), 0.1, DAMPING)
    torch.testing.assert_close(axes, torch.tensor([1.0, 0.5]))
    for damping in (-1e-9, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="damping: expected a finite number of at least 0"):
            relative_axes(torch.ones(2), 0.1, damping)


def test_without_damping_one_tiny_fisher_makes_the_ellipsoid_a_ball():
    """Hundreds of weights that matter by 1e-4 and one by 1e-9: all axes but one on the floor."""
    fisher = torch.full((500,), 3e-5)
    fisher[0] = 1e-9
    assert int((relative_axes(fisher) > 0.1).sum()) == 1
    assert relative_axes(fisher, damping=DAMPING)[1:].min() > 0.24
    ball = build_ball(a_problem(8), Quality(0.5), "sampled", directions=50)
    flat = torch.full_like(linear_fisher(a_problem(8)), 1.0)
    flat[0] = 1e-9
    options = {"method": "sampled", "fisher": flat, "directions": 50}
    space = build_ellipsoid(a_problem(8), Quality(0.5), damping=0.0, **options)
    # One axis of many is long, so that R is nearly ten times the ball's, and the rest its radius.
    assert np.median(space.radii) == pytest.approx(ball.radius.value, rel=0.5)
    damped = build_ellipsoid(a_problem(8), Quality(0.5), damping=1e3, **options)
    assert damped.radii.min() == pytest.approx(ball.radius.value, rel=1e-2)


def test_an_ellipsoid_is_longest_where_the_model_is_least_sensitive():
    data = a_problem(8)
    space = build_ellipsoid(data, Quality(0.5), "sampled", directions=50, floor=0.2)
    fisher = linear_fisher(data).numpy()
    assert np.argmax(space.radii) == np.argmin(fisher)
    assert space.radii.max() == pytest.approx(space.radius.value, rel=1e-6)
    assert space.radii.min() >= 0.2 * space.radius.value * (1 - 1e-6)
    searched = build_ellipsoid(data, Quality(0.5), "bisection", directions=20)
    assert searched.radius.method == "bisection"
