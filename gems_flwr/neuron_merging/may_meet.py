"""Which of many balls may meet: all pairs by one matrix product in single precision.

``|p - q|^2 <= (slack (r + s))^2`` is the product of a row made of (p, r) and one made of (q, s)
being at most 0, so two blocks of balls take one product and one comparison.

Decided here: this is a filter and says yes rather too often. Squared lengths are made a little
smaller, those of radii a little larger than they are, by more than rounding can do. Numbers are
taken around a common middle and in a common unit by the caller, so that none overflows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gems_flwr.typing import Float

Single = NDArray[np.float32]

# More than the relative error of a squared distance in single precision, in 1000 dimensions too.
NOISE = 5e-5
BLOCK = 256


def left_rows(p: Float, r: Float, slack: float = 1.0) -> Single:
    """Return rows of the first balls, of shape (n, d + 3)."""
    reach = slack**2 * (1 + NOISE)
    square = (1 - NOISE) * (p**2).sum(axis=1)
    return _single(p, square - reach * r**2, np.ones(len(p)), r)


def right_rows(q: Float, s: Float, slack: float = 1.0) -> Single:
    """Return rows of the second balls, of shape (m, d + 3)."""
    reach = slack**2 * (1 + NOISE)
    square = (1 - NOISE) * (q**2).sum(axis=1)
    return _single(-2 * q, np.ones(len(q)), square - reach * s**2, -2 * reach * s)


def pairs_that_may_meet(centers: Float, radii: Float) -> NDArray[np.bool_]:
    """Return for all pairs of n balls whether they may meet: False is a proof that they do not."""
    shifted = centers - centers.mean(axis=0)
    unit = float(max(np.abs(shifted).max(), radii.max())) or 1.0
    shifted, scaled = shifted / unit, radii / unit
    left, right = left_rows(shifted, scaled), right_rows(shifted, scaled)
    may = np.empty((len(centers), len(centers)), dtype=np.bool_)
    for start in range(0, len(centers), BLOCK):
        some = slice(start, start + BLOCK)
        may[some] = left[some] @ right.T <= 0
    return may


def _single(p: Float, *columns: Float) -> Single:
    rows = np.empty((len(p), p.shape[1] + len(columns)), dtype=np.float32)
    rows[:, : p.shape[1]] = p
    rows[:, p.shape[1] :] = np.column_stack(columns)
    return rows
