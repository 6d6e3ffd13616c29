"""The neurons of a hidden layer, the data on which they are judged, and how far one deviates.

2019, Eq. 3: a neuron w' is good enough if ``(1/n) sqrt(sum_i (g(w'x_i) - g(w x_i))^2)`` is at
most epsilon_j. The 2018 paper's neuron includes its outgoing weights v; what it does to the
network is then the contribution ``v g(w x)`` to the layer above, a vector per sample, and the
deviation is ``(1/n) ||v' g(w'x) - v g(w x)||_F`` over incoming weights, bias and v jointly.

Decided here:

- Eq. 3 divides by n *outside* the root, and so do we: the same epsilon allows more per sample
  the more samples there are. ``relative`` does away with this and with the layer's scale: the
  limit is epsilon times the neuron's own ``(1/n) ||z||``. A neuron that is silent on all data
  has no scale of its own and takes the mean of the others'; if all are silent, 1.
- A convolution's patches are rows like any other; `draw_rows` keeps their number bearable.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from gems_flwr.errors import ModelError
from gems_flwr.radii.activations import Activation
from gems_flwr.radii.layer_data import CHUNK_BYTES
from gems_flwr.typing import LOSS_MEASURES, NeuronMeasure


@dataclasses.dataclass(frozen=True, eq=False)
class NeuronData:
    """All neurons of a layer and their inputs.

    Parameters
    ----------
    weight : tensor of shape (L, D)
        Incoming weights, a neuron per row. Its device is used throughout, and its type if that
        is float64; float32 otherwise.
    bias : tensor of shape (L,), optional
        Left out for a layer without bias.
    inputs : tensor of shape (n, D)
        Inputs of the layer on the node's data; for a convolution, its patches.
    activation : Activation
        g.
    outgoing : tensor of shape (L, O), optional
        Weights by which each neuron feeds the next layer; part of the ball if given.

    Raises
    ------
    ModelError
        If a shape does not fit or a value is not finite.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    activation: Activation
    outgoing: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.inputs.ndim != 2 or not self.weight.numel():
            shapes = f"{tuple(self.weight.shape)} and {tuple(self.inputs.shape)}"
            raise ModelError(f"weight, inputs: expected shapes (L, D) and (n, D), got {shapes}")
        count, features = self.weight.shape
        if not len(self.inputs) or self.inputs.shape[1] != features:
            got = tuple(self.inputs.shape)
            raise ModelError(f"inputs: expected rows of {features} features, got shape {got}")
        if self.bias is not None and self.bias.shape != (count,):
            raise ModelError(f"bias: expected shape ({count},), got {tuple(self.bias.shape)}")
        if self.outgoing is not None:
            shape = tuple(self.outgoing.shape)
            if len(shape) != 2 or shape[0] != count or not shape[1]:
                raise ModelError(f"outgoing: expected shape ({count}, O), got {shape}")
        for name in ("weight", "bias", "inputs", "outgoing"):
            values = getattr(self, name)
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ModelError(f"{name}: expected finite values, got NaN or inf")

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def width(self) -> int:
        """Incoming weights and bias of one neuron together."""
        return self.weight.shape[1] + (self.bias is not None)

    @property
    def dimension(self) -> int:
        """Numbers that make up one neuron."""
        return self.width + (0 if self.outgoing is None else self.outgoing.shape[1])

    @cached_property
    def incoming(self) -> Tensor:
        """Weights and biases, shape (L, width)."""
        wide = self.weight.dtype == torch.float64
        weight = self.weight.detach().to(torch.float64 if wide else torch.float32)
        if self.bias is None:
            return weight
        return torch.cat([weight, self.bias.detach().to(weight)[:, None]], dim=1)

    @cached_property
    def feeds(self) -> Tensor | None:
        """Outgoing weights in the type of `incoming`, shape (L, O)."""
        return None if self.outgoing is None else self.outgoing.detach().to(self.incoming)

    @property
    def centers(self) -> Tensor:
        """All neurons as rows of one matrix, shape (L, dimension)."""
        parts = [self.incoming] + ([] if self.feeds is None else [self.feeds])
        return torch.cat(parts, dim=1)

    @cached_property
    def rows(self) -> Tensor:
        """Inputs with a column of ones if there is a bias, shape (n, width)."""
        x = self.inputs.detach().to(self.incoming)
        return x if self.bias is None else torch.cat([x, torch.ones_like(x[:, :1])], dim=1)

    @cached_property
    def before(self) -> Tensor:
        """What each neuron computes before its activation, shape (L, n)."""
        return self.incoming @ self.rows.T

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs at the centre, shape (L, n)."""
        return self.activation.function(self.before)

    @cached_property
    def feed_norms(self) -> Tensor:
        """Length of each neuron's outgoing weights; ones if they are not part of it."""
        if self.feeds is None:
            return torch.ones(len(self), dtype=torch.float64, device=self.weight.device)
        norms: Tensor = self.feeds.double().norm(dim=1)
        return norms

    def limits(self, epsilon: float, measure: NeuronMeasure = "absolute") -> Tensor:
        """Return the deviation allowed to each neuron, shape (L,), in float64."""
        if measure not in get_args(NeuronMeasure):
            raise ModelError(f"measure: expected one of {get_args(NeuronMeasure)}, got {measure!r}")
        if measure in LOSS_MEASURES:
            raise ModelError(f"measure {measure!r} is of the network, not of a neuron's output")
        if measure == "absolute":
            return torch.full_like(self.feed_norms, epsilon)
        own = self.outputs.double().norm(dim=1) * self.feed_norms / len(self.inputs)
        alive = own > 0
        fallback = own[alive].mean() if bool(alive.any()) else torch.ones_like(own[0])
        return epsilon * torch.where(alive, own, fallback)

    def importance(self, outgoing_norms: Tensor | None = None) -> Tensor:
        """Return what each neuron adds to the layer above on average, shape (L,).

        Parameters
        ----------
        outgoing_norms : tensor of shape (L,), optional
            Lengths of the outgoing weights; from `outgoing` if left out, ones if that is not
            given either.
        """
        norms = self.feed_norms if outgoing_norms is None else outgoing_norms.detach().double()
        if norms.shape != self.feed_norms.shape:
            raise ModelError(
                f"outgoing_norms: expected shape ({len(self)},), got {tuple(norms.shape)}"
            )
        return self.outputs.abs().double().mean(dim=1) * norms.to(self.feed_norms)


def neuron_deviation(data: NeuronData, neuron: int, points: Tensor) -> Tensor:
    """Return how far points deviate from one neuron.

    Parameters
    ----------
    data : NeuronData
        The layer.
    neuron : int
        Index of the neuron, below L.
    points : tensor of shape (p, d)
        Neurons to put in its place: incoming weights, bias if there is one, outgoing weights
        if they are part of it.

    Returns
    -------
    tensor of shape (p,)
        Left side of Eq. 3 (2019), or its version with outgoing weights, in float64.
    """
    if points.ndim != 2 or points.shape[1] != data.dimension:
        raise ModelError(f"points: expected {data.dimension} columns, got {tuple(points.shape)}")
    parts = []
    z, n = data.outputs[neuron].double(), len(data.inputs)
    step = max(1, CHUNK_BYTES // (16 * n))
    for start in range(0, len(points), step):
        some = points[start : start + step].to(data.incoming)
        moved = data.activation.function(some[:, : data.width] @ data.rows.T).double()
        change = moved - z
        squared = (change**2).sum(dim=1)
        if data.feeds is not None:
            # v'g' - v g = v (g' - g) + (v' - v) g'
            v = data.feeds[neuron].double()
            t = some[:, data.width :].double() - v
            squared = squared * (v @ v) + 2 * (t @ v) * (change * moved).sum(dim=1)
            squared = squared + (t**2).sum(dim=1) * (moved**2).sum(dim=1)
        parts.append(squared.clamp_min(0).sqrt() / n)
    return torch.cat(parts)


def draw_rows(inputs: Tensor, most: int, seed: int) -> Tensor:
    """Return at most so many rows, in their order, drawn without putting any back."""
    if len(inputs) <= most:
        return inputs
    generator = torch.Generator().manual_seed(seed % 2**63)
    chosen = torch.randperm(len(inputs), generator=generator)[:most].sort().values
    return inputs[chosen.to(inputs.device)]
