"""Balls and ellipsoids: membership, distance, curves, what they refuse, and where they meet."""

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gems_flwr.bounds import MAX_CURVE_POINTS
from gems_flwr.errors import EmptyIntersectionError, SpaceError
from gems_flwr.spaces import aggregate_spaces, intersect, largest_epsilon
from gems_flwr.spaces.ball import (
    BallSpace,
    EllipsoidSpace,
    Radius,
    intersect_balls,
    maximise_on_simplex,
    required_correct,
    thin_curve,
)

R = Radius(2.0, "certified", 0.9, 12)


def ball(center, radius):
    return BallSpace(np.asarray(center, dtype=np.float32), Radius(float(radius), "certified"))


def random_balls(seed, count=5, dimension=3, size=1.0):
    rng = np.random.default_rng(seed)
    radii = rng.uniform(0.5, 1.5, count) * size
    return [ball(rng.normal(size=dimension), r) for r in radii]


def curved(center, shape="ball"):
    """Radius 10 (1 - epsilon), in steps of 0.01."""
    curve = 10 * np.linspace(1, 0, 101)
    radius = Radius(5.0, "certified", 0.5)
    if shape == "ball":
        return BallSpace(np.array(center), radius, curve)
    return EllipsoidSpace(np.array(center), np.full(2, 5.0), radius, curve)


# --- the sets ---------------------------------------------------------------------------------


def test_a_ball_measures_euclidean_distance():
    """(3, 4) is 5 from the origin, so 3 from the ball of radius 2."""
    space = BallSpace(np.zeros(2), R)
    assert space.distance([3, 4]) == pytest.approx(3)
    assert space.margin([0, 1]) == pytest.approx(1)
    assert space.contains([0, 2])
    assert not space.contains([0, 2.001])
    assert space.size_bytes == 2 * 4 + 8
    with pytest.raises(ValueError, match="read-only"):
        space.center[0] = 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_the_distance_to_an_ellipsoid_is_that_of_an_independent_solver(seed):
    rng = np.random.default_rng(seed)
    space = EllipsoidSpace(rng.normal(size=4), rng.uniform(0.2, 2, 4), R)
    w = rng.normal(size=4) * 3
    center, radii = space.center.astype(float), space.radii.astype(float)
    inside = {"type": "ineq", "fun": lambda u: 1 - (((u - center) / radii) ** 2).sum()}
    nearest = minimize(
        lambda u: ((u - w) ** 2).sum(),
        center,
        constraints=[inside],
        options={"maxiter": 500, "ftol": 1e-14},
    )
    assert space.distance(w) == pytest.approx(np.sqrt(nearest.fun), abs=2e-5)
    assert space.contains(w) == (space.distance(w) == 0)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Radius(float("nan"), "certified"), "radius"),
        (lambda: Radius(1e9, "certified"), "radius"),
        (lambda: Radius(1.0, "guessed"), "radius.method"),
        (lambda: Radius("1", "certified"), "radius"),
        (lambda: BallSpace(np.zeros(0), R), "center"),
        (lambda: BallSpace(np.array([np.nan]), R), "center"),
        (lambda: BallSpace(np.array(["a"]), R), "center"),
        (lambda: BallSpace(np.zeros(2), 1.0), "radius"),
        (lambda: BallSpace(np.zeros(2), R, np.ones(1)), "curve"),
        (lambda: BallSpace(np.zeros(2), R, np.array([1.0, 2.0])), "curve"),
        (lambda: BallSpace(np.zeros(2), R, np.array([1.0, -1.0])), "curve"),
        (lambda: BallSpace(np.zeros(2), R, np.linspace(1, 0, MAX_CURVE_POINTS + 1)), "curve"),
        (lambda: EllipsoidSpace(np.zeros(2), np.array([1.0, 0.0]), R), "radii"),
        (lambda: EllipsoidSpace(np.zeros(2), np.ones(3), R), "radii"),
        (lambda: BallSpace(np.zeros(2), R).distance([1.0]), "w"),
    ],
)
def test_malformed_spaces_are_refused_by_key(build, key):
    with pytest.raises(SpaceError, match=r"expected .* got") as caught:
        build()
    assert caught.value.key == key


# --- curves -----------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.floats(0.001, 1.0), st.integers(0, 2**32 - 1))
def test_a_thinned_curve_never_promises_more_than_the_whole_one(count, epsilon, seed):
    rng = np.random.default_rng(seed)
    radii = np.sort(rng.exponential(size=count + 1))[::-1].copy()
    thin = thin_curve(radii)
    assert len(thin) <= MAX_CURVE_POINTS
    space = BallSpace(np.zeros(3), Radius(1.0, "sampled"), thin).at(epsilon)
    assert space.radius.value <= radii[required_correct(epsilon, count)]


def test_a_short_curve_is_sent_as_it_is_and_infinity_becomes_large():
    thin = thin_curve(np.array([np.inf, 3.0, 2.0, 0.0]))
    assert thin.tolist() == [1e6, 3.0, 2.0, 0.0]


def test_a_space_for_another_epsilon_keeps_centre_shape_and_method():
    curve = np.array([5.0, 4.0, 2.0, 1.0, 0.0], np.float32)
    radius = Radius(2.0, "certified", 0.5, 7)
    whole = BallSpace(np.ones(2), radius, curve)
    assert whole.largest_epsilon == 0.75
    assert whole.at(0.75).radius == Radius(1.0, "certified", 0.75, 7)
    ellipsoid = EllipsoidSpace(np.ones(2), np.array([2.0, 0.5]), radius, curve).at(0.25)
    assert ellipsoid.radii.tolist() == [4.0, 1.0]


@pytest.mark.parametrize("shape", ["ball", "ellipsoid"])
def test_the_largest_epsilon_is_where_the_spaces_just_meet(shape):
    """Centres 8 apart meet while 2 · 10 (1 - epsilon) >= 8: up to epsilon = 0.6."""
    spaces = [curved([0.0, 0.0], shape), curved([8.0, 0.0], shape)]
    found, epsilon = largest_epsilon(spaces)
    assert epsilon == pytest.approx(0.6, abs=0.011)
    assert found.feasible
    # The point and its margins belong to that epsilon, not to one on the way.
    for space, margin in zip(spaces, found.margins, strict=True):
        assert space.at(epsilon).contains(found.point)
        assert margin == pytest.approx(space.at(epsilon).margin(found.point))
    assert aggregate_spaces(spaces, auto_epsilon=True).epsilon == epsilon


def test_what_to_do_with_an_empty_intersection():
    spaces = [curved([0.0, 0.0]), curved([12.0, 0.0])]
    least = aggregate_spaces(spaces)
    assert least.intersection.empty
    assert least.epsilon is None
    assert least.point == pytest.approx([6.0, 0.0], abs=1e-6)
    relaxed = aggregate_spaces(spaces, auto_epsilon=True)
    assert relaxed.intersection.feasible
    assert relaxed.epsilon == pytest.approx(0.4, abs=0.011)
    with pytest.raises(EmptyIntersectionError, match="2 spaces is proved to be empty"):
        aggregate_spaces(spaces, on_empty="fail")
    never, epsilon = largest_epsilon([curved([0.0, 0.0]), curved([50.0, 0.0])])
    assert never.empty
    assert epsilon == pytest.approx(0.01)
    with pytest.raises(ValueError, match="radius curves of all 2 spaces, 1 have one"):
        largest_epsilon([curved([0.0, 0.0]), ball([0, 0], 1)])


# --- where balls meet -------------------------------------------------------------------------


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
def test_the_verdict_on_balls_is_that_of_an_independent_solver(seed, count, dimension, size):
    balls = random_balls(seed, count, dimension, size)
    truth = smallest_violation(balls)
    result = intersect_balls(balls)
    if abs(truth) > 1e-6:
        assert result.status == ("empty" if truth > 0 else "feasible")
    if result.feasible:
        assert all(b.contains(result.point) for b in balls)
    if result.empty:
        assert result.lower_bound > 0
        # The least violating point: the same number as the other solver's.
        assert -min(result.margins) == pytest.approx(truth, abs=1e-5)
    assert result.lower_bound <= result.upper_bound + 1e-9
    np.testing.assert_allclose(result.margins, [b.margin(result.point) for b in balls])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 2.0))
def test_a_solver_that_fails_never_makes_a_verdict_wrong(seed, size):
    """Whatever multipliers come back, only the bounds they give decide."""
    balls = random_balls(seed, size=size)
    truth = smallest_violation(balls)
    rng = np.random.default_rng(seed)

    def poor(linear, gram, start=None, stop=None):
        return rng.dirichlet(np.ones(len(linear)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gems_flwr.spaces.ball.intersect.maximise_on_simplex", poor)
        result = intersect_balls(balls)
    assert not result.empty or truth > -1e-6
    assert not result.feasible or truth < 1e-6
    assert result.lower_bound <= result.upper_bound


def test_the_average_is_called_so():
    result = intersect([ball([0, 0], 3), ball([1, 0], 3)])
    assert result.feasible
    assert result.is_average
    np.testing.assert_allclose(result.point, [0.5, 0])
    # A small ball far from the mean: the average is outside of it.
    result = intersect([ball([0, 0], 0.1), ball([1, 0], 3), ball([2, 0], 3)])
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
    assert intersect_balls([ball([1, 2], r) for r in (1, 2, 3)]).feasible
    assert not intersect([ball([0, 0], 1), ball([2, 0], 1)]).empty


def test_a_thousand_nodes_are_decided():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(1000, 300))
    for factor, status in ((0.9, "empty"), (1.1, "feasible")):
        balls = [ball(c, factor * np.sqrt(300)) for c in centers]
        result = intersect_balls(balls)
        assert result.status == status
        assert result.lower_bound > 0 if result.empty else result.upper_bound <= 0


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
    spaces[0] = BallSpace(spaces[0].center, Radius(size, "certified"))
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
    result = intersect(spaces)
    if abs(truth) > 1e-6:
        assert result.status == ("empty" if truth > 0 else "feasible")
    assert result.feasible == all(s.contains(result.point) for s in spaces)
    assert result.lower_bound <= truth + 1e-6 * (1 + abs(truth))
    assert result.upper_bound >= truth - 1e-6 * (1 + abs(truth)) or result.feasible
    if truth > 1e-6:
        # The least violating point: the same number as the other solver's.
        assert result.upper_bound == pytest.approx(truth, abs=1e-6 * (1 + truth))


def test_malformed_calls_are_refused():
    for spaces, words in (
        ([], "at least one"),
        ([ball([0], 1), ball([0, 0], 1)], "dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            intersect(spaces)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_the_simplex_solver_satisfies_its_optimality_conditions(seed, count, rank):
    """At the maximum no coordinate's slope exceeds the weighted mean of all slopes."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(count, rank))
    linear, gram = rng.normal(size=count), root @ root.T
    x = maximise_on_simplex(linear, gram)
    assert x.sum() == pytest.approx(1)
    assert x.min() >= 0
    slope = linear - 2 * gram @ x
    assert slope.max() - slope @ x <= 1e-8 * (1 + np.abs(gram).max())
