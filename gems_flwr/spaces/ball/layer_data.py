"""A linear layer, the data on which it is judged, and when it is good enough.

2019, Eq. 1: accuracy of at least epsilon. Along ``w = c + R u`` every class score is affine in R:
`LayerData` gives the scores at c and their slopes along a bunch of directions.

Decided here: a tie for the highest score counts as wrong (else the zero model would be perfect),
and "accuracy of at least epsilon" means at least ``ceil(epsilon * n)`` samples. A layer with one
output is a logistic model of two classes: its rival score is zero. Data move to the layer's device
in chunks, so that the (samples x classes x directions) slopes never have to fit at once. Random
directions are drawn one by one on the CPU: they depend on the seed alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gems_flwr.errors import ModelError

CHUNK_BYTES = 64 * 2**20


def required_correct(epsilon: float, count: int) -> int:
    """Return the smallest number of right answers among ``count`` that is good enough."""
    # The small term keeps 0.7 * 10 = 7.000000000000001 from asking for eight.
    return math.ceil(epsilon * count - 1e-9)


def two_sided(scores: Tensor) -> Tensor:
    """Return scores of shape (..., classes); one output becomes the pair (0, score)."""
    if scores.shape[-1] > 1:
        return scores
    return torch.cat([torch.zeros_like(scores), scores], dim=-1)


def class_margins(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the true class's score minus each class's score (n, C); infinite for itself."""
    index = labels[:, None]
    margins = scores.gather(1, index) - scores
    return margins.scatter(1, index, torch.inf)


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Return the share of class scores that are right: the model evaluation function."""
    right = class_margins(two_sided(scores), labels).amin(dim=1) > 0
    return float(right.sum()) / len(labels)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerData:
    """A linear layer, its inputs and labels on the node's validation data.

    The weight's device and type are used throughout; C = 1 is a logistic model of two classes.
    """

    weight: Tensor  # (C, D)
    bias: Tensor | None  # (C,), None for a layer without bias
    inputs: Tensor  # (n, D)
    labels: Tensor  # (n,)
    # Relative half-lengths of an ellipsoid's axes (d,), Eq. 5 without R; a ball if left out.
    axes: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = tuple(self.weight.shape), tuple(self.inputs.shape)
        if [len(shape) for shape in shapes] != [2, 2] or not shapes[1][0]:
            raise ModelError(f"weight, inputs: expected shapes (C, D) and (n, D), got {shapes}")
        if shapes[0][1] != shapes[1][1]:
            raise ModelError(f"inputs: expected {shapes[0][1]} features, got {shapes[1][1]}")
        if self.labels.shape != self.inputs.shape[:1]:
            raise ModelError(f"labels: expected {len(self.inputs)}, got {self.labels.shape}")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.num_classes:
            raise ModelError(f"labels: expected 0 to {self.num_classes - 1}, got {low} to {high}")

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
        return self.flat(self.center_matrix()[None])[0].to("cpu", torch.float32).numpy()

    def augmented(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return inputs with a column of ones (if there is a bias) and labels of some rows."""
        x = self.inputs[rows].to(self.weight)
        y = self.labels[rows].to(self.weight.device, torch.long)
        return x if self.bias is None else torch.cat([x, torch.ones_like(x[:, :1])], dim=1), y

    def matrix(self, flat: Tensor) -> Tensor:
        """Return flat vectors (p, d) as matrices (p, C, D + 1) for augmented inputs."""
        size = self.weight.numel()
        weights = flat[:, :size].reshape(-1, *self.weight.shape)
        return weights if self.bias is None else torch.cat([weights, flat[:, size:, None]], dim=2)

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
        return slopes if outputs > 1 else torch.cat([torch.zeros_like(slopes), slopes], dim=1)

    def on_surface(self, directions: Tensor) -> Tensor:
        """Scale unit directions to the surface of the space with R = 1."""
        return directions if self.axes is None else directions * self.axes.to(directions)


def random_directions(
    data: LayerData, count: int, seed: int, chunk: int | None = None
) -> Iterator[Tensor]:
    """Yield ``count`` uniformly random surface points in chunks.

    The same directions for every ``chunk``; by default so many at a time that their slopes stay
    below the budget.
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
