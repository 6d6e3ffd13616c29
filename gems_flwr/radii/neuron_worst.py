"""The directions in which a neuron's output changes most.

As with linear layers (`worst`), random directions miss what hurts: in D dimensions a random unit
vector moves the outputs by about ``1 / sqrt(D)`` of what the inputs' top singular vector does.
The papers (2019, Algorithm 2, line 6) sample. Here every neuron starts at

- the top right singular vector of its active rows (rows weighted by g'), both ways;
- that of all rows, both ways, which wakes a silent neuron;
- with outgoing weights, both together with v, and v alone;

and then climbs: the gradient of the squared deviation at the point where the last ray failed is
the next direction, while that fails nearer. All neurons climb at once; each step is two products.

The radius is exact along these rays. It is an upper bound of the true one, not a proof.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gems_flwr.radii.neuron_data import NeuronData
from gems_flwr.radii.neuron_rays import Feeds, Rays, first_crossing

POWER_STEPS = 12
TINY = 1e-30


def rays_of(data: NeuronData, neurons: Tensor, directions: Tensor) -> Rays:
    """Return one ray for each of some neurons, along directions of shape (b, dimension)."""
    slopes = directions[:, : data.width] @ data.rows.T
    feeds = None
    if data.feeds is not None:
        v, t = data.feeds[neurons].double(), directions[:, data.width :].double()
        feeds = Feeds((v**2).sum(dim=1), (v * t).sum(dim=1), (t**2).sum(dim=1))
    return Rays(data.before[neurons], slopes, data.activation, feeds)


def top_directions(data: NeuronData, shares: Tensor) -> Tensor:
    """Return the top right singular vectors of weighted rows, shape (b, width).

    Parameters
    ----------
    data : NeuronData
        Gives the rows.
    shares : tensor of shape (b, n)
        Weights of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(data.width, generator=generator, dtype=torch.float32)
    vectors = start.to(data.rows).expand(len(shares), -1)
    squared = shares**2
    for _ in range(POWER_STEPS):
        vectors = _unit(((vectors @ data.rows.T) * squared) @ data.rows)
    return vectors


def start_directions(data: NeuronData) -> list[Tensor]:
    """Return the first directions of all neurons, each of shape (L, dimension)."""
    own = top_directions(data, data.activation.slope(data.before))
    common = top_directions(data, torch.ones_like(data.before[:1])).expand_as(own)
    starts = [own, -own, common, -common]
    if data.feeds is None:
        return starts
    norms = data.feeds.norm(dim=1, keepdim=True)
    # Outgoing weights of 0 have no direction; any will do.
    v = torch.where(norms > 0, data.feeds / norms, data.feeds.shape[1] ** -0.5)
    both = [torch.cat([u, v], dim=1) for u in starts]
    both.append(torch.cat([torch.zeros_like(own), v], dim=1))
    return [_unit(direction) for direction in both]


def steepest(data: NeuronData, neurons: Tensor, directions: Tensor, radii: Tensor) -> Tensor:
    """Return the gradient of each squared deviation at a point of a ray, as a unit vector."""
    step = radii.to(directions)[:, None] * directions
    moved = data.before[neurons] + step[:, : data.width] @ data.rows.T
    now, z = data.activation.function(moved), data.outputs[neurons]
    slope = data.activation.slope(moved)
    if data.feeds is None:
        return _unit((slope * (now - z)) @ data.rows)
    v = data.feeds[neurons]
    other = v + step[:, data.width :]
    pull = (other**2).sum(1, keepdim=True) * now - (other * v).sum(1, keepdim=True) * z
    feeds = other * (now**2).sum(1, keepdim=True) - v * (now * z).sum(1, keepdim=True)
    return _unit(torch.cat([(slope * pull) @ data.rows, feeds], dim=1))


def worst_radii(
    data: NeuronData, limits: Tensor, largest: float, refine: int = 8
) -> tuple[Tensor, int]:
    """Return the radius of each neuron along its worst directions, and how many there were.

    Parameters
    ----------
    data : NeuronData
        The layer.
    limits : tensor of shape (L,)
        Allowed deviations.
    largest : float
        No radius above it.
    refine : int
        Steps of the climb at most.
    """
    everyone = torch.arange(len(data), device=limits.device)
    radii = torch.full_like(limits, largest)
    starts = start_directions(data)
    best = starts[0].clone()
    for directions in starts:
        _lower(data, everyone, directions, limits, radii, best)
    climbing, used = everyone, len(starts)
    for _ in range(refine):
        if not len(climbing):
            break
        directions = steepest(data, climbing, best[climbing], radii[climbing])
        last = radii[climbing]
        _lower(data, climbing, directions, limits, radii, best)
        climbing, used = climbing[radii[climbing] < last * (1 - 1e-3)], used + 1
    return radii, used


def _lower(
    data: NeuronData,
    neurons: Tensor,
    directions: Tensor,
    limits: Tensor,
    radii: Tensor,
    best: Tensor,
) -> None:
    """Look along one more direction per neuron; keep, in place, where it fails nearer."""
    rays = rays_of(data, neurons, directions)
    found = first_crossing(rays, limits[neurons], radii[neurons])
    nearer = found < radii[neurons]
    radii[neurons] = found
    best[neurons[nearer]] = directions[nearer]


def _unit(directions: Tensor) -> Tensor:
    norms: Tensor = directions.norm(dim=1, keepdim=True)
    return directions / norms.clamp_min(TINY)
