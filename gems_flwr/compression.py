"""Models in a quarter of their bytes, or an eighth: differences in 8 or 4 bits a weight.

What travels is ``model - base + left over``: ``base`` is a model that the receiver has, ``left
over`` what earlier messages of the same sender lost (error feedback; Seide et al. 2014,
Karimireddy et al. 2019). The receiver adds it to its own copy of ``base``. So both know the decoded
model exactly, and the sum over messages is off by no more than one message is.

- Numbers are rounded to the nearest in blocks of `BLOCK` with one scale each, the block's largest
  absolute value divided by the largest code, rounded up to 16 bits (those of a float32 without the
  last half of its mantissa): a number is off by at most half a scale.
- Weight matrices and kernels are rounded (arrays of two dimensions and more, and vectors from
  `LONG_VECTOR` numbers on). Biases, normalisation layers and their running means are few, and a
  variance that rounding makes negative ruins a model: they travel as they are, and so do integers.
- A receiver without a base gets the whole model, in half precision where that is exact.
- Codes are deflated: many inputs never vary (the margins of images) and their differences are 0.
  Runs and Huffman codes alone (zlib's ``Z_RLE``) come within 6 % of zstandard's first level.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_PARAMETERS
from gems_flwr.errors import BadReplyError, OptionError
from gems_flwr.typing import Arrays

Form = Literal["float32", "int8", "int4"]
FORMS = get_args(Form)
BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
BLOCK = 256
LONG_VECTOR = 4096
_MOST_DEFLATED = 1032  # no stream of deflate is more than 1,032 times shorter than what it says
_SMALLEST = np.float32(2.0**-126)  # the reciprocal of a smaller scale is infinite


@dataclass(frozen=True)
class PackedModel:
    """A model as bytes."""

    codes: bytes = b""  # of the rounded arrays, deflated
    scales: bytes = b""  # of their blocks
    exact: bytes = b""  # the other arrays, deflated
    layout: str = ""  # names, shapes and types of a whole model as JSON

    @property
    def is_whole(self) -> bool:
        """Whether it can be read without another model."""
        return bool(self.layout)


@dataclass(frozen=True)
class Encoded:
    """What travels, what the receiver makes of it, and what rounding lost."""

    packed: PackedModel
    decoded: Arrays
    left_over: Arrays = field(default_factory=dict)


def check_form(form: str) -> Form:
    """Return a form that there is."""
    if form not in FORMS:
        raise OptionError(f"compress must be one of {list(FORMS)}, got {form!r}")
    return form  # type: ignore[return-value]


def is_rounded(array: NDArray) -> bool:
    """Return whether an array travels rounded; see the module's docstring."""
    return array.dtype.kind == "f" and (array.ndim >= 2 or array.size >= LONG_VECTOR)


def check_compressible(model: Arrays, form: Form) -> None:
    """Refuse to compress a model of which nothing would be rounded."""
    if form != "float32" and not any(map(is_rounded, map(np.asarray, model.values()))):
        raise OptionError(
            f"compress={form!r} has nothing to compress: only arrays of two dimensions, or of "
            f"{LONG_VECTOR:,} numbers and more, are rounded, and the model has none; leave it out"
        )


# --- differences ------------------------------------------------------------------------------


def encode(model: Arrays, base: Arrays, form: Form, left_over: Arrays | None = None) -> Encoded:
    """Return a model as a difference to `base`, of the same names, shapes and types."""
    decoded, rest = dict[str, NDArray](), dict[str, NDArray]()
    codes, scales, exact = list[bytes](), list[bytes](), list[bytes]()
    for name, own in base.items():
        array = np.asarray(model[name], dtype=own.dtype)
        if not is_rounded(own):
            decoded[name] = array
            exact.append(_little_endian(array).tobytes())
            continue
        with np.errstate(invalid="ignore"):
            difference = np.subtract(array, own, dtype=np.float64).ravel()
        if left_over is not None and name in left_over:
            difference += left_over[name].ravel()
        rounded, steps = quantise(difference, BITS[form])
        codes.append(_to_bytes(rounded, BITS[form]))
        scales.append(steps.astype("<u2").tobytes())
        decoded[name] = _added(own, dequantise(rounded, steps))
        with np.errstate(invalid="ignore", over="ignore"):
            # What the receiver's addition rounds away is left over as well.
            received = np.subtract(decoded[name], own, dtype=np.float64).ravel()
            lost = (difference - received).astype(np.float32)
        # What is not finite is not worth keeping.
        rest[name] = np.where(np.isfinite(lost), lost, np.float32(0)).reshape(own.shape)
    packed = PackedModel(_deflated(b"".join(codes)), b"".join(scales), _deflated(b"".join(exact)))
    return Encoded(packed, decoded, rest)


def decode(packed: PackedModel, base: Arrays, form: Form) -> dict[str, NDArray]:
    """Return the model that `encode` wrote."""
    bits = BITS[form]
    rounded = {name: own.size for name, own in base.items() if is_rounded(own)}
    lengths = {name: -(-size * bits // 8) for name, size in rounded.items()}
    scale_bytes = {name: 2 * -(-size // BLOCK) for name, size in rounded.items()}
    codes = io.BytesIO(_inflated(packed.codes, sum(lengths.values()), "codes"))
    if (came := len(packed.scales)) != (expected := sum(scale_bytes.values())):
        raise BadReplyError(f"a packed model has {came} bytes of scales, expected {expected}")
    scales = io.BytesIO(packed.scales)
    plain = sum(own.nbytes for name, own in base.items() if name not in rounded)
    exact = io.BytesIO(_inflated(packed.exact, plain, "exact"))
    model: dict[str, NDArray] = {}
    for name, own in base.items():
        if name not in rounded:
            model[name] = _read(exact.read(own.nbytes), own.dtype, own.shape)
            continue
        steps = np.frombuffer(scales.read(scale_bytes[name]), "<u2").astype(np.uint16)
        numbers = dequantise(_from_bytes(codes.read(lengths[name]), own.size, bits), steps)
        if not np.isfinite(numbers).all():
            raise BadReplyError("a packed model holds NaN or infinity")
        model[name] = _added(own, numbers)
    return model


def encode_average(
    average: Arrays, reference: Arrays, form: Form, left_over: Arrays, share: float
) -> Encoded:
    """Return an average for some of the nodes, as a difference to the reference that all have.

    Averaging leaves the sum of the models what it was (Kamp et al. 2018, Definition 2). An average
    that is rounded on its way to k of m nodes moves the sum by k times what rounding took; a share
    of that for each node is kept in `left_over` and added to later averages. So the mean of all
    models, and what is kept, stay what they were. `share` is k / m, in (0, 1].
    """
    encoded = encode(average, reference, form, left_over)
    if share == 1:
        return encoded
    kept = {
        name: share * rest + (1 - share) * np.asarray(left_over.get(name, np.zeros_like(rest)))
        for name, rest in encoded.left_over.items()
    }
    return Encoded(encoded.packed, encoded.decoded, kept)


# --- whole models -----------------------------------------------------------------------------


def halved(model: Arrays) -> dict[str, NDArray]:
    """Return a model with its weight matrices rounded to half precision, where they fit."""
    most = np.finfo(np.float16).max
    arrays = {name: np.asarray(each) for name, each in model.items()}
    fits = {n for n, a in arrays.items() if is_rounded(a) and np.abs(a).max(initial=0) <= most}
    return {n: a.astype(np.float16).astype(a.dtype) if n in fits else a for n, a in arrays.items()}


def left_by_halving(model: Arrays) -> dict[str, NDArray]:
    """Return what is left over where nodes begin with `halved(model)` instead of `model`."""
    return {
        name: (np.asarray(model[name], np.float64) - half).astype(np.float32)
        for name, half in halved(model).items()
        if is_rounded(half)
    }


def encode_whole(model: Arrays) -> PackedModel:
    """Return a model as it is, for a receiver that has none."""
    layout: list[list[Any]] = []
    written: list[bytes] = []
    for name, each in model.items():
        array = np.asarray(each)
        half = _in_half(array)
        layout.append([name, array.dtype.str, list(array.shape), half is not None])
        written.append(_little_endian(array if half is None else half).tobytes())
    text = json.dumps(layout, separators=(",", ":"))
    return PackedModel(exact=_deflated(b"".join(written)), layout=text)


def decode_whole(packed: PackedModel) -> dict[str, NDArray]:
    """Return the model that `encode_whole` wrote; for receivers that trust the sender."""
    layout = json.loads(packed.layout)
    types = [np.dtype("<f2") if half else np.dtype(kind) for _, kind, _, half in layout]
    sizes = [int(np.prod(shape, dtype=np.int64)) for _, _, shape, _ in layout]
    lengths = [size * kind.itemsize for size, kind in zip(sizes, types, strict=True)]
    # Weights hardly deflate; what does is small, or meant to fill the node's memory.
    if sum(sizes) > max(MAX_PARAMETERS, 8 * len(packed.exact)):
        raise BadReplyError(f"{sum(sizes):,} numbers in {len(packed.exact):,} bytes are no model")
    exact = io.BytesIO(_inflated(packed.exact, sum(lengths), "exact"))
    return {
        name: _read(exact.read(length), written, shape).astype(np.dtype(kind), copy=False)
        for (name, kind, shape, _), written, length in zip(layout, types, lengths, strict=True)
    }


def _in_half(array: NDArray) -> NDArray | None:
    """Return an array in half precision, if that loses nothing."""
    if array.dtype.kind != "f" or array.dtype.itemsize <= 2:
        return None
    with np.errstate(over="ignore"):
        half = array.astype("<f2")
    return half if np.array_equal(half, array) else None


# --- numbers as codes and bytes ---------------------------------------------------------------


def quantise(values: NDArray, bits: int) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Return codes from -(2^(bits-1) - 1) to 2^(bits-1) - 1, and a scale for each block."""
    most = 2 ** (bits - 1) - 1
    blocks = _blocks(np.asarray(values, dtype=np.float32))
    largest = np.abs(blocks).max(axis=1) / np.float32(most)
    scales = ((largest.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    steps = _scale_values(scales)
    # A block of zeros, or of numbers too small for a scale, is coded as zeros.
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps >= _SMALLEST)
    # Rounding the reciprocal may lift the largest a hair above the last code.
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.rint(blocks * inverse[:, None]), -most, most).astype(np.int8)
    return codes.ravel()[: len(values)], scales


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers that codes and scales stand for."""
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = _blocks(codes.astype(np.float32)) * _scale_values(scales)[:, None]
    return numbers.ravel()[: len(codes)]


def _scale_values(scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (scales.astype(np.uint32) << 16).view(np.float32)


def _blocks(values: NDArray) -> NDArray:
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK, values.dtype)
    padded[: len(values)] = values
    return padded.reshape(-1, BLOCK)


def _to_bytes(codes: NDArray[np.int8], bits: int) -> bytes:
    """Return codes as bytes: of 4 bits two in a byte, the first in the lower half."""
    if bits == 8:
        return codes.tobytes()
    pairs = np.zeros(2 * -(-len(codes) // 2), np.uint8)
    pairs[: len(codes)] = codes.astype(np.uint8) & 15
    return (pairs[::2] | pairs[1::2] << 4).tobytes()


def _from_bytes(data: bytes, count: int, bits: int) -> NDArray[np.int8]:
    read = np.frombuffer(data, np.uint8)
    if bits == 8:
        return read.view(np.int8)[:count]
    halves = np.stack([read & 15, read >> 4], axis=1).ravel()[:count].astype(np.int8)
    return (halves ^ np.int8(8)) - np.int8(8)  # two's complement: from 8 on, four bits are below 0


def _added(own: NDArray, numbers: NDArray[np.float32]) -> NDArray:
    with np.errstate(over="ignore"):
        total = np.add(own, numbers.reshape(own.shape), dtype=np.float64)
        return np.asarray(total, own.dtype)


def _little_endian(array: NDArray) -> NDArray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _read(data: bytes, kind: np.dtype, shape: Any) -> NDArray:
    return np.asarray(np.frombuffer(data, kind.newbyteorder("<")).reshape(shape).astype(kind))


def _deflated(data: bytes) -> bytes:
    compress = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return compress.compress(data) + compress.flush()


def _inflated(data: bytes, length: int, what: str) -> bytes:
    """Return bytes of a known length; never more than that is written to memory."""
    expected = f"expected {length:,} bytes"
    if length > _MOST_DEFLATED * len(data):
        raise BadReplyError(f"the {what} of a packed model are too short: {expected}")
    inflate = zlib.decompressobj(-15)
    try:
        # One byte more than wanted tells a stream that is too long.
        read = inflate.decompress(data, length + 1)
    except zlib.error as error:
        raise BadReplyError(f"the {what} of a packed model cannot be read: {error}") from error
    if len(read) != length or not inflate.eof or inflate.unused_data:
        came = f"{len(read):,}" if len(read) <= length else "more"
        raise BadReplyError(f"the {what} of a packed model do not fit: {expected}, got {came}")
    return read
