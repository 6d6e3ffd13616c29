"""The good-enough balls of a hidden layer's neurons, on a node's own data.

Guha & Smith 2019, Section 3.2: a node's space for hidden layer j is a list of balls, one per
neuron, over its incoming weights and bias (of a filter, the kernel). A neuron w' is good enough if
``(1/n) sqrt(sum_i (g(w'x_i) - g(w x_i))^2)`` is at most epsilon_j (Eq. 3). Algorithm 2 searches
over radii with p new models at every one. The balls here are the same for less work:

- The p directions serve all neurons, so the products of inputs and directions are done once.
- Along ``w + R u`` a neuron's output before the activation is ``a_i + R s_i``. As g is monotone,
  the deviation never falls again. Each neuron takes the R of its most promising ray, looks once at
  all rays, and then only at those that fail, solving the worst of them, until none fails.
- How far along a ray is bisection with interpolation, in float64, between a proof along the ray
  (g is Lipschitz) and a radius that is known to fail.

Every radius is the lower end of a bracket, good enough as evaluated, and rounded down to float32.
The importance of a neuron is how much it adds to the layer above; it decides who merges first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.errors import ModelError, SpaceError
from gems_flwr.networks import Activation
from gems_flwr.spaces import check_array
from gems_flwr.spaces.ball.layer_data import CHUNK_BYTES, unit_directions

MAX_RADIUS = 4000.0
TOLERANCE = 1e-7
# What a proof leaves for single-precision rounding.
SHRINK = 1 - 1e-5
# Numbers looked at together, so that they stay in the processor's cache.
BLOCK = 2**18


@dataclass(frozen=True, eq=False)
class NeuronBalls:
    """The balls of all L neurons of one layer: how far each may move, and what it adds above.

    Centres (L, d) are incoming weights and the bias, if there is one; radii and importance (ones if
    left out) have shape (L,) and are at least 0.
    """

    centers: NDArray[np.float32]
    radii: NDArray[np.float32]
    importance: NDArray[np.float32] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "centers", check_array("centers", self.centers, (None, None)))
        count = len(self.centers)
        radii = check_array("radii", self.radii, (count,), dtype=np.float64)
        set_(self, "radii", check_array("radii", _rounded_down(radii), (count,)))
        given = np.ones(count) if self.importance is None else self.importance
        set_(self, "importance", check_array("importance", given, (count,)))
        for name, least in (("radii", radii.min()), ("importance", self.importance.min())):
            if least < 0:
                raise SpaceError(name, "at least 0", float(least))

    def __len__(self) -> int:
        return len(self.centers)

    @property
    def dimension(self) -> int:
        """Numbers that make up one neuron."""
        return int(self.centers.shape[1])

    def to_array(self) -> NDArray[np.float32]:
        """Return all balls as one array of shape (L, d + 2): centres, radii, importance."""
        return np.column_stack([self.centers, self.radii, self.importance])

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> NeuronBalls:
        """Return the balls that `to_array` wrote, checked again."""
        if array.ndim != 2 or array.shape[1] < 3:
            raise SpaceError("neurons", "shape (neurons, weights + 2)", f"shape {array.shape}")
        return cls(array[:, :-2], array[:, -2], array[:, -1])


def _rounded_down(radii: NDArray[np.float64]) -> NDArray[np.float32]:
    single = radii.astype(np.float32)
    below = np.nextafter(single, np.float32(0))
    return np.where(single.astype(np.float64) > radii, below, single)


@dataclass(frozen=True, eq=False)
class NeuronData:
    """All neurons of a layer, weights (L, D) and bias (L,), and their inputs (n, D).

    The weights' device is used throughout, and their type if that is float64; float32 otherwise.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    activation: Activation

    def __post_init__(self) -> None:
        for name in ("weight", "bias", "inputs"):
            values = getattr(self, name)
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ModelError(f"{name}: expected finite values, got NaN or inf")

    def __len__(self) -> int:
        return len(self.weight)

    @cached_property
    def centers(self) -> Tensor:
        """Weights and biases, shape (L, d)."""
        wide = self.weight.dtype == torch.float64
        weight = self.weight.detach().to(torch.float64 if wide else torch.float32)
        if self.bias is None:
            return weight
        return torch.cat([weight, self.bias.detach().to(weight)[:, None]], dim=1)

    @cached_property
    def rows(self) -> Tensor:
        """Inputs with a column of ones if there is a bias, shape (n, d)."""
        x = self.inputs.detach().to(self.centers)
        return x if self.bias is None else torch.cat([x, torch.ones_like(x[:, :1])], dim=1)

    @cached_property
    def before(self) -> Tensor:
        """What each neuron computes before its activation, shape (L, n)."""
        return self.centers @ self.rows.T

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs at the centre, shape (L, n)."""
        return self.activation.function(self.before)


def neuron_balls(
    data: NeuronData,
    epsilon: float,
    *,
    directions: int = 500,
    seed: int = 0,
    max_radius: float = MAX_RADIUS,
    outgoing_norms: Tensor | None = None,
) -> NeuronBalls:
    """Return the balls of all neurons of a layer, exact along random directions.

    For the options see `gems_flwr.Neurons`. The `outgoing_norms` (L,) are lengths of the weights by
    which neurons feed the layer above; times a neuron's mean absolute output they are its
    importance.
    """
    chunk = max(1, CHUNK_BYTES // (data.centers.element_size() * len(data.inputs)))
    importance = data.outputs.abs().double().mean(dim=1)
    limits, radii = (torch.full_like(importance, each) for each in (epsilon, max_radius))
    # Seeds of torch are signed.
    dimension = data.centers.shape[1]
    for rays in unit_directions(dimension, directions, seed % 2**63, chunk, data.centers):
        radii = _lower_all(data, rays @ data.rows.T, limits, radii)
    if outgoing_norms is not None:
        importance = importance * outgoing_norms.detach().double().to(importance)
    return NeuronBalls(
        data.centers.float().cpu().numpy(), radii.cpu().numpy(), importance.cpu().numpy()
    )


def _lower_all(data: NeuronData, slopes: Tensor, limits: Tensor, radii: Tensor) -> Tensor:
    """Lower every neuron's radius until none of the rays fails."""
    everyone = torch.arange(len(data), device=slopes.device)
    squared = slopes**2
    rates = data.activation.slope(data.before) ** 2 @ squared.T
    # The ray along which the output changes fastest at the centre mostly fails first.
    rates = torch.where(rates.amax(dim=1, keepdim=True) > 0, rates, squared.sum(dim=1))
    promising = rates.argmax(dim=1)
    radii = first_crossing(_pairs(data, slopes, everyone, promising), limits, radii)
    deviations = torch.stack(
        [_all_deviations(data, slopes, neuron, radii) for neuron in range(len(data))]
    )
    failing = deviations > limits[:, None]
    failing[everyone, promising] = False
    while bool(failing.any()):
        neurons = torch.nonzero(failing.any(dim=1))[:, 0]
        worst = torch.where(failing[neurons], deviations[neurons], -1.0).argmax(dim=1)
        rays = _pairs(data, slopes, neurons, worst)
        radii[neurons] = first_crossing(rays, limits[neurons], radii[neurons])
        failing[neurons, worst] = False
        pairs, step = torch.nonzero(failing), max(1, CHUNK_BYTES // (16 * slopes.shape[1]))
        for start in range(0, len(pairs), step):
            owner, ray = pairs[start : start + step].T
            moved = _pairs(data, slopes, owner, ray).deviation(radii[owner])
            deviations[owner, ray] = moved
            failing[owner, ray] = moved > limits[owner]
    return radii


def _pairs(data: NeuronData, slopes: Tensor, neurons: Tensor, rays: Tensor) -> Rays:
    return Rays(data.before[neurons], slopes[rays], data.activation)


def _all_deviations(data: NeuronData, slopes: Tensor, neuron: int, radii: Tensor) -> Tensor:
    """Return one neuron's deviation along all rays at its radius, block by block."""
    own, step = slice(neuron, neuron + 1), max(1, BLOCK // slopes.shape[1])
    blocks = [slopes[start : start + step] for start in range(0, len(slopes), step)]
    return torch.cat(
        [Rays(data.before[own], some, data.activation).deviation(radii[own]) for some in blocks]
    )


@dataclass(frozen=True, eq=False)
class Rays:
    """A batch of b rays, each from one neuron."""

    # The outputs before the activation at the centre, (b, n), or (1, n) if all start at one neuron;
    # and how they change per unit of radius, (b, n).
    before: Tensor
    slopes: Tensor
    activation: Activation

    def pick(self, index: Tensor | slice) -> Rays:
        """Return some of the rays."""
        before = self.before if len(self.before) == 1 else self.before[index]
        return Rays(before, self.slopes[index], self.activation)

    def deviation(self, radii: Tensor) -> Tensor:
        """Return the deviation of each ray at its own radius (or all at one), shape (b,)."""
        function = self.activation.function
        moved = function(torch.addcmul(self.before, radii.to(self.slopes)[:, None], self.slopes))
        change = moved - function(self.before)
        length: Tensor = torch.linalg.vector_norm(change, dim=1).double()
        return length / self.before.shape[1]

    def safe(self, limits: Tensor) -> Tensor:
        """Return radii up to which g's Lipschitz constant proves each ray, shape (b,)."""
        steep: Tensor = self.activation.lipschitz * self.slopes.double().norm(dim=1)
        return SHRINK * limits * self.before.shape[1] / steep


def first_crossing(rays: Rays, limits: Tensor, high: Tensor) -> Tensor:
    """Return how far along each ray the deviation stays within its limit."""
    parts = []
    # Some float64 numbers per sample and ray at a time.
    step = max(1, CHUNK_BYTES // (32 * rays.before.shape[1]))
    for start in range(0, len(rays.slopes), step):
        some = slice(start, start + step)
        picked, most = rays.pick(some), high[some]
        wide = Rays(picked.before.double(), picked.slopes.double(), rays.activation)
        found = most.clone()
        fails = torch.nonzero(wide.deviation(most) > limits[some])[:, 0]
        if len(fails):
            failing, limit = wide.pick(fails), limits[some][fails]
            low = torch.minimum(failing.safe(limit), most[fails])
            found[fails] = _bisect(failing, limit, low, most[fails])
        parts.append(found)
    return torch.cat(parts)


def _bisect(rays: Rays, limits: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the lower ends of brackets, narrowed until they hold the crossing closely.

    A deviation is nearly linear, so most steps interpolate (the Illinois rule: an end that stays
    twice counts half); every third halves.
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
