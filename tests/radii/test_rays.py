"""Exact radii along rays against dense grids and against the papers' searches."""

import numpy as np
import pytest
import torch
from helpers_construct import a_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.radii import layer_data as layer_module
from gems_flwr.radii.layer_data import LayerData, random_directions
from gems_flwr.radii.layer_radius import find_radius, good_enough
from gems_flwr.radii.quality import Quality, required_correct
from gems_flwr.radii.rays import accuracy_curve, loss_radius
from gems_flwr.radii.search import bisect_radius, grow_radius

SHAPES = st.sampled_from([(3, True), (2, True), (1, True), (4, False), (1, False)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), SHAPES, st.booleans(), st.floats(0.1, 0.95))
def test_the_exact_ray_is_where_a_dense_grid_first_fails(seed, shape, axes, epsilon):
    data = a_problem(seed, outputs=shape[0], bias=shape[1], axes=axes)
    quality = Quality(epsilon)
    good = good_enough(data, quality)
    center = data.center.astype(np.float64)
    directions = next(iter(random_directions(data, 3, seed))).double()
    for u in directions:
        try:
            radius = accuracy_curve(data, [u[None]]).radius(epsilon)
        except NotGoodEnoughError:
            assert not good(center)
            return
        grid = np.linspace(0, min(radius, 12) * (1 - 1e-7), 400)
        assert all(good(center + r * u.numpy()) for r in grid)
        if np.isfinite(radius):
            assert not good(center + radius * (1 + 1e-7) * u.numpy())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 0.9))
def test_bisection_and_growing_end_at_the_exact_ray(seed, epsilon):
    """No sample is wrong at the centre here, so accuracy only falls and there is one crossing."""
    data = a_problem(seed)
    scores, _ = data.scores()
    data = LayerData(data.weight, data.bias, data.inputs, scores.argmax(1))
    directions = next(iter(random_directions(data, 5, seed))).double()
    exact = accuracy_curve(data, [directions]).radius(epsilon)
    good = good_enough(data, Quality(epsilon))
    given_ = {"directions": directions.numpy().astype(np.float32), "samples": 5}
    found = bisect_radius(
        good, data.center, epsilon=epsilon, largest=64.0, tolerance=1e-3, **given_
    )
    assert found.method == "bisection"
    if exact < 60:
        assert exact - 2e-3 <= found.value <= exact * (1 + 1e-5)
        grown = grow_radius(good, data.center, epsilon=epsilon, first=0.05, step=0.05, **given_)
        assert exact - 0.05 - 1e-5 <= grown.value <= exact * (1 + 1e-5)


@settings(max_examples=25, deadline=None)
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
    curve = accuracy_curve(data, [ray])
    assert curve.radius(0.5) == pytest.approx(0.75)
    more = LayerData(
        data.weight,
        data.bias,
        torch.tensor([[1.0], [1.0], [0.1], [0.1]]),
        torch.tensor([0, 1, 0, 1]),
    )
    # x = 0.1: class 0 scores 0.1 (1 - R), class 1 R - 0.5; they cross at R = 6 / 11, so that
    # the fourth has become right, and the third wrong, before the first is lost at 0.75.
    assert accuracy_curve(more, [ray]).radius(0.5) == pytest.approx(6 / 11)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([3, 1]), st.floats(0.05, 1.0))
def test_the_loss_crosses_epsilon_at_the_loss_radius(seed, outputs, room):
    data = a_problem(seed, outputs=outputs)
    scores, y = data.scores()
    quality = Quality(Quality(1.0, "loss").score(scores, y) + room, "loss")
    directions = list(random_directions(data, 7, seed, chunk=3))
    radius = loss_radius(data, directions, quality, largest=1e4)
    good = good_enough(data, quality)
    center = data.center.astype(np.float64)
    rays = torch.cat(directions).double().numpy()
    assert all(good(center + radius * (1 - 1e-5) * u) for u in rays)
    if radius < 1e4:
        assert not all(good(center + radius * (1 + 1e-4) * u) for u in rays)


def test_chunks_change_nothing(monkeypatch):
    data = a_problem(5, n=300)
    whole = find_radius(data, Quality(0.6), "sampled", directions=40, seed=3)
    loss = find_radius(data, Quality(2.0, "loss"), "sampled", directions=40, seed=3)
    monkeypatch.setattr(layer_module, "CHUNK_BYTES", 2000)
    again = find_radius(data, Quality(0.6), "sampled", directions=40, seed=3)
    assert again.value == pytest.approx(whole.value, rel=1e-9)
    loss_again = find_radius(data, Quality(2.0, "loss"), "sampled", directions=40, seed=3)
    assert loss_again.value == pytest.approx(loss.value, rel=1e-6)
    assert whole.directions == 40


def test_required_correct_rounds_up_but_not_on_rounding_errors():
    assert required_correct(0.7, 10) == 7
    assert required_correct(0.71, 10) == 8
    assert required_correct(0.4, 1000) == 400


@pytest.mark.parametrize("method", ["sampled", "worst", "certified", "bisection", "growing"])
def test_a_centre_that_is_not_good_enough_has_no_radius(method):
    data = a_problem(0)
    with pytest.raises(NotGoodEnoughError, match="reaches"):
        find_radius(data, Quality(1.0), method)
    with pytest.raises(NotGoodEnoughError, match="loss"):
        find_radius(data, Quality(1e-6, "loss"), method)


def test_searches_stop_at_the_largest_radius():
    center = np.zeros(3, dtype=np.float32)
    grown = grow_radius(lambda w: True, center, epsilon=0.1, largest=1.0, samples=2)
    assert grown.value == pytest.approx(1.0)
    found = bisect_radius(lambda w: True, center, epsilon=0.1, largest=1.0, samples=2)
    assert 0.98 <= found.value <= 1.0
    nothing = grow_radius(lambda w: not w.any(), center, epsilon=0.1, samples=2)
    assert nothing.value == 0.0
    with pytest.raises(ValueError, match="centre"):
        bisect_radius(lambda w: False, center, epsilon=0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda d: LayerData(d.weight[0], d.bias, d.inputs, d.labels),
        lambda d: LayerData(d.weight, d.bias, d.inputs[:, :2], d.labels),
        lambda d: LayerData(d.weight, d.bias, d.inputs, d.labels[:3]),
        lambda d: LayerData(d.weight, d.bias, d.inputs, d.labels + 9),
        lambda d: LayerData(d.weight, d.bias, d.inputs, d.labels, torch.ones(2)),
        lambda d: Quality(1.2),
        lambda d: Quality(0.5, "luck"),
        lambda d: accuracy_curve(d, []),
    ],
)
def test_malformed_problems_are_refused(build):
    with pytest.raises(ValueError, match="expected"):
        build(a_problem(0))
