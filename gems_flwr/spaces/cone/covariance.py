"""Covariances of the components of a cone: full, low rank plus diagonal, partial, or common.

A full one is sent as its upper triangle. A low-rank one is ``F F^T + diag(s^2)``, with F of shape
(D, r), r the same for all components or not; F and s may be in int8: codes times a scale per group,
the largest absolute value over 127. Of a partial one some components have count and mean alone.

**One covariance for all classes of a node**, and means in its coordinates: rank="auto", which goes
beyond the papers. The covariance *within* the classes has all samples of a node behind it, so many
more directions may be shown than of a class alone; a class of few samples has no other. A class of
as many samples as features or more has one of its own as well, of which ``n / (n + D)`` counts, and
``D / (n + D)`` of the common one: the larger a class, the more of its covariance is its own.

**Nothing depends on units.** Each feature is centred, and measured in units of ``sqrt(m4 / m2)`` of
its central moments: the size of what varies where it varies, so that a pixel that is seldom on is
no louder than others. In these units covariances are ``diag(d) (I + R^T R) diag(d)``: their leading
directions over the deviations d of what those leave. A class mean is sent as z, with
``mean = center + z (I + R^T R)^{1/2} diag(d)``: a step of z is as long in all directions as the
class is wide.

**Few bytes.** R is rounded to a thirtieth of d: mostly zeros and ones, which are deflated.

**What is shown** follows the rules of `gems_flwr.spaces.cone.rules`, with steps in these
coordinates: of the common covariance as for a class of half of all samples, and no direction that
noise alone could have made; of a class of its own covariance as for itself. Where a mean would be
rounded by more than the class is wide, it is so in some directions, those in which the *other*
classes differ first, and not shown in the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.bounds import MAX_MOMENT, MAX_VALUE, MAX_WEIGHT
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


# --- common to all classes ----------------------------------------------------------------------

# Steps of directions, relative to the residual's deviation, and of means, to the class's; most
# directions that are shown. Chosen on validation data: more bytes bring nothing.
ROW_STEP, MEAN_STEP, ERROR_SHARE = 0.03, 0.01, 0.3
MOST_COMMON, MOST_OWN = 160, 100
# The finest unit: of a feature that does not vary at all.
DEAD = -400
_MOST_CODES = 2**26


@dataclasses.dataclass(frozen=True, eq=False)
class CommonCovariance(_Covariances):
    """Covariances of components, each a mean of the common one and perhaps one of its own.

    Parameters
    ----------
    center : float32 array of shape (D,)
        What means are relative to.
    octaves : int array of shape (D,)
        Units of the features: ``2 ** (octaves / 4)``.
    shares : float32 array of shape (components,)
        How much of a component's covariance is its own, from 0 to below 1.
    ranks : int array of shape (1 + components,)
        Directions of the common covariance, and of each component's own.
    rows : QuantizedArray of shape (sum of ranks, D)
        The directions, relative to `deviations`.
    deviations : QuantizedArray of shape (1 + own covariances, D)
        Deviations of what the directions leave, above 0, in units.
    """

    form: ClassVar[str] = "common"
    keys: ClassVar[tuple[str, ...]] = (
        *("center", "octaves", "shares", "ranks", "rows.codes", "rows.scales"),
        *("deviations.codes", "deviations.scales"),
    )
    center: NDArray[np.float32]
    octaves: NDArray[np.int64]
    shares: NDArray[np.float32]
    ranks: NDArray[np.int64]
    rows: QuantizedArray
    deviations: QuantizedArray

    def __post_init__(self) -> None:
        def check(name: str, shape: tuple[int | None, ...], *about: Any) -> Any:
            object.__setattr__(self, name, check_array(name, getattr(self, name), shape, *about))
            return getattr(self, name)

        features = check("center", (None,), MAX_VALUE).size
        check("octaves", (features,), -DEAD, np.int64)
        shares = check("shares", (None,), 1 - 1e-6)
        ranks = check("ranks", (shares.size + 1,), features, np.int64)
        if shares.min() < 0 or ranks.min() < 0 or ranks[1:][shares == 0].any():
            raise SpaceError("shares", "from 0 to 1, with directions where there is one", "others")
        owners = int(np.count_nonzero(shares))
        for values, count in ((self.rows, int(ranks.sum())), (self.deviations, 1 + owners)):
            if values.shape != (count, features):
                raise SpaceError("rows and deviations", f"shape {(count, features)}", values.shape)
        if not (self.deviations.dense() > 0).all():
            raise SpaceError("deviations", "values above 0", "others")

    @property
    def shape(self) -> tuple[int, int]:
        """Components and features."""
        return len(self.shares), len(self.center)

    def rank(self, index: int) -> int:
        """Return how many directions of its own one component shows."""
        return int(self.ranks[1 + index])

    def _part(self, index: int, place: int) -> tuple[Float, Float]:
        """Return directions, as rows, and deviations of one covariance, in the data's units."""
        end = int(self.ranks[: index + 1].sum())
        units = 2.0 ** (self.octaves / 4)
        deviations = dense(self.deviations, slice(place, place + 1))[0] * units
        rows = dense(self.rows, slice(end - int(self.ranks[index]), end))
        return rows * deviations, deviations

    @functools.cached_property
    def common(self) -> tuple[Float, Float]:
        """Directions of the common covariance, as rows, and deviations of what they leave."""
        return self._part(0, 0)

    def own(self, index: int) -> tuple[Float, Float] | None:
        """Return directions and deviations of a component's own covariance, if it has one."""
        place = 1 + int(np.count_nonzero(self.shares[:index]))
        return self._part(1 + index, place) if self.shares[index] else None

    def factor(self, index: int) -> Float:
        """Return one component's factor, of shape (D, directions), the common ones first."""
        own, share = self.own(index), float(self.shares[index])
        rows = [np.sqrt(1 - share) * self.common[0], *([np.sqrt(share) * own[0]] if own else [])]
        return np.concatenate(rows).T

    def variances(self, index: int) -> Float:
        """Return one component's variances beside its factor, (D,)."""
        own, share = self.own(index), float(self.shares[index])
        found = (1 - share) * self.common[1] ** 2
        return found if own is None else found + share * own[1] ** 2

    def times(self, index: int, rows: Float) -> Float:
        """Return ``rows @ Sigma`` for one component."""
        factor = self.factor(index)
        return np.asarray((rows @ factor) @ factor.T + rows * self.variances(index))

    @functools.cached_property
    def _axes(self) -> tuple[Float, Float]:
        return axes(self.common[0] / self.common[1])

    def means(self, z: Float) -> Float:
        """Return the means (n, D) that z stands for."""
        return np.asarray(self.center + stretched(self._axes, z, 0.5) * self.common[1])

    def select(self, keep: NDArray[np.bool_]) -> CommonCovariance:
        """Return some of the components."""
        owners, first = keep[self.shares > 0], np.ones(1, dtype=bool)
        kept = np.concatenate([first, keep])
        return CommonCovariance(
            self.center,
            self.octaves,
            self.shares[keep],
            self.ranks[kept],
            self.rows.select(np.repeat(kept, self.ranks)),
            self.deviations.select(np.concatenate([first, owners])),
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the stored arrays, codes deflated."""
        arrays: dict[str, Any] = {"center": self.center, "octaves": self.octaves.astype(np.int16)}
        arrays |= {"shares": self.shares, "ranks": self.ranks.astype(np.int32)}
        arrays |= deflate("rows", self.rows) if self.rows.shape[0] else {}
        return arrays | deflate("deviations", self.deviations)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], features: int) -> CommonCovariance:
        """Rebuild from what `to_arrays` returned."""
        plain = (take(arrays, key, "the cone's arrays") for key in cls.keys[:4])
        none = QuantizedArray(np.zeros((0, features), np.int8), np.zeros((0, 1), np.float32))
        rows = inflate("rows", arrays, features) if "rows.codes" in arrays else none
        found: Any = (*plain, rows, inflate("deviations", arrays, features))
        return cls(*found)


def axes(rows: Float) -> tuple[Float, Float]:
    """Return singular values (r,) and directions (r, D) of rows R."""
    return np.linalg.svd(rows, full_matrices=False)[1:] if len(rows) else (np.zeros(0), rows)


def stretched(axes: tuple[Float, Float], vectors: Float, power: float) -> Float:
    """Return vectors (n, D) times ``(I + R^T R) ** power``, for rows R with these axes."""
    sizes, directions = axes
    along = (vectors @ directions.T) * ((1 + sizes**2) ** power - 1)
    return np.asarray(vectors + along @ directions)


def deflate(key: str, values: QuantizedArray) -> dict[str, NDArray[Any]]:
    """Return the arrays of rows in eight bits, codes deflated."""
    packed = zlib.compress(values.codes.tobytes(), 9)
    return {f"{key}.codes": np.frombuffer(packed, np.uint8), f"{key}.scales": values.scales}


def inflate(key: str, arrays: Mapping[str, Any], features: int) -> QuantizedArray:
    """Rebuild rows from what `deflate` returned; a SpaceError if they are none."""
    scales = check_array(f"{key}.scales", take(arrays, f"{key}.scales", "the arrays"), (None, 1))
    codes = check_array(f"{key}.codes", take(arrays, f"{key}.codes", "the arrays"), (None,), 255)
    size = len(scales) * features
    if size > _MOST_CODES:
        raise SpaceError(key, f"at most {_MOST_CODES} codes", size)
    try:
        unpacked = zlib.decompressobj().decompress(codes.astype(np.uint8).tobytes(), size + 1)
    except zlib.error as error:
        raise SpaceError(key, "deflated codes", str(error)) from error
    if len(unpacked) != size:
        raise SpaceError(key, f"{size} codes", len(unpacked))
    return QuantizedArray(np.frombuffer(unpacked, np.int8).reshape(-1, features), scales)
