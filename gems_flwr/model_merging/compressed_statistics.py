"""Statistics in as few bytes as the model has, or half of that (after Jhunjhunwala et al. 2024).

FedFisher sends no more than an average would: the model in 16 bits, and with the other half of the
bytes what it is merged by. A Fisher diagonal is rounded to 16 bits. Kronecker factors are cut off
after a few singular values, one number of them for all layers, and rounded to about 8 bits.

Decided here:

- A second moment is symmetric and not negative, so one set of vectors does where FedFisher sends
  two: A ≈ L Lᵀ + D, with the columns of L the first eigenvectors times the root of their
  eigenvalue, in 8 bits and a scale for each.
- D, a diagonal, has what L lacks of A's: all variances arrive. Nothing that is sent can have a
  negative variance, whoever sends it.
- Fisher diagonals and D travel as roots, in 16 bits or 8, with a scale for each layer: rounded
  linearly, most of a Fisher diagonal would be 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import OptionError
from gems_flwr.model_merging.layer_statistics import (
    SYMMETRIC,
    Kind,
    Method,
    Statistics,
    statistics_shapes,
)
from gems_flwr.typing import Arrays, Float

_COLUMN_CODE, _ROOT_CODES = 127, {8: 255, 16: 65535}
_SCALE_BYTES = 4
# Of a factor's diagonal D.
_REST_BYTES = 2


@dataclasses.dataclass(frozen=True)
class CompressionPlan:
    """How statistics are rounded; node and server make the same one of request and shapes.

    Parameters
    ----------
    shapes : mapping
        Of every statistic, by weight and kind.
    rank : int
        Directions of each second moment at most; those of small ones are all of them.
    bits : {8, 16}
        Of a root.
    """

    shapes: Mapping[str, Mapping[Kind, tuple[int, int]]]
    rank: int
    bits: int

    def entries(self) -> Iterator[tuple[str, Kind, tuple[int, int]]]:
        """Yield the statistics in the order in which they travel."""
        for weight, kinds in self.shapes.items():
            for kind, shape in kinds.items():
                yield weight, kind, shape

    def rank_of(self, shape: tuple[int, int]) -> int:
        """Return how many directions of a second moment are sent."""
        return min(self.rank, shape[0])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many codes of columns, codes of roots and scales there are in a message."""
        columns = roots = scales = 0
        for _, kind, shape in self.entries():
            if kind in SYMMETRIC:
                rank = self.rank_of(shape)
                columns += rank * shape[0]
                roots += shape[0]
                scales += rank + 1
            else:
                roots += math.prod(shape)
                scales += 1
        return columns, roots, scales


@dataclasses.dataclass(frozen=True, eq=False)
class PackedStatistics:
    """All statistics of a node: codes one after the other, and what they are to be multiplied by.

    Parameters
    ----------
    columns : ndarray of int8
        Of the directions of second moments.
    roots : ndarray of uint8 or uint16
        Of Fisher diagonals, and of what directions lack of variances.
    scales : ndarray of float32
        One for each direction and each set of roots.
    """

    columns: NDArray[np.int8]
    roots: NDArray[np.unsignedinteger]
    scales: NDArray[np.float32]


def compression_plan(method: Method, arrays: Arrays, share: float) -> CompressionPlan:
    """Return how the statistics of a method fit into a share of the model's bytes.

    Parameters
    ----------
    method : one of `gems_flwr.model_merging.layer_statistics.NEEDED`
        What they are for.
    arrays : mapping from str to ndarray
        The model, which counts in single precision.
    share : float
        Bytes of the statistics relative to the model's, above 0. The scales of Fisher diagonals,
        4 bytes for each layer, come on top.

    Raises
    ------
    OptionError
        If so few bytes do not do.
    """
    shapes = statistics_shapes(method, arrays)
    room = share * 4 * sum(array.size for array in arrays.values())
    if not any(kind in SYMMETRIC for kinds in shapes.values() for kind in kinds):
        bits = 16 if share >= 0.5 else 8
        if share < 0.25:
            raise OptionError(
                f"a Fisher diagonal needs a share of at least 0.25 of the model, got {share:g}"
            )
        return CompressionPlan(shapes, 0, bits)
    sides = [shape[0] for kinds in shapes.values() for shape in kinds.values()]

    def needed(rank: int) -> int:
        return sum(
            min(rank, d) * (d + _SCALE_BYTES) + _REST_BYTES * d + _SCALE_BYTES for d in sides
        )

    rank = max((r for r in range(1, max(sides) + 1) if needed(r) <= room), default=0)
    if not rank:
        least = needed(1) / (room / share)
        raise OptionError(
            f"one direction of each second moment needs a share of {least:.3g} of the model, got "
            f"{share:g}"
        )
    return CompressionPlan(shapes, rank, 16)


def pack_statistics(statistics: Statistics, plan: CompressionPlan) -> PackedStatistics:
    """Return statistics as codes."""
    columns: list[NDArray[np.int8]] = []
    roots: list[NDArray[np.unsignedinteger]] = []
    scales: list[NDArray[np.float32]] = []
    for weight, kind, shape in plan.entries():
        rest = statistics[weight][kind].astype(np.float64)
        if kind in SYMMETRIC:
            codes, steps = _directions(rest, plan.rank_of(shape))
            columns.append(codes.ravel())
            scales.append(steps)
            lengths = _columns(codes, steps)
            rest = np.diagonal(rest) - np.sum(lengths**2, axis=1)
        root = np.sqrt(np.maximum(rest, 0.0)).ravel()
        most = _ROOT_CODES[plan.bits]
        step = np.float32(root.max(initial=0.0) / most)
        # A scale that single precision rounded down could lift the largest above the last code.
        codes_of_roots = np.rint(root / step) if step > 0 else np.zeros_like(root)
        roots.append(np.minimum(codes_of_roots, most).astype(_root_type(plan.bits)))
        scales.append(np.array([step], np.float32))
    return PackedStatistics(
        np.concatenate([np.zeros(0, np.int8), *columns]),
        np.concatenate(roots),
        np.concatenate(scales),
    )


def unpack_statistics(packed: PackedStatistics, plan: CompressionPlan) -> Statistics:
    """Return the statistics that codes stand for, in double precision.

    Parameters
    ----------
    packed : PackedStatistics
        Of the sizes that the plan has, with scales that are finite and not negative.
    plan : CompressionPlan
        What they were made by.
    """
    found: dict[str, dict[Kind, NDArray]] = {weight: {} for weight in plan.shapes}
    columns, roots = packed.columns, packed.roots
    scales = packed.scales.astype(np.float64)
    for weight, kind, shape in plan.entries():
        matrix: Float = np.zeros(shape)
        if kind in SYMMETRIC:
            rank = plan.rank_of(shape)
            codes, columns = columns[: rank * shape[0]], columns[rank * shape[0] :]
            steps, scales = scales[:rank], scales[rank:]
            lengths = _columns(codes.reshape(shape[0], rank), steps)
            matrix = lengths @ lengths.T
            # To the last bit, whoever multiplies.
            matrix = (matrix + matrix.T) / 2
        count = shape[0] if kind in SYMMETRIC else math.prod(shape)
        root, roots = roots[:count].astype(np.float64) * scales[0], roots[count:]
        scales = scales[1:]
        if kind in SYMMETRIC:
            matrix[np.diag_indices_from(matrix)] += root**2
        else:
            matrix = (root**2).reshape(shape)
        found[weight][kind] = matrix
    return found


def _root_type(bits: int) -> np.dtype:
    return np.dtype(np.uint8 if bits == 8 else np.uint16)


def _directions(moment: Float, rank: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return codes of shape (d, rank) and scales of the largest directions."""
    values, vectors = np.linalg.eigh(moment)
    first = np.arange(len(values))[::-1][:rank]
    columns = vectors[:, first] * np.sqrt(np.maximum(values[first], 0.0))
    steps = (np.abs(columns).max(axis=0) / _COLUMN_CODE).astype(np.float32)
    # In double precision: the reciprocal of a tiny step is finite there.
    inverse = np.divide(1.0, steps.astype(np.float64), out=np.zeros(len(steps)), where=steps > 0)
    codes = np.clip(np.rint(columns * inverse), -_COLUMN_CODE, _COLUMN_CODE)
    return codes.astype(np.int8), steps


def _columns(codes: NDArray[np.int8], scales: NDArray) -> Float:
    return codes.astype(np.float64) * scales.astype(np.float64)
