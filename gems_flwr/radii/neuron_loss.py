"""How far a neuron may move before its whole network is no longer good enough.

Guha 2018, Algorithm 2 (GetNeuronSpace): a neuron's ball grows as long as all sampled neurons at
its radius "produce loss less than epsilon" on the learner's data. It is the *network's* loss with
this one neuron changed, not the deviation of the neuron's own output (2019, Eq. 3; `neuron_data`).

The layers below do not change, nor do the other neurons: with z and v the outputs and outgoing
weights of a layer, moving neuron j turns the inputs of the layer above into
``z V + b - z_j v_j + z'_j v'_j``, one outer product per point, and what is above is run on that.

Decided here:

- a network that is not good enough itself gets radii of 0: its neurons are what they are;
- the loss is the mean cross-entropy, on the same rows for all neurons;
- ``sampled`` takes the paper's condition (all directions are good at R) without its steps of
  delta. Each neuron takes the R of its first ray, by halving, looks at all rays there, and halves
  on for the worst one that fails, until none does. Along a ray a loss may fall again; what is
  found is a radius at which all rays are good, and just beyond which one is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from gems_flwr.errors import ModelError
from gems_flwr.radii.neuron_data import NeuronData
from gems_flwr.radii.search import Vector, bisect_radius, grow_radius
from gems_flwr.spaces.radius import Method

# A radius is found to this share of it, or to this length where it is next to nothing.
PRECISION = 2e-5
SHORTEST = 1e-6
# Numbers looked at together, so that they stay in the cache.
BLOCK = 2**18


@dataclasses.dataclass(frozen=True, eq=False)
class LayersAbove:
    """What a network makes of a hidden layer's outputs, up to the loss.

    Parameters
    ----------
    outgoing : tensor of shape (L, O)
        Weights by which each neuron feeds the layer above, whether or not they are part of its
        ball.
    bias : tensor of shape (O,), optional
        Bias of the layer above.
    finish : callable, optional
        From what the layer above computes before its activation, shape (…, O), to logits; left out
        where the layer above is the output layer.
    labels : tensor of shape (n,)
        Classes of the rows.

    Raises
    ------
    ModelError
        If a shape does not fit.
    """

    outgoing: Tensor
    bias: Tensor | None
    finish: Callable[[Tensor], Tensor] | None
    labels: Tensor

    def __post_init__(self) -> None:
        if self.outgoing.ndim != 2 or self.labels.ndim != 1:
            shapes = f"{tuple(self.outgoing.shape)} and {tuple(self.labels.shape)}"
            raise ModelError(f"outgoing, labels: expected shapes (L, O) and (n,), got {shapes}")

    def losses(self, fed: Tensor) -> Tensor:
        """Return the mean losses of inputs of the layer above, shape (p, O, n), in float64."""
        # Classes before samples: sums over few classes then run along many samples at once.
        logits = fed
        if self.finish is not None:
            logits = self.finish(fed.transpose(1, 2)).transpose(1, 2)
        right = logits.gather(1, self.labels.expand(len(logits), 1, -1))[:, 0]
        means: Tensor = (torch.logsumexp(logits, dim=1) - right).double().mean(dim=1)
        return means


class NeuronLosses:
    """The network's loss with one neuron of a layer moved."""

    def __init__(self, data: NeuronData, above: LayersAbove) -> None:
        if above.outgoing.shape[0] != len(data) or len(above.labels) != len(data.inputs):
            raise ModelError(
                f"expected outgoing weights of {len(data)} neurons and {len(data.inputs)} labels, "
                f"got {len(above.outgoing)} and {len(above.labels)}"
            )
        self.data, self.above = data, above
        self.feeds = above.outgoing.detach().to(data.incoming)
        fed = self.feeds.T @ data.outputs
        self.fed = fed if above.bias is None else fed + above.bias.detach().to(fed)[:, None]
        self.own = float(above.losses(self.fed[None])[0])

    def along(
        self, neuron: int, slopes: Tensor, steps: Tensor | None, radius: float | Tensor
    ) -> Tensor:
        """Return the losses at a radius along some rays.

        Parameters
        ----------
        neuron : int
            Which one is moved.
        slopes : tensor of shape (p, n)
            Change of what it computes before its activation, per unit of radius.
        steps : tensor of shape (p, O), optional
            Change of its outgoing weights, likewise.
        radius : float
            How far.
        """
        data, v = self.data, self.feeds[neuron]
        without = self.fed - torch.outer(v, data.outputs[neuron])
        size = max(1, BLOCK // without.numel())
        parts = []
        for start in range(0, len(slopes), size):
            some = slice(start, start + size)
            z = data.activation.function(data.before[neuron] + radius * slopes[some])
            out = v.expand(len(z), -1) if steps is None else v + radius * steps[some]
            parts.append(self.above.losses(without + out[:, :, None] * z[:, None, :]))
        return torch.cat(parts)

    def at(self, neuron: int, points: Tensor) -> Tensor:
        """Return the losses with other neurons, shape (p, d), in its place."""
        data = self.data
        moves = points.to(data.incoming) - data.centers[neuron]
        slopes = moves[:, : data.width] @ data.rows.T
        steps = None if data.feeds is None else moves[:, data.width :]
        return self.along(neuron, slopes, steps, 1.0)


def loss_limit(losses: NeuronLosses, epsilon: float, relative: bool) -> float:
    """Return the loss that is good enough: epsilon, or the network's own and a share more."""
    return losses.own * (1 + epsilon) if relative else epsilon


def sampled_loss_radii(
    losses: NeuronLosses, directions: Iterable[Tensor], limit: float, largest: float
) -> Tensor:
    """Return each neuron's radius at which the network is good enough along all directions.

    Parameters
    ----------
    losses : NeuronLosses
        The layer and what is above it.
    directions : iterable of tensor
        Unit vectors in chunks of shape (p, dimension).
    limit : float
        The loss that is good enough.
    largest : float
        No radius above it.
    """
    data = losses.data
    good = losses.own <= limit
    radii = torch.full((len(data),), largest if good else 0.0, dtype=torch.float64)
    if not good:
        return radii
    for chunk in directions:
        slopes = chunk[:, : data.width] @ data.rows.T
        steps = None if data.feeds is None else chunk[:, data.width :]
        for neuron in range(len(data)):
            radii[neuron] = _lowered(losses, neuron, slopes, steps, limit, float(radii[neuron]))
    return radii


def _lowered(
    losses: NeuronLosses,
    neuron: int,
    slopes: Tensor,
    steps: Tensor | None,
    limit: float,
    radius: float,
) -> float:
    """Lower one neuron's radius until none of the rays fails."""

    def along(rays: Tensor, at: float) -> Tensor:
        return losses.along(neuron, slopes[rays], None if steps is None else steps[rays], at)

    def halved(ray: Tensor, high: float) -> float:
        low = 0.0
        while high - low > max(PRECISION * high, SHORTEST):
            middle = (low + high) / 2
            low, high = (middle, high) if bool(along(ray, middle) <= limit) else (low, middle)
        return low

    everyone = torch.arange(len(slopes), device=slopes.device)
    if not bool(along(everyone[:1], radius) <= limit):
        radius = halved(everyone[:1], radius)
    # Once more over all at the end: a loss that falls again farther out is rare, not impossible.
    # At 0 rounding alone may exceed a limit that is the network's own loss.
    while radius > 0 and len(failing := everyone[along(everyone, radius) > limit]):
        while len(failing):
            found = along(failing, radius)
            worst = failing[found.argmax()]
            if bool(found.max() > limit):
                radius = halved(worst[None], radius)
            failing = failing[(found > limit) & (failing != worst)]
    return radius


def searched_loss_radii(
    losses: NeuronLosses, limit: float, method: Method, directions: int, seed: int, largest: float
) -> Tensor:
    """Return the radii of the papers' searches, one neuron and one point at a time."""
    data = losses.data
    radii = torch.zeros(len(data), dtype=torch.float64)
    if losses.own > limit:
        return radii
    centers = data.centers.float().cpu().numpy()
    for index in range(len(data)):

        def good(w: Vector, neuron: int = index) -> bool:
            point = torch.from_numpy(np.asarray(w))[None]
            # The centre comes back in single precision.
            return float(losses.at(neuron, point)[0]) <= limit * (1 + 1e-6)

        options = {"epsilon": limit, "largest": largest, "samples": directions, "seed": seed}
        if method == "bisection":
            found = bisect_radius(good, centers[index], tolerance=0.01, **options)  # type: ignore[arg-type]
        else:
            found = grow_radius(good, centers[index], **options)  # type: ignore[arg-type]
        radii[index] = found.value
    return radii
