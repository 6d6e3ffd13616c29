"""One covariance for all classes of a node, and their means in its coordinates: rank="auto".

Beyond the papers. The covariance *within* the classes has all samples of a node behind it, so many
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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_VALUE
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.cone.covariance import (
    QuantizedArray,
    _Covariances,
    dense,
)
from gems_flwr.spaces.convex import check_array, take
from gems_flwr.typing import Float

if TYPE_CHECKING:
    pass

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
