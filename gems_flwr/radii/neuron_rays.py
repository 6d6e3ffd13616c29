"""How far along a ray a neuron stays good enough: solved, for many rays at once.

Along ``w + R u`` a neuron's output before the activation is ``a_i + R s_i``. As g is monotone,
the output of every sample moves one way only, so Eq. 3's deviation never falls again: there is
one crossing (2019, Section 3.2, where Algorithm 2 searches for it).

- Identity above 0, linear below (ReLU, leaky ReLU): the squared deviation is quadratic in R
  between the radii at which a sample passes 0. Those are sorted, running sums give all
  coefficients, and the crossing is the root of one quadratic. It is checked, not trusted.
- Other activations: bisection with interpolation, in float64, between a proof along the ray
  (g is Lipschitz) and a radius that is known to fail.
- With outgoing weights the deviation may fall again, as v' can make up for g'. Steps of
  ``GROWTH`` outwards from the proof find the first failure, bisection the crossing within
  the step. A ray that fails and recovers within one step is missed; Algorithm 2 misses more.

Decided here: every radius is the lower end of a bracket, good enough as evaluated.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gems_flwr.radii.activations import Activation
from gems_flwr.radii.certified import SHRINK
from gems_flwr.radii.layer_data import CHUNK_BYTES

GROWTH = 1.1
TOLERANCE = 1e-7


@dataclasses.dataclass(frozen=True, eq=False)
class Feeds:
    """Squared length of v, its product with the step t, and squared length of t, each (b,)."""

    own: Tensor
    along: Tensor
    step: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Rays:
    """A batch of b rays, each from one neuron.

    Parameters
    ----------
    before : tensor of shape (b, n), or (1, n) if all start at one neuron
        What is computed before the activation at the centre.
    slopes : tensor of shape (b, n)
        How it changes per unit of radius.
    activation : Activation
        g.
    feeds : Feeds, optional
        What the outgoing weights do, if they are part of the neuron.
    """

    before: Tensor
    slopes: Tensor
    activation: Activation
    feeds: Feeds | None = None

    def pick(self, index: Tensor | slice) -> Rays:
        """Return some of the rays."""
        before = self.before if len(self.before) == 1 else self.before[index]
        feeds = self.feeds
        if feeds is not None:
            feeds = Feeds(feeds.own[index], feeds.along[index], feeds.step[index])
        return Rays(before, self.slopes[index], self.activation, feeds)

    def double(self) -> Rays:
        """Return the rays in float64."""
        return dataclasses.replace(self, before=self.before.double(), slopes=self.slopes.double())

    def deviation(self, radii: Tensor) -> Tensor:
        """Return the deviation of each ray at its own radius (or all at one), shape (b,)."""
        function, n = self.activation.function, self.before.shape[1]
        moved = function(torch.addcmul(self.before, radii.to(self.slopes)[:, None], self.slopes))
        change = moved - function(self.before)
        if self.feeds is None:
            length: Tensor = torch.linalg.vector_norm(change, dim=1).double()
            return length / n
        # v'g' - v g = v (g' - g) + R t g'
        squared = self.feeds.own * (change * change).sum(dim=1).double()
        squared += 2 * radii * self.feeds.along * (change * moved).sum(dim=1).double()
        squared += radii**2 * self.feeds.step * (moved * moved).sum(dim=1).double()
        return torch.sqrt(squared.clamp_min(0)) / n

    def safe(self, limits: Tensor) -> Tensor:
        """Return radii up to which g's Lipschitz constant proves each ray, shape (b,)."""
        room = limits * self.before.shape[1]
        steep: Tensor = self.activation.lipschitz * self.slopes.double().norm(dim=1)
        if self.feeds is None:
            return SHRINK * room / steep
        size: Tensor = self.activation.function(self.before).double().norm(dim=1)
        step = self.feeds.step.sqrt()
        linear = self.feeds.own.sqrt() * steep + step * size
        # The positive root of (step * steep) R^2 + linear R = room.
        return SHRINK * 2 * room / (linear + torch.sqrt(linear**2 + 4 * step * steep * room))


def first_crossing(rays: Rays, limits: Tensor, high: Tensor) -> Tensor:
    """Return how far along each ray the deviation stays within its limit.

    Parameters
    ----------
    rays : Rays
        b rays.
    limits : tensor of shape (b,)
        Allowed deviations, above 0, in float64.
    high : tensor of shape (b,)
        Radii beyond which is not looked, in float64.

    Returns
    -------
    tensor of shape (b,)
        Radii in float64, at most ``high``.
    """
    parts = []
    # Sorting and running sums hold about ten float64 numbers per sample and ray.
    step = max(1, CHUNK_BYTES // (80 * rays.before.shape[1]))
    for start in range(0, len(rays.slopes), step):
        some = slice(start, start + step)
        parts.append(_crossing(rays.pick(some).double(), limits[some], high[some]))
    return torch.cat(parts)


def _crossing(rays: Rays, limits: Tensor, high: Tensor) -> Tensor:
    if rays.feeds is not None:
        return _grow(rays, limits, high)
    found = high.clone()
    if rays.activation.below is not None:
        fails = torch.nonzero(rays.deviation(found) > limits)[:, 0]
        # Of no ray at all xla has no root.
        if len(fails):
            root = _kinked_root(rays.pick(fails), limits[fails], rays.activation.below)
            found[fails] = torch.minimum(root, high[fails])
    fails = torch.nonzero(rays.deviation(found) > limits)[:, 0]
    if len(fails):
        some = rays.pick(fails)
        low = torch.minimum(some.safe(limits[fails]), found[fails])
        found[fails] = bisect(some, limits[fails], low, found[fails])
    return found


def _kinked_root(rays: Rays, limits: Tensor, below: float) -> Tensor:
    """Return where the squared deviation, piecewise quadratic in R, reaches its limit."""
    before, slopes = rays.before.expand_as(rays.slopes), rays.slopes
    above = before > 0
    now = torch.where(above, 1.0, below).to(slopes)
    later = 1 + below - now
    # A sample changes its side of 0 once, if it moves towards it.
    turns = torch.where(torch.where(above, slopes < 0, slopes > 0), -before / slopes, torch.inf)
    turns, order = turns.sort(dim=1)
    # Before its turn a sample deviates by `now s R`, afterwards by `later s R + offset`.
    offset, after = (later - now) * before, later * slopes
    start = ((now * slopes) ** 2).sum(dim=1)
    quadratic, linear, constant = (
        torch.cat([first[:, None], first[:, None] + change.gather(1, order).cumsum(dim=1)], dim=1)
        for first, change in (
            (start, after**2 - (now * slopes) ** 2),
            (torch.zeros_like(start), after * offset),
            (torch.zeros_like(start), offset**2),
        )
    )
    room = (limits * before.shape[1]) ** 2
    reached = quadratic[:, :-1] * turns**2 + 2 * linear[:, :-1] * turns + constant[:, :-1]
    piece = (torch.isfinite(turns) & (reached <= room[:, None])).sum(dim=1, keepdim=True)
    a, b, c = (x.gather(1, piece)[:, 0] for x in (quadratic, linear, constant))
    root = ((b**2 + a * (room - c)).clamp_min(0)).sqrt()
    # Of the two forms of the same root, the one that does not cancel.
    radii = torch.where(b > 0, (room - c) / (b + root), (root - b) / a)
    # Rounding alone must not put it beyond the crossing. Where a is 0 nothing moves any more.
    return torch.where(torch.isfinite(radii) & (radii >= 0), radii * (1 - 1e-9), torch.inf)


def bisect(rays: Rays, limits: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the lower ends of brackets, narrowed until they hold the crossing closely.

    A deviation is not far from linear, so most steps interpolate (the Illinois rule: an end
    that stays twice counts half, so that it does not stay for ever); every third halves.
    """
    room = limits - rays.deviation(low)
    excess = (rays.deviation(high) - limits).clamp_min(torch.finfo(torch.float64).tiny)
    last = torch.zeros_like(room)
    for step in range(100):
        if bool((high - low <= TOLERANCE * high).all()):
            break
        share = (room / (room + excess)).clamp(0, 1) if step % 3 else 0.5
        middle = low + share * (high - low)
        gap = rays.deviation(middle) - limits
        side = torch.where(gap > 0, 1.0, -1.0).to(gap)
        fails, again = side > 0, side == last
        room = torch.where(fails, torch.where(again, room / 2, room), -gap)
        excess = torch.where(fails, gap, torch.where(again, excess / 2, excess))
        high, low = torch.where(fails, middle, high), torch.where(fails, low, middle)
        last = side
    return low


def _grow(rays: Rays, limits: Tensor, high: Tensor) -> Tensor:
    """Return the first crossing of each ray by itself, by steps outwards."""
    low = torch.minimum(rays.safe(limits), high)
    top, active = low.clone(), torch.nonzero(low < high)[:, 0]
    while len(active):
        top[active] = torch.minimum(low[active] * GROWTH, high[active])
        fails = rays.pick(active).deviation(top[active]) > limits[active]
        active = active[~fails]
        low[active] = top[active]
        active = active[low[active] < high[active]]
    return bisect(rays, limits, low, top)


def first_failure(rays: Rays, limit: Tensor, high: Tensor) -> Tensor:
    """Return the smallest crossing of all rays of one neuron, by steps outwards, shape (1,)."""
    low = torch.minimum(rays.safe(limit).amin(dim=0, keepdim=True), high)
    while bool(low < high):
        top = torch.minimum(low * GROWTH, high)
        fails = rays.deviation(top) > limit
        if bool(fails.any()):
            some = rays.pick(fails).double()
            count = len(some.slopes)
            ends = bisect(some, limit.expand(count), low.expand(count), top.expand(count))
            return ends.amin(dim=0, keepdim=True)
        low = top
    return low
