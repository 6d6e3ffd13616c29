"""Blocks of numbers as small whole numbers, with one scale for each block.

A block's scale is its largest absolute value divided by the largest code, so nothing is cut off and
a number is off by at most half a scale. Codes are rounded to the nearest: that is *biased* for a
single message (the same number is always rounded the same way), it needs no random numbers, and
what is left over is known exactly, so that the sender can add it to its next message (error
feedback; Seide et al. 2014, Karimireddy et al. 2019). Then the sum over messages is off by no more
than one message is.

Scales are rounded up to 16 bits, those of a float32 without the last half of its mantissa: they
have its range, and cost 16 bits for each block of `BLOCK` numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 256


def quantise(values: NDArray, bits: int) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Return codes and scales of a vector.

    Parameters
    ----------
    values : ndarray of shape (n,)
        Finite numbers; a block with another is told as not finite by its scale.
    bits : int
        Of a code, from 2 to 8; codes go from -(2^(bits-1) - 1) to 2^(bits-1) - 1.

    Returns
    -------
    codes : ndarray of int8, shape (n,)
        Whole numbers.
    scales : ndarray of uint16
        One for each block, as `scale_values` reads them.
    """
    most = 2 ** (bits - 1) - 1
    blocks = _blocks(np.asarray(values, dtype=np.float32))
    scales = _rounded_up(np.abs(blocks).max(axis=1) / np.float32(most))
    steps = scale_values(scales)
    # A block of zeros, or of numbers too small for a scale, is coded as zeros.
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps >= _SMALLEST)
    # Rounding the reciprocal may lift the largest a hair above the last code.
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.rint(blocks * inverse[:, None]), -most, most).astype(np.int8)
    return codes.ravel()[: len(values)], scales


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers that codes and scales stand for."""
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = _blocks(codes.astype(np.float32)) * scale_values(scales)[:, None]
    return numbers.ravel()[: len(codes)]


def scale_values(scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return scales as numbers."""
    return (scales.astype(np.uint32) << 16).view(np.float32)


def blocks_of(count: int) -> int:
    """Return how many blocks, and so scales, a vector of that length has."""
    return -(-count // BLOCK)


# --- several codes in a byte ------------------------------------------------------------------


def to_bytes(codes: NDArray[np.int8], bits: int) -> bytes:
    """Return codes as bytes: of 4 bits two in a byte, of 2 bits four, the first in the lowest."""
    if bits == 8:
        return codes.tobytes()
    count = 8 // bits
    parts = np.zeros((byte_count(len(codes), bits), count), np.uint8)
    parts.ravel()[: len(codes)] = codes.astype(np.uint8) & (2**bits - 1)
    shifts = np.arange(count, dtype=np.uint8) * np.uint8(bits)
    joined: NDArray[np.uint8] = np.bitwise_or.reduce(parts << shifts, axis=1)
    return joined.tobytes()


def from_bytes(data: bytes, count: int, bits: int) -> NDArray[np.int8]:
    """Return the codes that `to_bytes` wrote."""
    if bits == 8:
        return np.frombuffer(data, np.int8, count)
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    parts = np.frombuffer(data, np.uint8)[:, None] >> shifts & np.uint8(2**bits - 1)
    # Two's complement: the upper half of what the bits can say is below 0.
    sign = np.int8(2 ** (bits - 1))
    return (parts.ravel()[:count].astype(np.int8) ^ sign) - sign


def byte_count(count: int, bits: int) -> int:
    """Return how many bytes `to_bytes` makes of that many codes."""
    return -(-count * bits // 8)


# The reciprocal of a smaller one is infinite.
_SMALLEST = np.float32(2.0**-126)


def _blocks(values: NDArray) -> NDArray:
    padded = np.zeros(blocks_of(len(values)) * BLOCK, values.dtype)
    padded[: len(values)] = values
    return padded.reshape(-1, BLOCK)


def _rounded_up(scales: NDArray[np.float32]) -> NDArray[np.uint16]:
    return ((scales.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
