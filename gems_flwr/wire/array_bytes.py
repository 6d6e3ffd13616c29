"""Arrays as bytes and back: numpy's own format, as Flower writes it, without reading headers anew.

`numpy.save` and `numpy.load` spend some 30 microseconds on the header alone, which is a text of
Python's; the header of a model's array is the same in every message, so what was found in it is
remembered. The bytes are the same as theirs, and so are the arrays, which belong to the caller.
Whatever is not quite ordinary is left to them, with their errors.
"""

from __future__ import annotations

import math
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray

from gems_flwr.wire.quick_records import make_array

NUMPY = "numpy.ndarray"
"""What Flower calls arrays in numpy's format."""

# The first ten bytes of version 1.0: magic, version, length of the header.
_PREFIX_BYTES = 10
_VERSION_1 = b"\x93NUMPY\x01\x00"
_LONGEST_HEADER_BYTES = 1024
# Kinds of dtypes: floating point, integers with and without a sign, truth values.
_NUMBERS = "fiub"


def to_array(value: NDArray[Any]) -> Array:
    """Return a numpy array as an array of Flower."""
    ordinary = type(value) is np.ndarray and value.dtype.kind in _NUMBERS
    if not ordinary or not value.flags.c_contiguous:
        return Array(value)
    header, name = _written_header(value.dtype, value.shape)
    return make_array(name, value.shape, NUMPY, b"".join((header, value.data)))


@lru_cache(maxsize=1024)
def _written_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, str]:
    """Return what `numpy.save` writes before the data, and what the dtype is called."""
    stream = BytesIO()
    npy.write_array_header_1_0(
        stream, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return stream.getvalue(), str(dtype)


def to_ndarray(array: Array) -> NDArray[Any]:
    """Return an array of Flower as a numpy array of the caller's own, as ``array.numpy()`` does."""
    data = array.data
    if array.stype == NUMPY and type(data) is bytes and data.startswith(_VERSION_1):
        start = _PREFIX_BYTES + int.from_bytes(data[8:10], "little")
        if start <= _LONGEST_HEADER_BYTES:
            known = _read_header(data[:start])
            if known is not None and len(data) == start + known[2]:
                dtype, shape, _ = known
                return np.frombuffer(data, dtype, offset=start).reshape(shape).copy()
    return array.numpy()


@lru_cache(maxsize=1024)
def _read_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int] | None:
    """Return dtype, shape and bytes of the data; None for what is left to numpy."""
    stream = BytesIO(header)
    try:
        npy.read_magic(stream)
        shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
    except Exception:  # numpy says what is wrong with it, when it is asked to read the array
        return None
    if fortran_order or dtype.kind not in _NUMBERS or not all(side > 0 for side in shape):
        return None
    return dtype, shape, math.prod(shape) * dtype.itemsize


def promised_bytes(data: bytes) -> int:
    """Return how many bytes the header of an array promises; numpy would allocate them first."""
    if data.startswith(_VERSION_1):
        start = _PREFIX_BYTES + int.from_bytes(data[8:10], "little")
        if start <= _LONGEST_HEADER_BYTES and (known := _read_header(data[:start])) is not None:
            return known[2]
    stream = BytesIO(data)
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    return math.prod(shape) * dtype.itemsize
