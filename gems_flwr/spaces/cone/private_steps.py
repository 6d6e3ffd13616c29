"""A linear layer from sums with discrete noise: sums in whole numbers, and steps along them.

**The sums.** Discrete noise must lie on the grid of what it is added to, and rounding a *sum* would
let one sample change every number by a step more. So samples are rounded, to vectors ``q`` of whole
numbers; their sums are exact (doubles hold whole numbers up to 2^53), and so is the length that one
sample adds: `MEANS` for ``q``, a count and its squared length in the row of its class; `SPREAD`^2
for ``q q^T`` of centred inputs; `GRADIENT` for ``r q^T``, where r is the rounded residual. The
lengths are such that rounding is far below the noise of any epsilon below 100 (by tests).

**The layer.** Only totals with noise are known: no line search, no loss. The first layer is least
squares on one-hot labels by the noisy moments. Then come steps along noisy gradients,
preconditioned by the noisy spread ``U diag(w) U^T``, with Nesterov's momentum::

    m' = beta m - rate g(V + beta m) U diag(1 / (w + damping)) U^T,   V' = V + m'

Where the data hardly vary Newton's step would be made of noise, hence the damping, which grows with
the noise. Decided here, on validation data of MNIST (pixels and random filters, epsilon 1, 3 and
10): centring by the noisy mean, a clip at `REACH` of the typical distance from it, the constants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from gems_flwr.devices import eigenpairs, solves_elsewhere
from gems_flwr.errors import SpaceError
from gems_flwr.typing import Float

# Longest that a sample's part of each sum may be; see above.
MEANS, SPREAD, GRADIENT = 2**12, 2**8, 2**24
# Inputs of the gradient, without the constant; and the constant.
CENTRED, CONSTANT = 2**10, 300
# Of the count and of the squared length beside an input of length 1.
BESIDE = 0.3
_BESIDE_LENGTH = math.sqrt(1 + 2 * BESIDE**2)
# Of the typical distance from the mean: where centred inputs are clipped.
REACH = 0.8
# Of a sample's gradient, in units of clipped inputs.
LONGEST = 0.25
# Logits of the first layer over least squares on one-hot labels.
_STEEPER = 6.0
RATE, MOMENTUM = 40.0, 0.85
# Without noise, and for each unit of it.
DAMPING, NOISE_DAMPING = 0.008, 70.0
_CHUNK = 4096

Whole = NDArray[np.int64]


def whole_mean_sums(inputs: Float, labels: Whole, classes: int, clip: float) -> dict[str, Whole]:
    """Return the sums from which class means are made, of inputs (n, D) shortened to `clip`.

    ``sums`` (C, D), ``counts`` (C,) and ``squares`` (1,), in units of `mean_units`.
    """
    features = inputs.shape[1]
    total = np.zeros((classes, features + 2))
    for rows in _chunks(len(inputs)):
        # One vector, so that one length bounds all three.
        vectors = np.ones((len(inputs[rows]), features + 2))
        lengths = np.linalg.norm(inputs[rows] / clip, axis=1, keepdims=True)
        vectors[:, :features] = inputs[rows] / clip / np.maximum(lengths, 1.0)
        vectors[:, features + 1] = (vectors[:, :features] ** 2).sum(axis=1)
        vectors[:, features:] *= BESIDE
        total += np.eye(classes)[labels[rows]].T @ whole_vectors(vectors / _BESIDE_LENGTH, MEANS)
    whole = total.astype(np.int64)
    squares = whole[:, features + 1].sum(keepdims=True)
    return {"sums": whole[:, :features], "counts": whole[:, features], "squares": squares}


def mean_units(features: int, clip: float) -> dict[str, float]:
    """Return what the numbers of `whole_mean_sums` are to be multiplied by."""
    step = _BESIDE_LENGTH / _room(MEANS, features + 2)
    # All samples have the same count, which is rounded once.
    count = 1 / float(np.rint(BESIDE / step))
    return {"sums": step * clip, "counts": count, "squares": step / BESIDE * clip**2}


def spread_sums(inputs: Float, center: Float, clip: float) -> dict[str, Whole]:
    """Return the second moments of inputs (n, D) around `center` (D,), shortened to `clip`.

    The ``diagonal`` (D,), and the ``corner`` above it as one row, in units of `spread_unit`. In a
    symmetric matrix's length the corner counts twice: its noise has half the variance.
    """
    total = np.zeros((inputs.shape[1], inputs.shape[1]))
    for rows in _chunks(len(inputs)):
        vectors = whole_vectors((inputs[rows] - center) / clip, SPREAD)
        total += vectors.T @ vectors
    whole = total.astype(np.int64)
    return {"diagonal": np.diag(whole), "corner": whole[np.triu_indices(len(whole), 1)]}


def spread_unit(features: int) -> float:
    """Return what the numbers of `spread_sums` are to be multiplied by, over the squared clip."""
    return 1 / _room(SPREAD, features) ** 2


def gradient_sums(
    inputs: Float,
    labels: Whole,
    weight: Float,
    bias: Float,
    center: Float,
    clip: float,
    longest: float,
) -> dict[str, Whole]:
    """Return the gradient of the softmax loss of a layer, each sample's no longer than a bound.

    The layer, weight (C, D) and bias (C,), is applied to the inputs as they are shortened. A
    sample's gradient is shortened to `longest` in units of centred inputs over `clip`. The
    ``gradient`` (C, D + 1) is by the weights of centred inputs over `clip` and, last, by that of
    the constant.
    """
    classes, features = weight.shape
    total = np.zeros((classes, features + 1))
    unit = _room(CENTRED, features)
    finest = 1 / (unit * gradient_unit(longest))
    for rows in _chunks(len(inputs)):
        whole = whole_vectors((inputs[rows] - center) / clip, CENTRED)
        scores = (whole * (clip / unit)) @ weight.T + (weight @ center + bias)
        residuals = softmax(scores, axis=1)
        residuals[np.arange(len(whole)), labels[rows]] -= 1
        whole = np.column_stack([whole, np.full(len(whole), float(CONSTANT))])
        # A length of whole numbers that the product stays within, rounding included.
        room = GRADIENT / np.linalg.norm(whole, axis=1) - math.sqrt(classes) / 2
        lengths = np.maximum(np.linalg.norm(residuals, axis=1), 1e-300)
        factors = np.minimum(finest, room / lengths)
        total += np.rint(residuals * factors[:, None]).T @ whole
    return {"gradient": total.astype(np.int64)}


def gradient_unit(longest: float) -> float:
    """Return what the numbers of `gradient_sums` are to be multiplied by."""
    return longest / GRADIENT


def constant(features: int) -> float:
    """Return the constant beside centred inputs, in units of their clip."""
    return CONSTANT / _room(CENTRED, features)


def whole_vectors(vectors: Float, longest: int) -> Float:
    """Return vectors (n, D) as whole numbers of a length of `longest` at most; long ones shortened.

    A SpaceError if there are so many numbers that only rounding would be left.
    """
    # Every number moves by half a step at most.
    room = _room(longest, vectors.shape[1])
    if room < longest / 2:
        raise SpaceError("inputs", f"fewer than {longest**2} features", vectors.shape[1])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(np.rint(vectors * (room / np.maximum(lengths, 1.0))))


def _room(longest: int, numbers: int) -> float:
    return longest * (1 - 1e-9) - math.sqrt(numbers) / 2


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, _CHUNK):
        yield slice(start, start + _CHUNK)


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyMeans:
    """What a private total of means says."""

    counts: Float  # samples of each class, none below 1 (C,)
    means: Float  # of each class (C, D)
    distance: float  # root of the mean squared distance from the common mean

    @classmethod
    def of(cls, sums: Float, counts: Float, squares: float, clip: float) -> NoisyMeans:
        """Read the totals of `whole_mean_sums`."""
        units = mean_units(sums.shape[1], clip)
        there = np.maximum(counts * units["counts"], 1.0)
        center = sums.sum(axis=0) * units["sums"] / there.sum()
        spread = float(squares) * units["squares"] / there.sum() - float(center @ center)
        # Of noise alone there may be nothing left; inputs are no longer than the clip in any case.
        distance = math.sqrt(max(spread, (1e-3 * clip) ** 2))
        return cls(there, sums * units["sums"] / there[:, None], distance)

    @property
    def total(self) -> float:
        """How many samples there are."""
        return float(self.counts.sum())

    @property
    def center(self) -> Float:
        """The common mean."""
        return np.asarray(self.counts @ self.means / self.total)

    @property
    def clip(self) -> float:
        """Where centred inputs are clipped."""
        return REACH * self.distance


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """The second moments of centred inputs over their clip, and of the constant beside them."""

    values: Float  # in order of the vectors, none below 0 (D + 1,)
    vectors: Float  # as columns (D + 1, D + 1)

    @classmethod
    def of(cls, diagonal: Float, corner: Float, samples: float, device: str = "cpu") -> Spread:
        """Read the totals of `spread_sums` over so many samples."""
        features = len(diagonal)
        matrix = np.zeros((features, features))
        matrix[np.triu_indices(features, 1)] = corner
        matrix += matrix.T
        matrix[np.diag_indices(features)] = diagonal
        matrix = matrix * (spread_unit(features) / samples)
        solve = partial(eigenpairs, device=device) if solves_elsewhere(device) else np.linalg.eigh
        values, vectors = solve(matrix)
        all_vectors = np.eye(features + 1)
        all_vectors[:features, :features] = vectors
        all_values = np.append(np.maximum(values, 0.0), constant(features) ** 2)
        return cls(all_values, all_vectors)

    def solve(self, rows: Float, damping: float) -> Float:
        """Return rows times the inverse of the damped matrix."""
        return np.asarray((rows @ self.vectors / (self.values + damping)) @ self.vectors.T)


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateState:
    """Where the steps have come to, made of noisy totals: keeping it costs no privacy."""

    center: Float  # what inputs are centred by (D,)
    clip: float  # length to which they are shortened then
    samples: float  # how many there are
    values: Float  # the `Spread` of centred inputs
    vectors: Float
    layer: Float  # weights of centred inputs over their clip, and of the constant (C, D + 1)
    momentum: Float  # the last step (C, D + 1)
    damping: float  # of all steps, above 0

    @classmethod
    def first(cls, means: NoisyMeans, spread: Spread, noise: float) -> PrivateState:
        """Return least squares on one-hot labels.

        `noise` is the deviation of the numbers of the mean gradients that follow, over `LONGEST`.
        """
        shares = means.counts / means.total
        off = (means.means - means.center) / means.clip
        joint = np.column_stack([shares[:, None] * off, shares * constant(means.means.shape[1])])
        damping = DAMPING + NOISE_DAMPING * noise
        layer, still = _STEEPER * spread.solve(joint, damping), np.zeros_like(joint)
        about = means.center, means.clip, means.total, spread.values, spread.vectors
        return cls(*about, layer, still, damping)

    @property
    def ahead(self) -> Float:
        """Where the next gradient is wanted."""
        return self.layer + MOMENTUM * self.momentum

    def stepped(self, gradient: Float) -> PrivateState:
        """Step along a total of `gradient_sums`, taken at `ahead`."""
        mean = gradient * (gradient_unit(LONGEST) / self.samples)
        spread = Spread(self.values, self.vectors)
        step = MOMENTUM * self.momentum - RATE * spread.solve(mean, self.damping)
        return dataclasses.replace(self, layer=self.layer + step, momentum=step)

    def plain(self, layer: Float) -> tuple[Float, Float]:
        """Return weight (C, D) and bias (C,) of a layer for inputs as they are."""
        weight = layer[:, :-1] / self.clip
        return weight, layer[:, -1] * constant(weight.shape[1]) - weight @ self.center
