"""An array in eight bits: signed codes times a scale per group.

The papers send 32-bit weights. A class moment needs less: the covariance factor only has to
give the spread of a margin. Codes run from -127 to 127, the scale is the largest
absolute value of the group over 127, so that zero stays zero and rounding is off by half
a step at most.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.bounds import MAX_WEIGHT
from gems_flwr.spaces.errors import SpaceError, check_array

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
