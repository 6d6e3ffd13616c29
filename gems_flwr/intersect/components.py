"""The low-rank moments of all nodes, kept as they came, and sums over them a few at a time.

A factor in int8 takes an eighth of what it does in double precision. Of thousands of nodes the
server therefore keeps what it received, and turns a few mixture components (a node's class, or a
cluster of it) at a time into numbers to compute with.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import LowRankCovariance, dense
from gems_flwr.typing import Float

# A block may take a quarter of what was received; but no less than this, for a step in Python must
# be worth while, and no more, for the processor's cache holds a few megabytes.
_SMALLEST_BLOCK_BYTES, _LARGEST_BLOCK_BYTES = 2**20, 2**22


@dataclasses.dataclass(frozen=True, eq=False)
class ComponentBlock:
    """Some consecutive components in double precision.

    Parameters
    ----------
    components : slice
        Which components these are.
    means, variances : arrays of shape (n, D)
        Mean inputs, and the diagonal parts of the covariances.
    factors : array of shape (sum of ranks, D)
        Columns of the factors as rows, one component's after the other's.
    present : bool array of shape (n, largest rank)
        Which columns a component has.
    """

    components: slice
    means: Float
    variances: Float
    factors: Float
    present: NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some consecutive components of one cone."""

    cone: ClassMomentCone
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankComponents:
    """The components of all cones with low-rank covariances, in order.

    Parameters
    ----------
    cones : tuple of ClassMomentCone
        As received; nothing of them is copied.
    """

    cones: tuple[ClassMomentCone, ...]

    @classmethod
    def of(cls, cones: Sequence[ClassMomentCone]) -> LowRankComponents:
        """Take the cones with low-rank covariances."""
        return cls(tuple(c for c in cones if isinstance(c.covariance, LowRankCovariance)))

    def __len__(self) -> int:
        return sum(len(cone.labels) for cone in self.cones)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes received."""
        return sum(cone.size_bytes for cone in self.cones)

    def blocks(self) -> Iterator[ComponentBlock]:
        """Yield all components, a few at a time."""
        first = 0
        for pieces in self._plan:
            last = first + sum(map(len, pieces))
            yield _decoded(pieces, slice(first, last))
            first = last

    def columns(self, features: slice) -> Iterator[tuple[NDArray[np.float32], Float]]:
        """Yield each cone's means and variances in some features, (components, features) each."""
        for cone in self.cones:
            covariance, components = _covariance(cone), range(len(cone.labels))
            factors = (covariance.factor(e)[features].astype(np.float64) for e in components)
            squares = np.array([(factor**2).sum(axis=1) for factor in factors])
            deviations = dense(covariance.deviations, slice(None), features).astype(np.float64)
            yield dense(cone.means, slice(None), features), squares + deviations**2

    @functools.cached_property
    def _plan(self) -> list[list[_Piece]]:
        """Return which components make up which block."""
        ends = self._ends()
        plan: list[list[_Piece]] = [[] for _ in ends]
        done, block = 0, 0
        for cone in self.cones:
            start, size = 0, len(cone.labels)
            while start < size:
                stop = min(size, start + ends[block] - done)
                plan[block].append(_Piece(cone, start, stop))
                done, start = done + stop - start, stop
                block += done == ends[block]
        return plan

    def _ends(self) -> list[int]:
        """Return where each block ends.

        Digits must not depend on where that is. So blocks are such that a vector instruction, of
        up to 16 numbers, never reaches over the end of one; and none is of a single component, for
        which linear algebra takes another way.
        """
        count = len(self)
        if not count:
            return []
        features, classes = self.cones[0].num_features, self.cones[0].num_classes
        ranks = sum(_covariance(c).rank(e) for c in self.cones for e in range(len(c.labels)))
        # A step of the objective makes an array of shape (n, C, D) beside the block itself.
        each = 8 * features * (ranks // count + 2 + classes)
        budget = min(max(self.size_bytes // 4, _SMALLEST_BLOCK_BYTES), _LARGEST_BLOCK_BYTES)
        run = 16 // math.gcd(16, classes)
        size = max(1, budget // each // run) * run
        return [*range(size, count - 1, size), count]


def _covariance(cone: ClassMomentCone) -> LowRankCovariance:
    assert isinstance(cone.covariance, LowRankCovariance)
    return cone.covariance


def _decoded(pieces: Sequence[_Piece], components: slice) -> ComponentBlock:
    count, features = components.stop - components.start, pieces[0].cone.num_features
    ranks = np.array([_covariance(p.cone).rank(e) for p in pieces for e in range(p.first, p.last)])
    means, variances = np.empty((count, features)), np.empty((count, features))
    factors = np.empty((int(ranks.sum()), features))
    first, column = 0, 0
    for piece in pieces:
        rows, mine = slice(first, first + len(piece)), slice(piece.first, piece.last)
        covariance = _covariance(piece.cone)
        means[rows] = dense(piece.cone.means, mine)
        variances[rows] = dense(covariance.deviations, mine)
        for component in range(piece.first, piece.last):
            own = covariance.factor(component).T
            factors[column : column + len(own)] = own
            column += len(own)
        first = rows.stop
    present = np.arange(ranks.max()) < ranks[:, None]
    return ComponentBlock(components, means, np.square(variances, out=variances), factors, present)


# As in `torch.sum` over a leading axis.
_RUN, _LEVELS = 16, 4


class CascadeSum:
    """Sum arrays in runs of 16, the runs' sums again in runs of 16, and so on.

    Rounding then grows with the logarithm of how many there are. The order is that of
    `torch.sum`, so that it does not matter in how many parts the arrays come.
    """

    def __init__(self) -> None:
        self._count, self._parts = 0, 0
        self._levels: list[Tensor] = []

    def add(self, terms: Tensor) -> None:
        """Add arrays that are stacked along the first axis."""
        self._parts += 1
        if self._parts == 1:
            # Of what does not fill its vectors torch has another order: all of it at once is its.
            self._first = terms.sum(dim=0)
            self._levels = [torch.zeros_like(self._first) for _ in range(_LEVELS)]
        for term in terms:
            self._levels[0] += term
            self._count += 1
            self._carry()

    def _carry(self) -> None:
        """Hand on the sum of every run that is complete."""
        run = _RUN
        for level in range(1, _LEVELS):
            if self._count % run:
                return
            self._levels[level] += self._levels[level - 1]
            self._levels[level - 1].zero_()
            run *= _RUN

    def total(self) -> Tensor:
        """Return the sum of all that was added; at least one array must have been."""
        if self._parts == 1:
            return self._first
        total, *others = self._levels
        for other in others:
            total = total + other
        return total
