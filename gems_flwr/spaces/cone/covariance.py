"""Covariances of the components of a class-moment cone: full, low rank plus diagonal, or partial.

A full one is sent as its upper triangle. A low-rank one is ``F F^T + diag(s^2)``, with F of shape
(D, r), r the same for all components or not; F and s may be in int8: codes times a scale per group,
the largest absolute value over 127. Of a partial one some components have count and mean alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.bounds import MAX_MOMENT, MAX_WEIGHT
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.convex import check_array, take
from gems_flwr.typing import Float

LEVELS = 127
# Forms in which all or some components have a mean alone, and the array of flags that says which.
MEANS_ONLY, AND_MEANS = "means", "+means"
KEY = "means_only"


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """Int8 codes, and scales (at least 0) with the same axes, of length 1 or equal."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]

    def __post_init__(self) -> None:
        codes = np.asarray(self.codes)
        if codes.dtype != np.int8:
            raise SpaceError("codes", "dtype int8", f"dtype {codes.dtype}")
        scales = np.asarray(self.scales)
        pairs = zip(scales.shape, codes.shape, strict=False)
        if scales.ndim != codes.ndim or not all(s in (1, c) for s, c in pairs):
            raise SpaceError("scales", f"a shape that broadcasts to {codes.shape}", scales.shape)
        set_ = object.__setattr__
        set_(self, "codes", check_array("codes", codes, codes.shape, LEVELS, np.int8))
        set_(self, "scales", check_array("scales", scales, scales.shape, MAX_WEIGHT))
        if float(self.scales.min(initial=0.0)) < 0:
            raise SpaceError("scales", "values of at least 0", float(self.scales.min()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return int(self.codes.nbytes + self.scales.nbytes)

    def select(self, keep: NDArray[np.bool_]) -> QuantizedArray:
        """Return some of the first axis."""
        return QuantizedArray(self.codes[keep], self.scales[keep if len(self.scales) > 1 else ...])

    def dense(self, *part: slice) -> NDArray[np.float32]:
        """Return the values as float32: all of them, or a part of the first axes."""
        # An axis of length 1 has the one scale that all of the part share.
        axes = zip(part, self.scales.shape, strict=False)
        scales = self.scales[tuple(p if length > 1 else slice(None) for p, length in axes)]
        return self.codes[part].astype(np.float32) * scales


def quantize(
    values: ArrayLike, axis: int, round_up: bool = False, least_step: ArrayLike = 0.0
) -> QuantizedArray:
    """Return ``values`` in int8, one scale per group along an axis, none below `least_step`.

    With `round_up` away from zero, so that a standard deviation is never understated.
    """
    array = np.asarray(values, dtype=np.float64)
    scales = np.abs(array).max(axis=axis, keepdims=True) / LEVELS
    scales = np.where(scales > 0, np.maximum(scales, least_step), 0.0)
    safe = np.where(scales > 0, scales, 1.0)
    # The float32 scale is what the reader multiplies with, so codes are made from it.
    stored = np.nextafter(safe.astype(np.float32), np.float32(np.inf), dtype=np.float32)
    codes = np.clip(_codes(array / stored.astype(np.float64), round_up), -LEVELS, LEVELS)
    return QuantizedArray(codes.astype(np.int8), np.where(scales > 0, stored, 0).astype(np.float32))


def rounded(values: ArrayLike, step: ArrayLike, round_up: bool = False) -> Float:
    """Return ``values`` as multiples of ``step``; a step of 0 leaves them as they are."""
    array, steps = np.asarray(values, dtype=np.float64), np.asarray(step, dtype=np.float64)
    safe = np.where(steps > 0, steps, 1.0)
    return np.asarray(np.where(steps > 0, _codes(array / safe, round_up) * safe, array))


def _codes(ratio: Float, up: bool) -> Float:
    return np.sign(ratio) * np.ceil(np.abs(ratio) - 1e-9) if up else np.rint(ratio)


Values = NDArray[np.float32] | QuantizedArray


def dense(values: Values, *part: slice) -> NDArray[np.float32]:
    """Return float32 values, stored in int8 or not: all, or a part of the first axes."""
    return values.dense(*part) if isinstance(values, QuantizedArray) else values[part]


def check_values(key: str, values: object, shape: tuple[int | None, ...]) -> Values:
    """Return ``values`` checked; int8 values stay as they are."""
    if isinstance(values, QuantizedArray):
        check_array(key, values.dense(), shape)
        return values
    return check_array(key, values, shape)


def select_values(values: Values, keep: NDArray[np.bool_]) -> Values:
    """Return the values of some components (the first axis), stored as they were."""
    return values.select(keep) if isinstance(values, QuantizedArray) else np.asarray(values)[keep]


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


class _Covariances:
    """What all forms have in common; each defines these two."""

    times: Any
    shape: Any

    def dense_matrix(self, index: int) -> Float:
        """Return one component's covariance, (D, D); zeros without one."""
        return np.asarray(self.times(index, np.eye(self.shape[1])))


@dataclasses.dataclass(frozen=True, eq=False)
class FullCovariance(_Covariances):
    """Second central moments, divided by the count: ``matrices`` (components, D, D).

    A SpaceError if a matrix is not symmetric or has an eigenvalue clearly below zero.
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
            skew = float(np.abs(matrix - matrix.T).max())
            if skew > 1e-5 * float(np.abs(matrix).max()):
                raise SpaceError(f"matrices[{index}]", "a symmetric matrix", f"off by {skew:g}")
            # Float32 storage moves eigenvalues by about 1e-7 of the trace; allow ten times that.
            doubles = matrix.astype(np.float64)
            slack = 1e-6 * float(np.trace(doubles)) + 1e-12
            try:
                np.linalg.cholesky(doubles + slack * np.eye(len(doubles)))
            except np.linalg.LinAlgError:
                raise SpaceError(f"matrices[{index}]", "no negative eigenvalue", "one") from None

    @property
    def shape(self) -> tuple[int, int]:
        """Components and features."""
        return self.matrices.shape[0], self.matrices.shape[1]

    def rank(self, index: int) -> int:
        """Return how many directions one component has: all."""
        return self.shape[1]

    def times(self, index: int, rows: Float) -> Float:
        """Return ``rows @ Sigma`` for one component."""
        return np.asarray(rows @ self.matrices[index].astype(np.float64))

    def select(self, keep: NDArray[np.bool_]) -> FullCovariance:
        """Return some of the components."""
        return FullCovariance(self.matrices[keep])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the upper triangles, row by row."""
        return {"triangles": np.ascontiguousarray(upper_half(self.matrices))}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], side: int) -> FullCovariance:
        """Rebuild the matrices from their upper triangles."""
        length = side * (side + 1) // 2
        given = take(arrays, "triangles", "the cone's arrays")
        return cls(symmetric(check_array("triangles", given, (None, length), MAX_MOMENT), side))


def upper_half(matrices: NDArray) -> NDArray:
    """Return the upper triangles of symmetric matrices (n, D, D) as rows."""
    rows, columns = np.triu_indices(matrices.shape[1])
    return matrices[:, rows, columns]


def symmetric(halves: NDArray, side: int) -> NDArray:
    """Return symmetric matrices from their upper triangles, (n, D (D + 1) / 2)."""
    rows, columns = np.triu_indices(side)
    full = np.zeros((len(halves), side, side), dtype=halves.dtype)
    full[:, rows, columns] = halves
    full[:, columns, rows] = halves
    return full


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankCovariance(_Covariances):
    """``F F^T + diag(deviations ** 2)`` per component: positive semi-definite by construction.

    Factors (components, D, r) are columns. Deviations (components, D) are those of what the factors
    leave, at least 0. Either may be in int8.
    """

    form: ClassVar[str] = "low_rank"
    keys: ClassVar[tuple[str, ...]] = (
        *("factors", "factors.codes", "factors.scales"),
        *("deviations", "deviations.codes", "deviations.scales"),
    )
    factors: Values
    deviations: Values

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "factors", check_values("factors", self.factors, (None, None, None)))
        components, features = self.factors.shape[:2]
        checked = check_values("deviations", self.deviations, (components, features))
        set_(self, "deviations", checked)
        if float(dense(checked).min()) < 0:
            raise SpaceError("deviations", "values of at least 0", float(dense(checked).min()))

    @property
    def shape(self) -> tuple[int, int]:
        """Components and features."""
        return self.deviations.shape[0], self.deviations.shape[1]

    def rank(self, index: int) -> int:
        """Return how many columns one component's factor has."""
        return self.factors.shape[2]

    def factor(self, index: int) -> NDArray[np.float32]:
        """Return one component's factor, of shape (D, r)."""
        return np.asarray(dense(self.factors, slice(index, index + 1))[0])

    def variances(self, index: int) -> Float:
        """Return one component's variances beside its factor, (D,)."""
        deviations = dense(self.deviations, slice(index, index + 1))[0]
        return np.asarray(deviations.astype(np.float64) ** 2)

    def times(self, index: int, rows: Float) -> Float:
        """Return ``rows @ Sigma`` for one component, without building Sigma."""
        factor = self.factor(index).astype(np.float64)
        return np.asarray((rows @ factor) @ factor.T + rows * self.variances(index))

    def select(self, keep: NDArray[np.bool_]) -> LowRankCovariance:
        """Return some of the components."""
        deviations = select_values(self.deviations, keep)
        return LowRankCovariance(select_values(self.factors, keep), deviations)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the stored arrays."""
        return pack_values("factors", self.factors) | pack_values("deviations", self.deviations)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], features: int) -> LowRankCovariance:
        """Rebuild from what `to_arrays` returned."""
        return cls(unpack_values("factors", arrays), unpack_values("deviations", arrays))


@dataclasses.dataclass(frozen=True, eq=False)
class PartialCovariance(_Covariances):
    """Covariances of some components: `own`, in order; none of those that are `lacking`.

    Zeros do not stand for the others, or a node could make a server fill its memory with them.
    """

    keys: ClassVar[tuple[str, ...]] = (KEY,)
    own: FullCovariance | LowRankCovariance | None
    lacking: NDArray[np.bool_]
    features: int

    def __post_init__(self) -> None:
        having = int(np.count_nonzero(~self.lacking))
        given = (0, self.features) if self.own is None else self.own.shape
        if given != (having, self.features):
            raise SpaceError("covariance", f"shape {(having, self.features)}", given)

    @classmethod
    def none(cls, components: int, features: int) -> PartialCovariance:
        """Return what stands for no covariance at all."""
        return cls(None, np.ones(components, dtype=bool), features)

    @property
    def form(self) -> str:
        """What messages and files call it."""
        return MEANS_ONLY if self.own is None else self.own.form + AND_MEANS

    @property
    def shape(self) -> tuple[int, int]:
        """Components and features."""
        return len(self.lacking), self.features

    def place(self, index: int) -> int | None:
        """Return where a component's covariance is in `own`; None if it has none."""
        return None if self.lacking[index] else int(np.count_nonzero(~self.lacking[:index]))

    def rank(self, index: int) -> int | None:
        """Return how many directions one component has; None without a covariance."""
        place = self.place(index)
        return None if place is None or self.own is None else self.own.rank(place)

    def times(self, index: int, rows: Float) -> Float:
        """Return ``rows @ Sigma`` for one component; zeros without a covariance."""
        place = self.place(index)
        if place is None or self.own is None:
            return np.zeros_like(rows)
        return self.own.times(place, rows)

    def select(self, keep: NDArray[np.bool_]) -> Covariance:
        """Return some of the components."""
        chosen = keep[~self.lacking]
        own = self.own.select(chosen) if self.own is not None and chosen.any() else None
        return partial_covariance(own, self.lacking[keep], self.features)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the stored arrays, and which components they leave out."""
        flags = {KEY: self.lacking.astype(np.uint8)}
        return flags if self.own is None else flags | self.own.to_arrays()

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], form: str, features: int) -> PartialCovariance:
        """Rebuild from what `to_arrays` returned."""
        flags = check_array(KEY, take(arrays, KEY, "the cone's arrays"), (None,), 1, np.int64)
        lacking = flags.astype(bool)
        if not lacking.any() or (form == MEANS_ONLY) != bool(lacking.all()):
            raise SpaceError(KEY, f"flags that fit the form {form}", "others")
        kind = _FORMS.get(form.removesuffix(AND_MEANS))
        own = None if kind is None else kind.from_arrays(arrays, features)
        return cls(own, lacking, features)


Own = FullCovariance | LowRankCovariance
Covariance = Own | PartialCovariance

_FORMS = {kind.form: kind for kind in (FullCovariance, LowRankCovariance)}
# The arrays of each form.
FORM_KEYS: dict[str, tuple[str, ...]] = {form: kind.keys for form, kind in _FORMS.items()}
FORM_KEYS |= {form + AND_MEANS: (*keys, KEY) for form, keys in FORM_KEYS.items()}
FORM_KEYS[MEANS_ONLY] = (KEY,)


def covariance_from_arrays(arrays: Mapping[str, Any], form: str, features: int) -> Covariance:
    """Rebuild the covariances of any form."""
    if form in _FORMS:
        return _FORMS[form].from_arrays(arrays, features)
    return PartialCovariance.from_arrays(arrays, form, features)


def partial_covariance(own: Own | None, lacking: NDArray[np.bool_], features: int) -> Covariance:
    """Return the covariances of the components that have one, and which have none."""
    if own is not None and not lacking.any():
        return own
    return PartialCovariance(own, lacking, features)
