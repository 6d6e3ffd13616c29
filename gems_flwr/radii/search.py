"""The papers' own searches for a radius, for any model: the reference.

`bisect_radius` is ConstructBall, Algorithm 2 of 2019; `grow_radius` is GetGoodEnoughModels,
Algorithm 1 of 2018. Both see the model only through Q and so work for anything; for a
linear layer `rays` gives the same answer for the same directions without a search.

Decided here, where the papers are silent or the released code slips:

- bisection returns the *verified* lower end of the bracket (the released code returns its
  middle, which was never tested);
- both first test the centre, and raise if not even that is good enough;
- growing stops at ``largest`` (the printed loop never ends if Q is always 1), and if the
  first radius fails the answer is 0, not a negative number;
- both draw new directions at every radius, as printed, unless directions are given.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gems_flwr.spaces.radius import Radius

Vector = NDArray[np.float32]
GoodEnough = Callable[[Vector], bool]


class _Sampler:
    """Tests p models at a distance, on fresh or given directions."""

    def __init__(
        self,
        good: GoodEnough,
        center: Vector,
        samples: int,
        seed: int,
        axes: Vector | None,
        directions: Vector | None,
    ) -> None:
        self.good, self.center, self.samples = good, center, samples
        self.axes, self.directions = axes, directions
        self.generator = np.random.default_rng(seed)
        if not good(center):
            raise ValueError("epsilon: the centre itself is not good enough; relax epsilon")

    def all_good(self, radius: float) -> bool:
        """Return whether every sampled model at this radius is good enough."""
        for index in range(self.samples):
            if self.directions is not None:
                step = self.directions[index]
            else:
                step = self.generator.standard_normal(self.center.size, dtype=np.float32)
                step = step / np.linalg.norm(step)
                step = step if self.axes is None else step * self.axes
            if not self.good(self.center + np.float32(radius) * step):
                return False
        return True


def bisect_radius(
    good: GoodEnough,
    center: Vector,
    *,
    epsilon: float,
    largest: float = 4000.0,
    tolerance: float = 0.01,
    samples: int = 500,
    seed: int = 0,
    axes: Vector | None = None,
    directions: Vector | None = None,
) -> Radius:
    """Return the radius of Algorithm 2 (2019).

    Parameters
    ----------
    good : callable
        Q: takes a flat model, says whether it is good enough.
    center : array of shape (d,)
        The node's own model.
    epsilon : float
        What ``good`` asks for; only noted in the result.
    largest : float
        R_max, the upper end of the first bracket.
    tolerance : float
        Delta, the bracket at which the search ends.
    samples : int
        p, models tested at each radius.
    seed : int
        Seed of the sampled directions.
    axes : array of shape (d,), optional
        Relative axes of an ellipsoid (Appendix A).
    directions : array of shape (samples, d), optional
        Use these surface points (R = 1) at every radius instead of fresh ones.

    Raises
    ------
    ValueError
        If the centre itself is not good enough.
    """
    sampler = _Sampler(good, center, samples, seed, axes, directions)
    lower, upper = 0.0, largest
    while upper - lower > tolerance:
        radius = (lower + upper) / 2
        if sampler.all_good(radius):
            lower = radius
        else:
            upper = radius
    return Radius(lower, "bisection", epsilon, samples)


def grow_radius(
    good: GoodEnough,
    center: Vector,
    *,
    epsilon: float,
    first: float = 0.1,
    step: float = 0.1,
    largest: float = 4000.0,
    samples: int = 500,
    seed: int = 0,
    axes: Vector | None = None,
    directions: Vector | None = None,
) -> Radius:
    """Return the radius of Algorithm 1 (2018): grow until a sampled model fails.

    Parameters are those of `bisect_radius`; ``first`` is r_initial, ``step`` is delta.
    """
    sampler = _Sampler(good, center, samples, seed, axes, directions)
    verified, radius = 0.0, first
    while radius <= largest and sampler.all_good(radius):
        verified, radius = radius, radius + step
    return Radius(verified, "growing", epsilon, samples)
