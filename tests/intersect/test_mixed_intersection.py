"""Ellipsoids, cones and sets of balls: verdicts confirmed by an independent solver."""

import itertools

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from gems_flwr.intersect.balls import intersect_balls
from gems_flwr.intersect.intersect import intersect
from gems_flwr.intersect.mixed import intersect_convex
from gems_flwr.intersect.unions import intersect_unions
from gems_flwr.spaces.ball import BallSet, BallSpace
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import FullCovariance
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius

R = Radius(1.0, "worst")


def a_cone(seed, epsilon, spread=1.0, labels=(0, 1)):
    rng = np.random.default_rng(seed)
    components = len(labels)
    roots = rng.normal(size=(components, 2, 2)) * spread
    return ClassMomentCone(
        num_classes=3,
        labels=np.array(labels),
        counts=np.full(components, 40),
        means=rng.normal(size=(components, 2)) * 2,
        covariance=FullCovariance(roots @ roots.transpose(0, 2, 1) + 0.01 * np.eye(2)),
        epsilon=epsilon,
    )


def cone_constraints(cone, w, slack):
    """Return the cone's constraints on a flat cvxpy variable, each off by ``slack``."""
    weight, bias = cp.reshape(w[:6], (3, 2), order="C"), w[6:]
    out = []
    for component, c in enumerate(cone.labels):
        root = np.real(sqrtm(cone.covariance.dense_matrix(component)))
        mean = np.asarray(cone.means)[component].astype(float)
        for j in set(range(3)) - {int(c)}:
            step = weight[int(c)] - weight[j]
            spread = cone.kappa * cp.norm(root @ step)
            out.append(spread - step @ mean - bias[int(c)] + bias[j] <= slack)
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(2, 6), st.sampled_from([1, 2, 3, 15]), st.floats(0.3, 3.0)
)
def test_the_verdict_on_ellipsoids_is_that_of_an_independent_solver(seed, count, dimension, size):
    rng = np.random.default_rng(seed)
    spaces = [
        EllipsoidSpace(rng.normal(size=dimension), size * rng.uniform(0.2, 1.5, dimension), R)
        for _ in range(count)
    ]
    spaces[0] = BallSpace(spaces[0].center, Radius(size, "worst"))
    w, t = cp.Variable(dimension), cp.Variable()
    levels = [
        cp.sum_squares(
            (w - s.center.astype(float)) / (s.radii.astype(float) if s.kind != "ball" else size)
        )
        for s in spaces
    ]
    problem = cp.Problem(cp.Minimize(t), [level - 1 <= t for level in levels])
    problem.solve(solver=cp.CLARABEL)
    truth = float(problem.value)
    for select in ("first", "margin"):
        result = intersect(spaces, select)
        if abs(truth) > 1e-6:
            assert result.status == ("empty" if truth > 0 else "feasible")
        assert result.feasible == all(s.contains(result.point) for s in spaces)
    assert result.lower_bound <= truth + 1e-6 * (1 + abs(truth))
    assert result.upper_bound >= truth - 1e-6 * (1 + abs(truth)) or result.feasible
    if truth < -1e-6:
        assert max(level.value - 1 for level in levels) == pytest.approx(truth, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 4.0), st.floats(0.55, 0.95), st.booleans())
def test_the_verdict_on_a_cone_and_a_ball_is_that_of_an_independent_solver(
    seed, size, epsilon, second
):
    """The smallest slack by which all constraints must give is positive iff there is no point."""
    rng = np.random.default_rng(seed)
    cone = a_cone(seed, epsilon)
    ball = BallSpace(rng.normal(size=9), Radius(size, "worst"))
    spaces = [cone, ball]
    if second:
        spaces.append(EllipsoidSpace(rng.normal(size=9), size * rng.uniform(0.5, 2, 9), R))
    w, t = cp.Variable(9), cp.Variable()
    constraints = cone_constraints(cone, w, t)
    constraints.append(cp.norm(w - ball.center.astype(float)) <= size + t)
    if second:
        radii, center = (a.astype(float) for a in (spaces[2].radii, spaces[2].center))
        constraints.append(cp.norm((w - center) / radii) <= 1 + t)
    problem = cp.Problem(cp.Minimize(t), constraints)
    problem.solve(solver=cp.CLARABEL)
    truth = float(problem.value)
    result = intersect(spaces, "first")
    if result.feasible:
        assert truth <= 1e-6
        assert all(s.contains(result.point) for s in spaces)
    if result.empty:
        assert truth >= -1e-6
    if abs(truth) > 1e-2:
        assert result.status == ("empty" if truth > 0 else "feasible")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.55, 0.99), st.floats(0.2, 3.0))
def test_the_verdict_on_cones_alone_is_that_of_an_independent_solver(seed, epsilon, spread):
    """Cones always share the zero layer; what counts is a point strictly inside."""
    cones = [a_cone(seed, epsilon, spread), a_cone(seed + 1, epsilon, spread, labels=(1, 2))]
    w, t = cp.Variable(9), cp.Variable()
    constraints = [c for cone in cones for c in cone_constraints(cone, w, t)]
    problem = cp.Problem(cp.Minimize(t), [*constraints, cp.norm(w) <= 1])
    problem.solve(solver=cp.CLARABEL)
    depth = -float(problem.value)
    result = intersect_convex(cones, "margin")
    assert not result.is_average
    if depth > 1e-3:
        assert result.feasible
        assert all(cone.contains(result.point) for cone in cones)
    if result.empty:
        assert depth < 1e-4


def test_without_time_there_is_no_verdict():
    """One round of cuts does not decide two narrow cones; the answer says so."""
    cones = [a_cone(2, 0.95, 2.0), a_cone(3, 0.95, 2.0, labels=(1, 2))]
    assert intersect_convex(cones, "margin", limit_seconds=0.0).status == "undecided"


def union_truth(sets):
    """Return whether any choice of one ball per set meets, by trying all of them."""
    return any(intersect_balls(list(c)).feasible for c in itertools.product(*sets))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.floats(0.3, 1.5))
def test_the_search_over_sets_finds_what_trying_all_choices_finds(seed, nodes, size):
    rng = np.random.default_rng(seed)
    sets = [
        tuple(
            BallSpace(rng.normal(size=2) * 2, Radius(size * rng.uniform(0.5, 1.5), "growing"))
            for _ in range(rng.integers(1, 4))
        )
        for _ in range(nodes)
    ]
    spaces = [BallSet(balls) for balls in sets]
    result = intersect(spaces)
    assert result.status == ("feasible" if union_truth(sets) else "empty")
    if result.feasible:
        assert all(s.contains(result.point) for s in spaces)
        for index, balls in zip(result.choice, sets, strict=True):
            assert balls[index].contains(result.point)
    np.testing.assert_allclose(
        result.margins,
        [sets[k][i].margin(result.point) for k, i in enumerate(result.choice)],
        atol=1e-9,
    )


def test_a_retrained_ball_makes_the_difference():
    """2018: no intersection at first; the second round's ball of node 1 meets node 0's."""
    one = BallSet((BallSpace([0.0, 0.0], R),))
    two = BallSet((BallSpace([5.0, 0.0], R),))
    assert intersect([one, two]).empty
    result = intersect([one, two.add(BallSpace([1.5, 0.0], R))])
    assert result.feasible
    assert result.choice == (0, 1)


def test_a_search_that_runs_out_of_budget_is_undecided():
    corners = [[0, 0], [2, 0], [1, np.sqrt(3)], [1, 0.6]]
    far = [BallSet((BallSpace(c, Radius(1.05, "worst")),) * 3) for c in corners]
    assert intersect_unions(far).empty
    assert intersect_unions(far, budget=1).status == "undecided"


def test_sets_and_ellipsoids_mix():
    sets = BallSet((BallSpace([9.0, 9.0], R), BallSpace([0.0, 0.5], R)))
    result = intersect([sets, EllipsoidSpace([0.0, 0.0], [0.5, 0.5], R)])
    assert result.feasible
    assert result.choice == (1, 0)
