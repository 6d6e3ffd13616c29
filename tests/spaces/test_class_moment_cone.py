"""Class-moment cones: margins, membership, distance, int8, and what they refuse."""

import dataclasses

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.cone import ClassMomentCone, kappa
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance, QuantizedArray, quantize
from gems_flwr.spaces.output_layer import flatten_linear


def a_cone(seed=0, classes=3, features=2, epsilon=0.8, **changes):
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(classes, features, features))
    fields = {
        "num_classes": classes,
        "labels": np.arange(classes),
        "counts": np.full(classes, 50),
        "means": rng.normal(size=(classes, features)) * 3,
        "covariance": FullCovariance(roots @ roots.transpose(0, 2, 1)),
        "epsilon": epsilon,
    }
    return ClassMomentCone(**(fields | changes))


def test_margins_are_those_of_the_definition():
    """One class with mean (2, 0) and covariance diag(4, 1), W = [[1, 0], [0, 0]], b = [1, 0].

    m = (1, 0).(2, 0) + 1 = 3, v = 4, so t = 3 / 2; the normal quantile of 0.9 is 1.28.
    """
    cone = ClassMomentCone(
        2, [0], [10], [[2.0, 0.0]], FullCovariance(np.diag([4.0, 1.0])[None]), epsilon=0.9
    )
    w = flatten_linear([[1, 0], [0, 0]], [1, 0])
    margins = cone.margins(w)
    assert margins.mean[0, 0] == pytest.approx(3)
    assert margins.deviation[0, 0] == pytest.approx(2)
    assert cone.contains(w)
    # 1.645 deviations for 95 in a hundred are more than the margin of 1.5.
    assert not dataclasses.replace(cone, epsilon=0.95).contains(w)


def test_the_zero_layer_is_never_good_enough():
    cone = a_cone(epsilon=0.5)
    assert not cone.contains(np.zeros(cone.dimension))


def test_kappa_is_the_normal_quantile():
    assert kappa(0.5) == pytest.approx(0)
    assert kappa(0.975) == pytest.approx(1.959964)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
@example(379)  # where scipy's nnls returns another solution than it reports
def test_the_distance_to_a_cone_is_that_of_an_independent_solver(seed):
    cone = a_cone(seed, epsilon=0.7)
    rng = np.random.default_rng(seed + 1)
    w = rng.normal(size=cone.dimension)
    weight, bias = cp.Variable((3, 2)), cp.Variable(3)
    constraints = []
    for c in range(3):
        root = np.real(sqrtm(cone.covariance.dense_matrix(c)))
        for j in set(range(3)) - {c}:
            step = weight[c] - weight[j]
            mean = step @ np.asarray(cone.means)[c].astype(float) + bias[c] - bias[j]
            constraints.append(cone.kappa * cp.norm(root @ step) <= mean)
    flat = cp.hstack([cp.vec(weight.T, order="F"), bias])
    problem = cp.Problem(cp.Minimize(cp.norm(flat - w)), constraints)
    problem.solve(solver=cp.CLARABEL)
    assert cone.distance(w) == pytest.approx(problem.value, abs=1e-4)
    if cone.contains(w):
        assert cone.distance(w) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_int8_is_off_by_at_most_half_a_step(seed, round_up):
    rng = np.random.default_rng(seed)
    values = np.abs(rng.normal(size=(3, 40))) * 10.0 ** rng.integers(-6, 6)
    stored = quantize(values, axis=1, round_up=round_up)
    step = values.max(axis=1, keepdims=True) / 127
    error = stored.dense() - values
    assert np.all(np.abs(error) <= (1.0 if round_up else 0.5) * step * (1 + 1e-4))
    if round_up:
        assert np.all(error >= -1e-5 * step)
    assert stored.nbytes == values.size + 3 * 4


def test_int8_keeps_zero():
    stored = quantize(np.zeros((2, 3)), axis=1)
    assert np.array_equal(stored.dense(), np.zeros((2, 3)))


def test_low_rank_gives_the_same_margins_as_its_dense_matrix():
    rng = np.random.default_rng(3)
    low = LowRankCovariance(rng.normal(size=(3, 2, 1)), rng.uniform(0, 1, (3, 2)))
    full = FullCovariance(np.stack([low.dense_matrix(e) for e in range(3)]))
    w = rng.normal(size=9)
    one = a_cone(covariance=low).margins(w).deviation
    other = a_cone(covariance=full).margins(w).deviation
    np.testing.assert_allclose(one, other, rtol=1e-5)


SKEW = np.array([[[1.0, 2.0], [0.0, 1.0]]] * 3)
INDEFINITE = np.array([[[1.0, 2.0], [2.0, 1.0]]] * 3)
INT8 = np.zeros((2, 2), dtype=np.int8)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: FullCovariance(SKEW), "matrices[0]"),
        (lambda: FullCovariance(INDEFINITE), "matrices[0]"),
        (lambda: FullCovariance(np.full((1, 2, 2), np.nan)), "matrices"),
        (lambda: FullCovariance(np.ones((2, 2))), "matrices"),
        (lambda: LowRankCovariance(np.ones((1, 2, 1)), -np.ones((1, 2))), "deviations"),
        (lambda: LowRankCovariance(np.ones((1, 2, 1)), np.ones((1, 3))), "deviations"),
        (lambda: a_cone(labels=[0, 1, 3]), "labels"),
        (lambda: a_cone(labels=[0, 1, -1]), "labels"),
        (lambda: a_cone(labels=[0.0, 1.0, 2.0]), "labels"),
        (lambda: a_cone(withheld=(7,)), "labels"),
        (lambda: a_cone(counts=[1, 2]), "counts"),
        (lambda: a_cone(counts=[1, 2, 0]), "counts"),
        (lambda: a_cone(total_count=151), "total_count"),
        (lambda: a_cone(means=np.full((3, 2), 1e9)), "means"),
        (lambda: a_cone(means=np.ones((3, 3))), "means"),
        (lambda: a_cone(epsilon=0.4), "epsilon"),
        (lambda: a_cone(num_classes=1), "num_classes"),
        (lambda: a_cone(privacy=(-1.0, 0.1)), "dp_epsilon"),
        (lambda: a_cone().margin(np.zeros(4)), "w"),
        (lambda: QuantizedArray(np.zeros((2, 2)), np.ones((2, 1))), "codes"),
        (lambda: QuantizedArray(INT8, np.ones((3, 1))), "scales"),
        (lambda: QuantizedArray(INT8, -np.ones((2, 1))), "scales"),
    ],
)
def test_malformed_cones_are_refused_by_key(build, key):
    with pytest.raises(SpaceError, match="expected") as caught:
        build()
    assert caught.value.key == key
