"""Good-enough balls of all neurons of a hidden layer at once.

2019, Section 3.2, step 2, applies Algorithm 2 to each neuron by itself: a search over radii,
with p new models at every one. The balls are the same, but most of that work is not needed:

- The p directions serve all neurons, so the products of inputs and directions are done once.
- Along a ray the deviation never falls (`neuron_rays`), so a ray that is good enough at R is
  good enough at every smaller R. Each neuron takes the R of its most promising ray, solved
  exactly, looks once at all rays, and then only at those that fail, solving the worst of
  them, until none fails.
- A neuron that cannot fail within ``max_radius`` gets that.

``certified`` holds in every direction. A step of length r moves all outputs together by at most
``lipschitz * sigma_max(X) * r``, X with its column of ones, so ``epsilon n / (lipschitz
sigma_max)`` is safe. For a ReLU (or leaky ReLU) a second bound is often better where few samples
are active: sample i moves at most as it does when its own input pushes it up by ``|x_i| r``, so
the deviation is at most that along a ray with slopes ``|x_i|``. With outgoing weights the deviation
is at most ``|v| s r_w + r_v (|z| + s r_w)``, s as above; by Cauchy-Schwarz that is at most
``sqrt(|v|^2 s^2 + |z|^2) r + s r^2 / 2``, and r is the root.

Decided here: the papers' searches end at a bracket of ``max_radius / 400,000`` (0.01 for the
released code's 4000), or grow by ten times that.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from gems_flwr.radii.certified import SHRINK
from gems_flwr.radii.layer_data import CHUNK_BYTES, unit_directions
from gems_flwr.radii.neuron_data import NeuronData, neuron_deviation
from gems_flwr.radii.neuron_loss import (
    LayersAbove,
    NeuronLosses,
    loss_limit,
    sampled_loss_radii,
    searched_loss_radii,
)
from gems_flwr.radii.neuron_rays import Feeds, Rays, first_crossing, first_failure
from gems_flwr.radii.neuron_worst import worst_radii
from gems_flwr.radii.search import Vector, bisect_radius, grow_radius
from gems_flwr.spaces.checks import MAX_WEIGHT
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.spaces.radius import METHODS, Method
from gems_flwr.typing import LOSS_MEASURES, NeuronMeasure

STEPS = 400_000
# Numbers looked at together when all rays of a neuron are.
BLOCK = 2**18


def build_neuron_balls(
    data: NeuronData,
    epsilon: float,
    method: Method = "sampled",
    *,
    directions: int = 500,
    seed: int = 0,
    measure: NeuronMeasure = "absolute",
    max_radius: float = 4000.0,
    outgoing_norms: Tensor | None = None,
    above: LayersAbove | None = None,
    bias_above: Tensor | None = None,
) -> NeuronBalls:
    """Return the balls of all neurons of a layer.

    Parameters
    ----------
    data : NeuronData
        The layer and its inputs.
    epsilon : float
        Deviation of a neuron's output that is allowed (epsilon_j of Eq. 3), above 0.
    method : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radii are found; see `gems_flwr.spaces.radius.Radius`.
    directions : int
        Random directions, for all but worst and certified; at least 1.
    seed : int
        Seed of the random directions.
    measure : {"absolute", "relative", "loss", "relative_loss"}
        Whether epsilon is the limit itself, or times each neuron's own ``(1/n) ||z||``; or the
        network's loss with the neuron moved (`neuron_loss`), or the share by which that may
        exceed the network's own.
    max_radius : float
        No radius above it, above 0.
    outgoing_norms : tensor of shape (L,), optional
        Lengths of the outgoing weights, for the importance of a neuron; see
        `NeuronData.importance`.
    above : LayersAbove, optional
        The network above the layer; needed where a loss is the measure.
    bias_above : tensor of shape (O,), optional
        Bias of the layer above, to be sent along.

    Raises
    ------
    ValueError
        If a parameter is out of its range.
    """
    for name, value in (("epsilon", epsilon), ("max_radius", max_radius)):
        if not 0 < value <= MAX_WEIGHT:
            raise ValueError(f"{name}: expected a number in (0, {MAX_WEIGHT:g}], got {value}")
    if directions < 1:
        raise ValueError(f"directions: expected at least 1, got {directions}")
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    # Seeds of torch are signed.
    seed = seed % 2**63
    used = directions
    chunk = max(1, CHUNK_BYTES // (data.incoming.element_size() * len(data.inputs)))
    rays = unit_directions(data.dimension, directions, seed, chunk, data.incoming)
    if measure in LOSS_MEASURES:
        if above is None or method in ("worst", "certified"):
            raise ValueError(f"measure {measure!r}: needs the layers above, and sampled radii")
        losses = NeuronLosses(data, above)
        limit = loss_limit(losses, epsilon, measure == "relative_loss")
        if method == "sampled":
            radii = sampled_loss_radii(losses, rays, limit, max_radius)
        else:
            radii = searched_loss_radii(losses, limit, method, directions, seed, max_radius)
    elif method == "certified":
        radii, used = certified_radii(data, data.limits(epsilon, measure), max_radius), 0
    elif method == "worst":
        radii, used = worst_radii(data, data.limits(epsilon, measure), max_radius)
    elif method == "sampled":
        radii = sampled_radii(data, rays, data.limits(epsilon, measure), max_radius)
    else:
        limits = data.limits(epsilon, measure)
        radii = searched_radii(data, limits, method, directions, seed, max_radius)
    return NeuronBalls(
        centers=data.centers.float().cpu().numpy(),
        radii=radii.cpu().numpy(),
        importance=data.importance(outgoing_norms).cpu().numpy(),
        method=method,
        epsilon=epsilon,
        directions=used,
        outgoing=data.dimension - data.width,
        bias_above=None if bias_above is None else bias_above.detach().float().cpu().numpy(),
    )


def sampled_radii(
    data: NeuronData, directions: Iterable[Tensor], limits: Tensor, largest: float
) -> Tensor:
    """Return the radius of each neuron, exact along directions that serve all of them.

    Parameters
    ----------
    data : NeuronData
        The layer.
    directions : iterable of tensor
        Unit vectors in chunks of shape (p, dimension).
    limits : tensor of shape (L,)
        Allowed deviations.
    largest : float
        No radius above it.
    """
    radii = torch.full_like(limits, largest)
    for chunk in directions:
        slopes = chunk[:, : data.width] @ data.rows.T
        if data.feeds is None:
            radii = _lower_all(data, slopes, limits, radii)
            continue
        steps = chunk[:, data.width :].double()
        for neuron, v in enumerate(data.feeds.double()):
            feeds = Feeds((v @ v).expand(len(chunk)), steps @ v, (steps**2).sum(dim=1))
            own = slice(neuron, neuron + 1)
            rays = Rays(data.before[own], slopes, data.activation, feeds)
            radii[own] = first_failure(rays, limits[own], radii[own])
    return radii


def _lower_all(data: NeuronData, slopes: Tensor, limits: Tensor, radii: Tensor) -> Tensor:
    """Lower every neuron's radius until none of the rays fails."""
    everyone, promising = torch.arange(len(data), device=slopes.device), _promising(data, slopes)
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


def _promising(data: NeuronData, slopes: Tensor) -> Tensor:
    """Return for each neuron the ray along which its output changes fastest at the centre."""
    squared = slopes**2
    rates = data.activation.slope(data.before) ** 2 @ squared.T
    return torch.where(rates.amax(dim=1, keepdim=True) > 0, rates, squared.sum(dim=1)).argmax(dim=1)


def _pairs(data: NeuronData, slopes: Tensor, neurons: Tensor, rays: Tensor) -> Rays:
    return Rays(data.before[neurons], slopes[rays], data.activation)


def _all_deviations(data: NeuronData, slopes: Tensor, neuron: int, radii: Tensor) -> Tensor:
    """Return one neuron's deviation along all rays at its radius, in blocks that stay in cache."""
    own, step = slice(neuron, neuron + 1), max(1, BLOCK // slopes.shape[1])
    blocks = [slopes[start : start + step] for start in range(0, len(slopes), step)]
    return torch.cat(
        [Rays(data.before[own], some, data.activation).deviation(radii[own]) for some in blocks]
    )


def certified_radii(data: NeuronData, limits: Tensor, largest: float) -> Tensor:
    """Return radii within which no neuron at all deviates by more than its limit."""
    x = data.rows.double()
    gram = x.T @ x if x.shape[1] <= len(x) else x @ x.T
    spread = data.activation.lipschitz * torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()
    room = limits * len(x)
    if data.feeds is not None:
        size = data.outputs.double().norm(dim=1)
        linear = ((data.feed_norms * spread) ** 2 + size**2).sqrt()
        safe = 2 * room / (linear + (linear**2 + 2 * spread * room).sqrt())
    else:
        safe = room / spread
    if data.feeds is None and data.activation.below is not None and data.activation.below <= 1:
        lengths = x.norm(dim=1).expand(len(data), -1)
        rays = Rays(data.before, lengths, data.activation)
        high = torch.full_like(safe, largest / SHRINK)
        safe = torch.maximum(safe, first_crossing(rays, limits, high))
    return torch.clamp(SHRINK * safe, max=largest)


def searched_radii(
    data: NeuronData, limits: Tensor, method: Method, directions: int, seed: int, largest: float
) -> Tensor:
    """Return the radii of the papers' searches, one neuron and one model at a time."""
    centers, radii = data.centers.float().cpu().numpy(), torch.empty_like(limits)
    for index, limit in enumerate(limits.tolist()):

        def good(w: Vector, neuron: int = index, limit: float = limit) -> bool:
            point = torch.from_numpy(np.asarray(w))[None]
            return float(neuron_deviation(data, neuron, point)) <= limit

        options = {"epsilon": limit, "largest": largest, "samples": directions, "seed": seed}
        step = largest / STEPS
        if method == "bisection":
            found = bisect_radius(good, centers[index], tolerance=step, **options)  # type: ignore[arg-type]
        else:
            found = grow_radius(good, centers[index], first=10 * step, step=10 * step, **options)  # type: ignore[arg-type]
        radii[index] = found.value
    return radii
