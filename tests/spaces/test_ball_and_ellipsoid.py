"""Balls, sets of balls and ellipsoids: membership, distance, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.ball import BallSet, BallSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius

R = Radius(2.0, "worst", 0.9, 12)


def test_a_ball_measures_euclidean_distance():
    """(3, 4) is 5 from the origin, so 3 from the ball of radius 2."""
    ball = BallSpace(np.zeros(2), R)
    assert ball.distance([3, 4]) == pytest.approx(3)
    assert ball.margin([0, 1]) == pytest.approx(1)
    assert ball.contains([0, 2])
    assert not ball.contains([0, 2.001])
    assert ball.size_bytes == 2 * 4 + 8


def test_a_set_of_balls_is_their_union():
    balls = BallSet((BallSpace(np.zeros(2), R),)).add(BallSpace(np.array([10.0, 0.0]), R))
    assert balls.contains([10, 1])
    assert balls.contains([1, 0])
    assert not balls.contains([5, 0])
    assert balls.distance([5, 0]) == pytest.approx(3)


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


def test_equal_axes_make_a_ball():
    ball = BallSpace(np.arange(3.0), R)
    ellipsoid = EllipsoidSpace(np.arange(3.0), np.full(3, 2.0), R)
    w = [4.0, -1.0, 7.0]
    assert ellipsoid.distance(w) == pytest.approx(ball.distance(w), rel=1e-6)
    assert ellipsoid.margin([0, 1, 2.5]) == pytest.approx(ball.margin([0, 1, 2.5]), rel=1e-6)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Radius(-1.0, "worst"), "radius"),
        (lambda: Radius(float("nan"), "worst"), "radius"),
        (lambda: Radius(1e9, "worst"), "radius"),
        (lambda: Radius(1.0, "guessed"), "radius.method"),
        (lambda: Radius("1", "worst"), "radius"),
        (lambda: BallSpace(np.zeros((2, 2)), R), "center"),
        (lambda: BallSpace(np.zeros(0), R), "center"),
        (lambda: BallSpace(np.array([np.nan]), R), "center"),
        (lambda: BallSpace(np.array([1e12]), R), "center"),
        (lambda: BallSpace(np.array(["a"]), R), "center"),
        (lambda: BallSpace(np.zeros(2), 1.0), "radius"),
        (lambda: EllipsoidSpace(np.zeros(2), np.array([1.0, 0.0]), R), "radii"),
        (lambda: EllipsoidSpace(np.zeros(2), np.ones(3), R), "radii"),
        (lambda: EllipsoidSpace(np.zeros(2), np.ones(2), 3.0), "radius"),
        (lambda: BallSet(()), "balls"),
        (lambda: BallSet((BallSpace(np.zeros(2), R), BallSpace(np.zeros(3), R))), "balls"),
        (lambda: BallSpace(np.zeros(2), R).distance([1.0]), "w"),
    ],
)
def test_malformed_spaces_are_refused_by_key(build, key):
    with pytest.raises(SpaceError, match=r"expected .* got") as caught:
        build()
    assert caught.value.key == key


def test_a_space_cannot_be_changed():
    ball = BallSpace(np.zeros(2), R)
    with pytest.raises(ValueError, match="read-only"):
        ball.center[0] = 1
