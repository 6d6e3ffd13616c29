"""The released code's descent for ellipsoids, held against automatic differentiation."""

import numpy as np
import pytest
import torch

from gems_flwr.intersect.equation2 import descend_levels
from gems_flwr.intersect.intersect import intersect
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius


def ellipsoids(seed, count=3, dimension=6, size=1.0):
    rng = np.random.default_rng(seed)
    return [
        EllipsoidSpace(
            rng.normal(size=dimension),
            size * rng.uniform(0.5, 2, dimension),
            Radius(size, "sampled", 0.5, 10),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_step_is_that_of_torchs_gradient(seed):
    spaces = ellipsoids(seed, size=0.3)
    w = torch.tensor(np.mean([s.center for s in spaces], axis=0, dtype=np.float64))
    for _ in range(40):
        w.requires_grad_(True)
        value = sum(
            torch.relu(((w - torch.tensor(s.center)) / torch.tensor(s.radii)).norm() - 1)
            for s in spaces
        )
        (slope,) = torch.autograd.grad(value, w)
        w = (w - 0.01 * slope).detach()
    ours = descend_levels(spaces, rate=0.01, steps=40)
    assert ours.iterations == 40
    np.testing.assert_allclose(ours.point, w.numpy(), rtol=1e-6)


def test_it_stops_at_once_where_the_average_is_in_all_and_at_the_border_elsewhere():
    near = ellipsoids(0, size=10.0)
    at_once = descend_levels(near)
    assert at_once.is_average
    assert at_once.iterations == 0
    # Centres 2 apart on the first axis; the average, 1, is not within 0.4 of the second.
    apart = [
        EllipsoidSpace(np.array(center), np.array(radii), Radius(2.0, "sampled", 0.5, 10))
        for center, radii in (([0.0, 0.0], [1.8, 1.0]), ([2.0, 0.0], [0.4, 2.0]))
    ]
    found = descend_levels(apart)
    assert found.feasible
    assert not found.is_average
    np.testing.assert_allclose(found.point, [1.6, 0.0], atol=0.01)


def test_it_never_claims_that_nothing_is_in_all():
    found = descend_levels(ellipsoids(2, size=0.1), rate=0.01, steps=50)
    assert found.status == "undecided"
    assert intersect(ellipsoids(2, size=0.1)).empty
