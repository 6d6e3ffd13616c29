"""The intersection of balls: verdicts confirmed by an independent solver, closed forms."""

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.intersect.balls import intersect_balls
from gems_flwr.intersect.equation2 import descend_equation2
from gems_flwr.intersect.intersect import intersect
from gems_flwr.intersect.mixed import intersect_convex
from gems_flwr.intersect.simplex import maximise_on_simplex, project_to_simplex
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.radius import Radius


def ball(center, radius):
    return BallSpace(np.asarray(center, dtype=np.float32), Radius(float(radius), "worst"))


def random_balls(seed, count=5, dimension=3, size=1.0):
    rng = np.random.default_rng(seed)
    radii = rng.uniform(0.5, 1.5, count) * size
    return [ball(rng.normal(size=dimension), r) for r in radii]


def smallest_violation(balls):
    """Return min_w max_k |w - c_k| - r_k by an interior-point solver."""
    w, t = cp.Variable(balls[0].dimension), cp.Variable()
    constraints = [cp.norm(w - b.center.astype(float)) <= b.radius.value + t for b in balls]
    problem = cp.Problem(cp.Minimize(t), constraints)
    problem.solve(solver=cp.CLARABEL)
    return float(problem.value)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(2, 8), st.sampled_from([1, 2, 3, 20]), st.floats(0.3, 2.5)
)
def test_the_verdict_is_that_of_an_independent_solver(seed, count, dimension, size):
    balls = random_balls(seed, count, dimension, size)
    truth = smallest_violation(balls)
    for select in ("first", "margin"):
        result = intersect_balls(balls, select)
        if abs(truth) > 1e-6:
            assert result.status == ("empty" if truth > 0 else "feasible")
        if result.feasible:
            assert all(b.contains(result.point) for b in balls)
        if result.empty:
            assert result.lower_bound > 0
        assert result.lower_bound <= result.upper_bound + 1e-9
        np.testing.assert_allclose(result.margins, [b.margin(result.point) for b in balls])
    # Deepest point, or least violating one: the same number as the other solver's.
    assert -min(result.margins) == pytest.approx(truth, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 2.0))
def test_the_papers_descent_never_contradicts_the_proof(seed, size):
    balls = random_balls(seed, size=size)
    proof, descent = intersect_balls(balls), descend_equation2(balls, steps=300)
    assert not (proof.empty and descent.feasible)
    assert not descent.empty
    if descent.is_average and descent.feasible:
        assert proof.is_average


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 2.0))
def test_a_solver_that_fails_never_makes_a_verdict_wrong(seed, size):
    """Whatever multipliers come back, only the bounds they give decide."""
    balls = random_balls(seed, size=size)
    truth = smallest_violation(balls)
    rng = np.random.default_rng(seed)

    def poor(linear, gram, start=None, stop=None):
        return rng.dirichlet(np.ones(len(linear))), 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gems_flwr.intersect.balls.maximise_on_simplex", poor)
        for select in ("first", "margin"):
            result = intersect_balls(balls, select)
            assert not result.empty or truth > -1e-6
            assert not result.feasible or truth < 1e-6
            assert result.lower_bound <= result.upper_bound


def test_three_balls_can_meet_in_pairs_only():
    """Corners of a triangle of side 2, radius 1.05: pairs overlap, but the centre is 1.155 away."""
    corners = [[0, 0], [2, 0], [1, np.sqrt(3)]]
    balls = [ball(c, 1.05) for c in corners]
    for i in range(3):
        assert intersect_balls(balls[:i] + balls[i + 1 :]).feasible
    result = intersect_balls(balls)
    assert result.empty
    # At equal radii the optimum is the circumcentre: 4/3 - 1.05^2.
    exact = intersect_balls(balls, "margin")
    assert exact.lower_bound == pytest.approx(4 / 3 - 1.05**2, rel=1e-5)
    assert exact.gap == pytest.approx(0, abs=1e-6)
    assert min(exact.margins) == pytest.approx(1.05 - 2 / np.sqrt(3), rel=1e-5)


def test_two_balls_have_the_closed_form_of_2018():
    """Centres 0 and 3, radii 2 and 1: (0 * 1 + 3 * 2) / 3 = 2, touching both."""
    one, two = ball([0, 0], 2), ball([3, 0], 1)
    result = intersect_balls([one, two], "margin")
    np.testing.assert_allclose(result.point, [2, 0], atol=1e-6)


def test_the_average_is_called_so():
    near = [ball([0, 0], 3), ball([1, 0], 3)]
    result = intersect(near)
    assert result.feasible
    assert result.is_average
    np.testing.assert_allclose(result.point, [0.5, 0])
    # A small ball far from the mean: the average is outside of it.
    far = [ball([0, 0], 0.1), ball([1, 0], 3), ball([2, 0], 3)]
    result = intersect(far)
    assert result.feasible
    assert not result.is_average
    # First feasible point on the way from (1, 0): the ball's edge at 0.1, within rounding.
    assert result.point[0] == pytest.approx(0.1, abs=1e-6)
    assert min(result.margins) >= 0


def test_points_equal_centres_and_single_balls_are_no_problem():
    assert intersect([ball([1, 2], 0)]).feasible
    same = [ball([1, 2], 0)] * 3
    assert intersect(same).feasible
    assert intersect([*same, ball([1, 2.5], 0.2)]).empty
    assert intersect_balls([ball([1, 2], r) for r in (1, 2, 3)], "margin").feasible
    tangent = intersect([ball([0, 0], 1), ball([2, 0], 1)])
    assert not tangent.empty


def test_a_thousand_nodes_are_decided():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(1000, 300))
    for factor, status in ((0.9, "empty"), (1.1, "feasible")):
        balls = [ball(c, factor * np.sqrt(300)) for c in centers]
        result = intersect_balls(balls, "margin")
        assert result.status == status
        assert result.gap <= 1e-6 * 300


def test_balls_are_quadratics_too():
    for seed in range(10):
        balls = random_balls(seed, size=1.2)
        assert intersect_convex(balls).status == intersect_balls(balls).status


def test_malformed_calls_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        intersect([])
    with pytest.raises(ValueError, match="at least one"):
        intersect_balls([])
    with pytest.raises(ValueError, match="dimension"):
        intersect([ball([0], 1), ball([0, 0], 1)])
    with pytest.raises(ValueError, match="select"):
        intersect([ball([0], 1)], "nearest")
    with pytest.raises(ValueError, match="only cones"):
        intersect([ball([0], 1)], "objective")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_the_simplex_solver_satisfies_its_optimality_conditions(seed, count, rank):
    """At the maximum no coordinate's slope exceeds the weighted mean of all slopes."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(count, rank))
    linear, gram = rng.normal(size=count), root @ root.T
    x, _ = maximise_on_simplex(linear, gram)
    assert x.sum() == pytest.approx(1)
    assert x.min() >= 0
    slope = linear - 2 * gram @ x
    assert slope.max() - slope @ x <= 1e-8 * (1 + np.abs(gram).max())


def test_projection_to_the_simplex():
    """(1, 0.5) goes to (0.75, 0.25): subtract 1/4 from both; (3, 0) to the corner."""
    np.testing.assert_allclose(project_to_simplex(np.array([1.0, 0.5])), [0.75, 0.25])
    np.testing.assert_allclose(project_to_simplex(np.array([3.0, 0.0])), [1, 0])
