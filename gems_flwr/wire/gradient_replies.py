"""Replies of refinement: the sums of a node's loss, gradient and curvature, and losses at points.

What lies along a few directions that the server names travels in half precision; nodes with few
classes have large gradients there, which cancel only in the sum. The rest of a gradient of C rows
travels as whole numbers from -127 to 127 and one scale for each row, deflated (many
inputs never vary, and their entries are 0), or as floats of the rows divided by their scales.
Either way an entry is off by no more than a known part of its row's scale, which the bound on the
result takes into account. Curvatures are symmetric and only steer steps: upper halves in half
precision, divided by the node's weight.

Raw bytes in a ConfigRecord have no headers. Their lengths are known beforehand, also before
they are inflated.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_EXAMPLES, MAX_METRIC, MAX_MOMENT, MAX_WEIGHT
from gems_flwr.errors import BadReplyError
from gems_flwr.moments.loss_sums import LossSums
from gems_flwr.spaces.checks import shown
from gems_flwr.typing import Float
from gems_flwr.wire.gradient_requests import GradientRequest
from gems_flwr.wire.keys import (
    ALONG,
    CLASSES,
    CODES,
    CURVATURE,
    GRADIENT,
    LOSS_SUM,
    LOSS_SUMS,
    METRICS,
    NUM_EXAMPLES,
    SCALES,
    WEIGHT_SUM,
)
from gems_flwr.wire.model_replies import pack_name

# How a type is written, and by which part of its row's largest number an entry may be off.
_FORMS = {"int8": ("<i1", 0.5 / 127), "float16": ("<f2", 2.0**-11), "float32": ("<f4", 2.0**-24)}
# Beside the rounding of the type: that of division and multiplication in double precision.
_DOUBLE = 1 + 1e-9
# And that of taking a part away and adding it again, of which nodes may compute another last digit.
_DIFFERENCE = 1e-12
# In half precision.
_LARGEST = 6e4


@dataclasses.dataclass(frozen=True, eq=False)
class GradientReply:
    """A node's validated sums.

    Parameters
    ----------
    count : float
        How many samples.
    weight, loss : float
        Sums of the classes' weights and of the weighted losses.
    gradient : array of shape (C, D + 1)
        As it was rounded.
    errors : array of shape (C,)
        By how much an entry of each row may be off.
    curvature : array of shape (C, C, C), or (1, C, C)
        One matrix for each true class, or for all of them.
    """

    count: float
    weight: float
    loss: float
    gradient: Float
    errors: Float
    curvature: Float

    def times(self, factor: float) -> GradientReply:
        """Return the sums as if there were more or fewer samples of the same kind."""
        values = {f.name: getattr(self, f.name) * factor for f in dataclasses.fields(self)}
        return GradientReply(**values)


def pack_gradient_reply(
    sums: LossSums, request: GradientRequest, basis: Float, *, name: str
) -> RecordDict:
    """Return the content of a reply that carries a gradient.

    Parameters
    ----------
    sums : LossSums
        What there is to tell.
    request : GradientRequest
        How.
    basis : array of shape (K, D + 1)
        Directions, nearly orthonormal, along which it is told more exactly.
    name : str
        The node's.
    """
    weight = max(sums.weight, np.finfo(np.float64).tiny)
    along = np.clip(sums.gradient @ basis.T / weight, -_LARGEST, _LARGEST).astype("<f2")
    rest = sums.gradient - _along(along, weight, basis)
    codes, scales = rounded_rows(rest, request.dtype)
    written = codes.tobytes()
    upper = np.triu_indices(len(sums.gradient))
    if request.by_class:
        held = np.flatnonzero(sums.curvature.any(axis=(1, 2)))
        matrices = sums.curvature[held]
    else:
        held, matrices = np.zeros(0, dtype=np.int64), sums.curvature
    halves = (matrices[:, upper[0], upper[1]] / weight).astype("<f2")
    record = ConfigRecord(
        {
            CODES: zlib.compress(written, 9) if request.dtype == "int8" else written,
            SCALES: scales.astype("<f4").tobytes(),
            ALONG: along.tobytes(),
            CURVATURE: halves.tobytes(),
            CLASSES: held.tolist(),
        }
    )
    metrics = MetricRecord(
        {NUM_EXAMPLES: sums.count, WEIGHT_SUM: float(sums.weight), LOSS_SUM: float(sums.loss)}
    )
    return RecordDict({GRADIENT: record, METRICS: metrics, **pack_name(name)})


def unpack_gradient_reply(
    content: RecordDict, request: GradientRequest, classes: int, basis: Float
) -> GradientReply:
    """Validate a reply that carries a gradient.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    request : GradientRequest
        What it was asked for.
    classes : int
        Of the task.
    basis : array of shape (K, D + 1)
        As the node got it.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    record, metrics = content.get(GRADIENT), content.get(METRICS)
    if not isinstance(record, ConfigRecord) or not isinstance(metrics, MetricRecord):
        raise BadReplyError(f"expected a ConfigRecord '{GRADIENT}' and a MetricRecord '{METRICS}'")
    width = basis.shape[1]
    examples = _number(metrics, NUM_EXAMPLES, 1, MAX_EXAMPLES)
    weight = _number(metrics, WEIGHT_SUM, 0, MAX_WEIGHT * examples)
    loss = _number(metrics, LOSS_SUM, 0, MAX_METRIC)
    kind, part = _FORMS[request.dtype]
    written = _bytes(record, CODES)
    if request.dtype == "int8":
        written = _inflated(written, classes * width)
    codes = _values(written, CODES, kind, (classes, width))
    scales = _values(_bytes(record, SCALES), SCALES, "<f4", (classes,))
    if np.abs(codes).max() > (127 if request.dtype == "int8" else 1):
        raise BadReplyError(f"'{CODES}' must be within their scales")
    if scales.min() < 0 or scales.max() > MAX_MOMENT * examples:
        raise BadReplyError(f"'{SCALES}' must be from 0 to {MAX_MOMENT * examples:g}")
    steps = scales / 127 if request.dtype == "int8" else scales
    parts = _values(_bytes(record, ALONG), ALONG, "<f2", (classes, len(basis)))
    along = _along(parts, weight, basis)
    return GradientReply(
        count=examples,
        weight=weight,
        loss=loss,
        gradient=along + codes * steps[:, None],
        errors=scales * part * _DOUBLE + _DIFFERENCE * np.abs(along).max(axis=1, initial=0),
        curvature=_curvature(record, request, classes) * weight,
    )


def pack_losses_reply(losses: NDArray, *, name: str) -> RecordDict:
    """Return the content of a reply with the losses at several points."""
    return RecordDict(
        {METRICS: MetricRecord({LOSS_SUMS: [float(x) for x in losses]}), **pack_name(name)}
    )


def unpack_losses_reply(content: RecordDict, points: int) -> Float:
    """Validate losses at some points; one that became infinite counts as the largest number."""
    metrics = content.get(METRICS)
    losses = metrics.get(LOSS_SUMS) if isinstance(metrics, MetricRecord) else None
    if not isinstance(losses, Sequence) or len(losses) != points:
        raise BadReplyError(f"'{LOSS_SUMS}' must be {points} numbers, got {shown(losses)}")
    values = np.array(losses, dtype=np.float64)
    if np.isnan(values).any() or values.min() < 0:
        raise BadReplyError(f"'{LOSS_SUMS}' must be at least 0, got {shown(losses)}")
    return np.minimum(values, MAX_METRIC)


def rounded_rows(rows: Float, dtype: str) -> tuple[NDArray, NDArray[np.float32]]:
    """Return rows as small numbers, and what each is to be multiplied by (for int8 over 127)."""
    largest = np.abs(rows).max(axis=1)
    # A scale in single precision that is too small would cut off the largest entry.
    scales = np.nextafter(largest.astype(np.float32), np.float32(np.inf), dtype=np.float32)
    scales[largest == 0] = 0
    divisor = np.where(scales > 0, scales, 1).astype(np.float64)
    kind, _ = _FORMS[dtype]
    unit = rows / divisor[:, None]
    return (np.rint(unit * 127) if dtype == "int8" else unit).astype(kind), scales


def _along(parts: NDArray, weight: float, basis: Float) -> Float:
    """Return the part of a gradient that lies along the directions."""
    return np.asarray((parts.astype(np.float64) * weight) @ basis)


def _curvature(record: ConfigRecord, request: GradientRequest, classes: int) -> Float:
    held = record.get(CLASSES)
    if not isinstance(held, Sequence) or isinstance(held, str | bytes):
        raise BadReplyError(f"'{CLASSES}' must be a list, got {shown(held)}")
    known = all(isinstance(c, int) and 0 <= c < classes for c in held)
    if not known or len(set(held)) < len(held) or (held and not request.by_class):
        raise BadReplyError(f"'{CLASSES}' must be classes of the task, got {shown(held)}")
    rows, columns = np.triu_indices(classes)
    count = len(held) if request.by_class else 1
    halves = _values(_bytes(record, CURVATURE), CURVATURE, "<f2", (count, len(rows)))
    if np.abs(halves).max(initial=0) > 1:
        raise BadReplyError(f"'{CURVATURE}' must be from -1 to 1")
    full = np.zeros((classes if request.by_class else 1, classes, classes))
    entries = np.array(held if request.by_class else [0], dtype=np.int64)
    full[entries[:, None], rows, columns] = halves
    full[entries[:, None], columns, rows] = halves
    return full


def _values(data: bytes, key: str, kind: str, shape: tuple[int, ...]) -> Float:
    wanted = math.prod(shape) * np.dtype(kind).itemsize
    if len(data) != wanted:
        raise BadReplyError(f"'{key}' must have {wanted} bytes, got {len(data)}")
    values = np.frombuffer(data, dtype=kind).reshape(shape).astype(np.float64)
    if not np.isfinite(values).all():
        raise BadReplyError(f"'{key}' holds NaN or infinity")
    return values


def _inflated(data: bytes, size: int) -> bytes:
    """Return deflated bytes, never more than expected, whatever the reply would become."""
    stream = zlib.decompressobj()
    try:
        return stream.decompress(data, size + 1)
    except zlib.error as error:
        raise BadReplyError(f"'{CODES}' cannot be inflated: {error}") from error


def _bytes(record: ConfigRecord, key: str) -> bytes:
    value = record.get(key)
    if not isinstance(value, bytes):
        raise BadReplyError(f"'{key}' must be bytes, got {shown(value)}")
    return value


def _number(metrics: MetricRecord, key: str, low: float, high: float) -> float:
    value = metrics.get(key)
    if not isinstance(value, int | float) or not low <= value <= high:
        raise BadReplyError(
            f"'{key}' must be a number from {low:g} to {high:g}, got {shown(value)}"
        )
    return float(value)
