"""Covariances of the mixture components of a class-moment cone: full, or low rank plus diagonal.

Beyond the papers, which name richer spaces as the way forward (2019, Section 4.6). A full
covariance of D features is sent as its upper triangle, ``4 D (D + 1) / 2`` bytes. A low-rank
one is ``F F^T + diag(s^2)``, with F of shape (D, r), r the same for all components or not; F and
s may be in int8.

The papers send 32-bit weights. A class moment needs less: the covariance factor only has to
give the spread of a margin. In eight bits an array is signed codes times a scale per group. Codes
run from -127 to 127, the scale is the largest absolute value of the group over 127, so that zero
stays zero and rounding is off by half a step at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.bounds import MAX_MOMENT, MAX_WEIGHT
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.checks import check_array, take

LEVELS = 127


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """Int8 codes and the scales they are multiplied with.

    Parameters
    ----------
    codes : int8 array
        Values from -127 to 127.
    scales : float32 array
        Same number of axes as ``codes``, length 1 or equal on each; not negative.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]

    def __post_init__(self) -> None:
        codes = np.asarray(self.codes)
        if codes.dtype != np.int8:
            raise SpaceError("codes", "dtype int8", f"dtype {codes.dtype}")
        scales = np.asarray(self.scales)
        fits = scales.ndim == codes.ndim and all(
            s in (1, c) for s, c in zip(scales.shape, codes.shape, strict=True)
        )
        if not fits:
            raise SpaceError("scales", f"a shape that broadcasts to {codes.shape}", scales.shape)
        set_ = object.__setattr__
        set_(self, "codes", check_array("codes", codes, codes.shape, LEVELS, np.int8))
        set_(self, "scales", check_array("scales", scales, scales.shape, MAX_WEIGHT))
        if float(self.scales.min(initial=0.0)) < 0:
            raise SpaceError("scales", "values of at least 0", float(self.scales.min()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that is stood for."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return int(self.codes.nbytes + self.scales.nbytes)

    def dense(self, *part: slice) -> NDArray[np.float32]:
        """Return the values as float32: all of them, or a part of the first axes."""
        # An axis of length 1 has the one scale that all of the part share.
        axes = zip(part, self.scales.shape, strict=False)
        scales = self.scales[tuple(p if length > 1 else slice(None) for p, length in axes)]
        return self.codes[part].astype(np.float32) * scales


def quantize(
    values: ArrayLike, axis: int, round_up: bool = False, least_step: ArrayLike = 0.0
) -> QuantizedArray:
    """Return ``values`` in int8, one scale per group.

    Parameters
    ----------
    values : array
        What to store.
    axis : int
        The axis along which one scale is shared.
    round_up : bool
        Round away from zero, so that a standard deviation is never understated.
    least_step : float or array that broadcasts to the scales, default 0
        Smallest scale of a group: coarser than eight bits need where values must not be told
        that precisely.
    """
    array = np.asarray(values, dtype=np.float64)
    scales = np.abs(array).max(axis=axis, keepdims=True) / LEVELS
    scales = np.where(scales > 0, np.maximum(scales, least_step), 0.0)
    safe = np.where(scales > 0, scales, 1.0)
    # The float32 scale is what the reader multiplies with, so codes are made from it.
    stored = np.nextafter(safe.astype(np.float32), np.float32(np.inf), dtype=np.float32)
    codes = np.clip(_codes(array, stored.astype(np.float64), round_up), -LEVELS, LEVELS)
    return QuantizedArray(codes.astype(np.int8), np.where(scales > 0, stored, 0).astype(np.float32))


def rounded(values: ArrayLike, step: ArrayLike, round_up: bool = False) -> NDArray[np.float64]:
    """Return ``values`` as multiples of ``step``; a step of 0 leaves them as they are."""
    array, steps = np.asarray(values, dtype=np.float64), np.asarray(step, dtype=np.float64)
    safe = np.where(steps > 0, steps, 1.0)
    return np.asarray(np.where(steps > 0, _codes(array, safe, round_up) * safe, array))


def _codes(array: NDArray[np.float64], steps: NDArray[np.float64], up: bool) -> NDArray[np.float64]:
    ratio = array / steps
    if up:
        return np.asarray(np.sign(ratio) * np.ceil(np.abs(ratio) - 1e-9))
    return np.asarray(np.rint(ratio))


Values = NDArray[np.float32] | QuantizedArray


def dense(values: Values, *part: slice) -> NDArray[np.float32]:
    """Return plain float32 values, whether they are stored in int8 or not.

    All of them, or a part of the first axes: of some components, of some features.
    """
    return values.dense(*part) if isinstance(values, QuantizedArray) else values[part]


def check_values(key: str, values: object, shape: tuple[int | None, ...]) -> Values:
    """Return ``values`` checked; int8 values stay as they are."""
    if isinstance(values, QuantizedArray):
        check_array(key, values.dense(), shape)
        return values
    return check_array(key, values, shape)


def select_values(values: Values, keep: NDArray[np.bool_]) -> Values:
    """Return the values of some components (the first axis), stored as they were."""
    if isinstance(values, QuantizedArray):
        scales = values.scales if len(values.scales) == 1 else values.scales[keep]
        return QuantizedArray(values.codes[keep], scales)
    return np.asarray(values)[keep]


def pack_values(key: str, values: Values) -> dict[str, NDArray[Any]]:
    """Return the arrays that `unpack_values` turns back into ``values``."""
    if isinstance(values, QuantizedArray):
        return {f"{key}.codes": values.codes, f"{key}.scales": values.scales}
    return {key: values}


def unpack_values(key: str, arrays: Mapping[str, Any]) -> Any:
    """Return the values stored under ``key``, in int8 if their codes are there."""
    if f"{key}.codes" in arrays:
        scales = take(arrays, f"{key}.scales", "the int8 arrays")
        return QuantizedArray(arrays[f"{key}.codes"], scales)
    return take(arrays, key, "the cone's arrays")


@dataclasses.dataclass(frozen=True, eq=False)
class FullCovariance:
    """One symmetric positive semi-definite matrix per component.

    Parameters
    ----------
    matrices : float32 array of shape (components, D, D)
        Second central moments, divided by the count.

    Raises
    ------
    SpaceError
        If a matrix is not symmetric or has an eigenvalue clearly below zero.
    """

    form: ClassVar[str] = "full"
    keys: ClassVar[tuple[str, ...]] = ("triangles",)
    matrices: NDArray[np.float32]

    def __post_init__(self) -> None:
        shape = np.shape(self.matrices)
        side = shape[-1] if len(shape) == 3 else None
        matrices = check_array("matrices", self.matrices, (None, side, side), MAX_MOMENT)
        object.__setattr__(self, "matrices", matrices)
        for index, matrix in enumerate(matrices):
            scale = float(np.abs(matrix).max())
            skew = float(np.abs(matrix - matrix.T).max())
            if skew > 1e-5 * scale:
                raise SpaceError(f"matrices[{index}]", "a symmetric matrix", f"off by {skew:g}")
            # Float32 storage moves eigenvalues by about 1e-7 of the trace; allow ten times that.
            slack = 1e-6 * float(np.trace(matrix, dtype=np.float64)) + 1e-12
            try:
                np.linalg.cholesky(matrix.astype(np.float64) + slack * np.eye(matrix.shape[0]))
            except np.linalg.LinAlgError:
                lowest = float(np.linalg.eigvalsh(matrix.astype(np.float64))[0])
                raise SpaceError(
                    f"matrices[{index}]", "no negative eigenvalue", f"{lowest:g}"
                ) from None

    @property
    def shape(self) -> tuple[int, int]:
        """Components and features."""
        return self.matrices.shape[0], self.matrices.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of the upper triangles."""
        components, side = self.shape
        return 4 * components * side * (side + 1) // 2

    def dense_matrix(self, index: int) -> NDArray[np.float64]:
        """Return one component's covariance."""
        return np.asarray(self.matrices[index], dtype=np.float64)

    def select(self, keep: NDArray[np.bool_]) -> FullCovariance:
        """Return some of the components."""
        return FullCovariance(self.matrices[keep])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the upper triangles, row by row."""
        rows, columns = np.triu_indices(self.shape[1])
        return {"triangles": np.ascontiguousarray(self.matrices[:, rows, columns])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], side: int) -> FullCovariance:
        """Rebuild the matrices from their upper triangles."""
        length = side * (side + 1) // 2
        given = take(arrays, "triangles", "the cone's arrays")
        triangles = check_array("triangles", given, (None, length), MAX_MOMENT)
        rows, columns = np.triu_indices(side)
        matrices = np.zeros((triangles.shape[0], side, side), dtype=np.float32)
        matrices[:, rows, columns] = triangles
        matrices[:, columns, rows] = triangles
        return cls(matrices)


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankCovariance:
    """``F F^T + diag(deviations ** 2)`` per component: positive semi-definite by construction.

    Parameters
    ----------
    factors : array of shape (components, D, r), or (sum of ranks, D) with `ranks`; float32 or int8
        Top eigenvectors times the square roots of their eigenvalues: as columns where all
        components have as many, as rows one component after the other where they have not.
    deviations : array of shape (components, D), float32 or int8
        Standard deviations of what the factors leave, not negative.
    ranks : int array of shape (components,), optional
        Columns of each component's factor, from 0 to D.
    """

    form: ClassVar[str] = "low_rank"
    keys: ClassVar[tuple[str, ...]] = (
        *("factors", "factors.codes", "factors.scales", "ranks"),
        *("deviations", "deviations.codes", "deviations.scales"),
    )
    factors: Values
    deviations: Values
    ranks: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.ranks is None:
            set_(self, "factors", check_values("factors", self.factors, (None, None, None)))
            components, features = self.factors.shape[:2]
        else:
            set_(self, "ranks", check_array("ranks", self.ranks, (None,), 1e9, np.int64))
            components, features = len(self.ranks), int(np.shape(self.deviations)[-1])
            lowest, highest = int(self.ranks.min()), int(self.ranks.max())
            if lowest < 0 or highest > features:
                raise SpaceError("ranks", f"from 0 to {features}", f"{lowest} to {highest}")
            columns = int(self.ranks.sum())
            set_(self, "factors", check_values("factors", self.factors, (columns, features)))
        set_(
            self, "deviations", check_values("deviations", self.deviations, (components, features))
        )
        lowest_deviation = float(dense(self.deviations).min())
        if lowest_deviation < 0:
            raise SpaceError("deviations", "values of at least 0", lowest_deviation)

    @property
    def shape(self) -> tuple[int, int]:
        """Components and features."""
        return self.deviations.shape[0], self.deviations.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes as stored."""
        ranks = 0 if self.ranks is None else 4 * len(self.ranks)
        return int(self.factors.nbytes + self.deviations.nbytes + ranks)

    def rank(self, index: int) -> int:
        """Return how many columns one component's factor has."""
        return self.factors.shape[2] if self.ranks is None else int(self.ranks[index])

    def factor(self, index: int) -> NDArray[np.float32]:
        """Return one component's factor, of shape (D, r)."""
        if self.ranks is None:
            return np.asarray(dense(self.factors, slice(index, index + 1))[0])
        end = int(self.ranks[: index + 1].sum())
        return np.asarray(dense(self.factors, slice(end - self.rank(index), end)).T)

    def dense_matrix(self, index: int) -> NDArray[np.float64]:
        """Return one component's covariance."""
        factor = self.factor(index).astype(np.float64)
        matrix = factor @ factor.T
        matrix[np.diag_indices_from(matrix)] += dense(self.deviations)[index].astype(float) ** 2
        return np.asarray(matrix)

    def select(self, keep: NDArray[np.bool_]) -> LowRankCovariance:
        """Return some of the components."""
        deviations = select_values(self.deviations, keep)
        if self.ranks is None:
            return LowRankCovariance(select_values(self.factors, keep), deviations)
        factors = select_values(self.factors, np.repeat(keep, self.ranks))
        return LowRankCovariance(factors, deviations, self.ranks[keep])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the stored arrays."""
        # Without any column there is nothing to send: arrays of no length are refused.
        arrays = pack_values("factors", self.factors) if self.factors.shape[0] else {}
        arrays |= pack_values("deviations", self.deviations)
        return arrays if self.ranks is None else arrays | {"ranks": self.ranks.astype(np.int32)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> LowRankCovariance:
        """Rebuild from what `to_arrays` returned."""
        deviations, ranks = unpack_values("deviations", arrays), arrays.get("ranks")
        if ranks is not None and not np.any(ranks):
            none = np.zeros((0, np.shape(deviations)[-1]), dtype=np.float32)
            return cls(none, deviations, ranks)
        return cls(unpack_values("factors", arrays), deviations, ranks)
