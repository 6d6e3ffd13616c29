"""A linear layer and the data on which it is judged, and directions in its weight space.

Everything about the radius of a linear layer follows from one fact: along ``w = c + R u``
every class score is affine in R. `LayerData` holds c and the inputs, `Rays` the scores
at c and their slopes along a bunch of directions.

Decided here: data stay where they are and move to the layer's device in chunks, so
neither they nor the (samples x classes x directions) slopes have to fit at once. Random
directions are drawn one by one on the CPU, so that they depend on the seed alone, not on
the chunk size or the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gems_flwr.errors import ModelError
from gems_flwr.radii.quality import two_sided

CHUNK_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class LayerData:
    """A linear layer, its inputs and labels.

    Parameters
    ----------
    weight : tensor of shape (C, D)
        C = 1 is a logistic model of two classes. Its device and type are used throughout.
    bias : tensor of shape (C,), optional
        Left out for a layer without bias.
    inputs : tensor of shape (n, D)
        Inputs of the layer on the node's validation data.
    labels : int tensor of shape (n,)
        True classes.
    axes : tensor of shape (d,), optional
        Relative half-lengths of an ellipsoid's axes (Eq. 5 without R); a ball if left out.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    labels: Tensor
    axes: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.inputs.ndim != 2 or not len(self.inputs):
            shapes = f"{tuple(self.weight.shape)} and {tuple(self.inputs.shape)}"
            raise ModelError(f"weight, inputs: expected shapes (C, D) and (n, D), got {shapes}")
        if self.inputs.shape[1] != self.weight.shape[1]:
            got = self.inputs.shape[1]
            raise ModelError(f"inputs: expected {self.weight.shape[1]} features, got {got}")
        if self.labels.shape != self.inputs.shape[:1]:
            raise ModelError(f"labels: expected {len(self.inputs)}, got {self.labels.shape}")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.num_classes:
            raise ModelError(f"labels: expected 0 to {self.num_classes - 1}, got {low} to {high}")
        if self.axes is not None and self.axes.shape != (self.dimension,):
            raise ModelError(f"axes: expected {self.dimension} values, got {self.axes.shape}")

    @property
    def num_classes(self) -> int:
        """Classes told apart; 2 for a layer with one output."""
        return max(2, self.weight.shape[0])

    @property
    def dimension(self) -> int:
        """Weights and biases together."""
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

    @property
    def center(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """The layer as one flat vector: weight row by row, then bias."""
        parts = [self.weight.reshape(-1)] + ([] if self.bias is None else [self.bias])
        return torch.cat(parts).detach().to("cpu", torch.float32).numpy()

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Cut flat vectors (p, d) into weights (p, C, D) and biases (p, C)."""
        classes, features = self.weight.shape
        weights = flat[:, : classes * features].reshape(-1, classes, features)
        return weights, None if self.bias is None else flat[:, classes * features :]

    def augmented(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return inputs with a column of ones (if there is a bias) and labels of some rows."""
        if self.inputs.numel() * self.weight.element_size() <= CHUNK_BYTES:
            return self._whole[0][rows], self._whole[1][rows]
        return self._augment(rows)

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor]:
        return self._augment(slice(None))

    def _augment(self, rows: slice) -> tuple[Tensor, Tensor]:
        x = self.inputs[rows].to(self.weight)
        y = self.labels[rows].to(self.weight.device, torch.long)
        if self.bias is not None:
            x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        return x, y

    def matrix(self, flat: Tensor) -> Tensor:
        """Return flat vectors (p, d) as matrices (p, C, D + 1) for augmented inputs."""
        weights, biases = self.split(flat)
        return weights if biases is None else torch.cat([weights, biases[..., None]], dim=2)

    def flat(self, matrices: Tensor) -> Tensor:
        """Undo `matrix`."""
        if self.bias is None:
            return matrices.reshape(len(matrices), -1)
        return torch.cat([matrices[..., :-1].reshape(len(matrices), -1), matrices[..., -1]], dim=1)

    def center_matrix(self) -> Tensor:
        """Return the layer as one matrix (C, D + 1) for augmented inputs."""
        if self.bias is None:
            return self.weight.detach()
        return torch.cat([self.weight, self.bias[:, None]], dim=1).detach()

    def scores(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return class scores (n, classes) at the centre, and the labels."""
        x, y = self.augmented(rows)
        return two_sided(x @ self.center_matrix().T), y

    def row_chunks(self, values_per_row: int) -> Iterator[slice]:
        """Cut the samples so that ``values_per_row`` numbers each stay below the budget."""
        step = max(1, CHUNK_BYTES // (self.weight.element_size() * max(1, values_per_row)))
        for start in range(0, len(self.inputs), step):
            yield slice(start, start + step)

    def slopes(self, directions: Tensor, x: Tensor) -> Tensor:
        """Return how class scores change along directions, shape (n, classes, p)."""
        # One large product, directions last: reducing over a short last axis is slow.
        matrices = self.matrix(directions).transpose(0, 1)
        outputs, p, width = matrices.shape
        slopes = (x @ matrices.reshape(outputs * p, width).T).reshape(len(x), outputs, p)
        if outputs > 1:
            return slopes
        return torch.cat([torch.zeros_like(slopes), slopes], dim=1)

    def on_surface(self, directions: Tensor) -> Tensor:
        """Scale unit directions to the surface of the space with R = 1."""
        return directions if self.axes is None else directions * self.axes.to(directions)

    def unit_on_surface(self, pushes: Tensor) -> Tensor:
        """Return the surface points (R = 1) that go furthest along ``pushes``, row-wise."""
        scaled = self.on_surface(pushes)
        scaled = scaled / scaled.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return self.on_surface(scaled)


def random_directions(
    data: LayerData, count: int, seed: int, chunk: int | None = None
) -> Iterator[Tensor]:
    """Yield ``count`` uniformly random surface points in chunks.

    Parameters
    ----------
    data : LayerData
        Gives dimension, axes, device and type.
    count : int
        Number of directions, p in Algorithm 2.
    seed : int
        Seed of the generator; the same directions for every ``chunk``.
    chunk : int, optional
        Directions at a time; so many that their slopes stay below the budget if left out.
    """
    if chunk is None:
        slopes_bytes = data.weight.element_size() * len(data.inputs) * data.num_classes
        chunk = max(1, min(64, CHUNK_BYTES // slopes_bytes))
    for directions in unit_directions(data.dimension, count, seed, chunk, data.weight):
        yield data.on_surface(directions)


def unit_directions(
    dimension: int, count: int, seed: int, chunk: int, like: Tensor
) -> Iterator[Tensor]:
    """Yield ``count`` random unit vectors in chunks, on the device and of the type of ``like``."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, count, chunk):
        normal = torch.empty(min(chunk, count - start), dimension, dtype=torch.float32)
        for row in normal:
            row.normal_(generator=generator)
        normal = normal.to(like)
        yield normal / normal.norm(dim=1, keepdim=True)
