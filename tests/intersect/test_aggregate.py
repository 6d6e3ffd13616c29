"""The server's choice of epsilon."""

import numpy as np
import pytest

from gems_flwr.errors import EmptyIntersectionError
from gems_flwr.intersect.aggregate import aggregate_spaces, largest_epsilon
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.curved_space import CurvedSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius


def curved(center, shape="ball"):
    """Radius 10 (1 - epsilon), in steps of 0.01."""
    curve = 10 * np.linspace(1, 0, 101)
    radius = Radius(5.0, "worst", 0.5)
    if shape == "ball":
        return CurvedSpace(BallSpace(np.array(center), radius), curve)
    return CurvedSpace(EllipsoidSpace(np.array(center), np.full(2, 5.0), radius), curve)


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
    automatic = aggregate_spaces(spaces, auto_epsilon=True)
    assert automatic.epsilon == epsilon


def test_spaces_that_never_meet_are_reported_at_the_smallest_epsilon():
    found, epsilon = largest_epsilon([curved([0.0, 0.0]), curved([50.0, 0.0])])
    assert found.empty
    assert epsilon == pytest.approx(0.01)


def test_what_to_do_with_an_empty_intersection():
    spaces = [curved([0.0, 0.0]), curved([12.0, 0.0])]
    least = aggregate_spaces(spaces)
    assert least.intersection.empty
    assert least.epsilon is None
    assert least.point == pytest.approx([6.0, 0.0], abs=1e-6)
    relaxed = aggregate_spaces(spaces, on_empty="relax")
    assert relaxed.intersection.feasible
    assert relaxed.epsilon == pytest.approx(0.4, abs=0.011)
    with pytest.raises(EmptyIntersectionError, match="2 spaces is proved to be empty"):
        aggregate_spaces(spaces, on_empty="fail")


def test_choosing_epsilon_needs_curves():
    with pytest.raises(ValueError, match="radius curves of all 2 spaces, 1 have one"):
        largest_epsilon([curved([0.0, 0.0]), BallSpace(np.zeros(2), Radius(1.0, "worst"))])
