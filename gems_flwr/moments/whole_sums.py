"""Sums over samples in whole numbers, of which one sample changes a known length at most.

What is released with discrete noise must lie on the noise's grid. Rounding a *sum* would let
one sample change every number by a step more, the root of their number in length. So it
is the samples that are rounded, and everything is made of them in whole numbers: an input becomes a
vector ``q`` of whole numbers no longer than L, a residual one no longer than what is left of the
bound. Sums of ``q``, of ``q q^T`` and of ``r q^T`` are then exact (doubles hold whole numbers up
to 2^53, in whatever order they are added), and so is the length that one sample adds:

=========  =============================================  =================================
sum        of each sample                                 its length
=========  =============================================  =================================
means      ``q``, a count and its squared length, in the  `MEANS`
           row of its class
spread     ``q q^T``, of centred inputs                   `SPREAD`^2 (Frobenius)
gradient   ``r q^T``, of centred inputs with a constant   `GRADIENT`
=========  =============================================  =================================

Decided here: the lengths, so that rounding is far below the noise of any epsilon below 100 (by
tests) and the rings have few bits. Inputs that are longer than the clip are shortened to it; a
gradient that is longer than its clip likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.typing import Float

# Longest that a sample's part of each sum may be; see above.
MEANS, SPREAD, GRADIENT = 2**12, 2**8, 2**24
# Inputs of the gradient, without the constant; and the constant.
CENTRED, CONSTANT = 2**10, 300
# Of the count and of the squared length beside an input of length 1.
BESIDE = 0.3

_CHUNK = 4096

Whole = NDArray[np.int64]


def rounded(vectors: Float, longest: int) -> Float:
    """Return vectors of length 1 at most as whole numbers of a length of `longest` at most.

    Parameters
    ----------
    vectors : array of shape (n, D)
        Longer ones are shortened.
    longest : int
        Above the root of D.

    Raises
    ------
    SpaceError
        If there are so many numbers that nothing but rounding would be left.
    """
    # Every number moves by half a step at most; and doubles are rounded, too.
    room = _room(longest, vectors.shape[1])
    if room < longest / 2:
        raise SpaceError("inputs", f"fewer than {longest**2} features", vectors.shape[1])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(np.rint(vectors * (room / np.maximum(lengths, 1.0))))


def mean_sums(inputs: Float, labels: Whole, classes: int, clip: float) -> dict[str, Whole]:
    """Return the sums from which class means are made.

    Parameters
    ----------
    inputs : array of shape (n, D)
        Of the linear layer.
    labels : int array of shape (n,)
        True classes.
    classes : int
        How many there are.
    clip : float
        Length to which inputs are shortened, above 0.

    Returns
    -------
    dict
        ``sums`` of shape (C, D), ``counts`` (C,) and ``squares`` (1,), in units of `mean_units`.
    """
    features = inputs.shape[1]
    sums, counts, squares = np.zeros((classes, features)), np.zeros(classes), 0.0
    for rows in _chunks(len(inputs)):
        # One vector, so that one length bounds all three.
        vectors = np.ones((len(inputs[rows]), features + 2))
        vectors[:, :features] = _shortened(inputs[rows] / clip)
        vectors[:, features + 1] = (vectors[:, :features] ** 2).sum(axis=1)
        vectors[:, features:] *= BESIDE
        whole = rounded(vectors / _beside_length(), MEANS)
        chosen = np.eye(classes)[labels[rows]]
        sums += chosen.T @ whole[:, :features]
        counts += chosen.T @ whole[:, features]
        squares += whole[:, features + 1].sum()
    found = {"sums": sums, "counts": counts, "squares": np.array([squares])}
    return {name: array.astype(np.int64) for name, array in found.items()}


def mean_units(features: int, clip: float) -> dict[str, float]:
    """Return what the numbers of `mean_sums` are to be multiplied by."""
    step = _beside_length() / _room(MEANS, features + 2)
    # All samples have the same count, which is rounded once.
    count = 1 / float(np.rint(BESIDE / step))
    return {"sums": step * clip, "counts": count, "squares": step / BESIDE * clip**2}


def spread_sums(inputs: Float, center: Float, clip: float) -> dict[str, Whole]:
    """Return the second moments of centred inputs.

    Parameters
    ----------
    inputs : array of shape (n, D)
        Of the linear layer.
    center : array of shape (D,)
        What is taken from them.
    clip : float
        Length to which centred inputs are shortened, above 0.

    Returns
    -------
    dict
        The ``diagonal`` (D,), and the ``corner`` above it as one row, in units of `spread_unit`.
        In a symmetric matrix's length the corner counts twice: its noise has half the variance.
    """
    features = inputs.shape[1]
    total = np.zeros((features, features))
    for rows in _chunks(len(inputs)):
        whole = rounded((inputs[rows] - center) / clip, SPREAD)
        total += whole.T @ whole
    above = np.triu_indices(features, 1)
    found = {"diagonal": np.diag(total), "corner": total[above]}
    return {name: array.astype(np.int64) for name, array in found.items()}


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

    Parameters
    ----------
    inputs, labels
        As in `mean_sums`.
    weight, bias : array of shape (C, D), array of shape (C,)
        The layer. It is applied to the inputs as they are shortened.
    center, clip
        As in `spread_sums`.
    longest : float
        Length to which a sample's gradient is shortened, in units of centred inputs over `clip`,
        above 0.

    Returns
    -------
    dict
        The ``gradient`` (C, D + 1) by the weights of centred inputs over `clip` and, last, by
        that of the constant `constant`; in units of `gradient_unit`.
    """
    classes, features = weight.shape
    total = np.zeros((classes, features + 1))
    unit = _room(CENTRED, features)
    finest = 1 / (unit * gradient_unit(longest))
    for rows in _chunks(len(inputs)):
        whole = rounded((inputs[rows] - center) / clip, CENTRED)
        scores = (whole * (clip / unit)) @ weight.T + (weight @ center + bias)
        residuals = _softmax(scores)
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


def _room(longest: int, numbers: int) -> float:
    return longest * (1 - 1e-9) - math.sqrt(numbers) / 2


def _beside_length() -> float:
    return math.sqrt(1 + 2 * BESIDE**2)


def _shortened(vectors: Float) -> Float:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1.0))


def _softmax(scores: Float) -> Float:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, _CHUNK):
        yield slice(start, start + _CHUNK)
