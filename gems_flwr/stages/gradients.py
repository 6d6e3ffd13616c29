"""What nodes are asked in rounds of refinement: loss, gradient, curvature; then losses at points.

What lies along a few directions that the server names travels in half precision; nodes with few
classes have large gradients there, which cancel only in the sum. The rest of a gradient travels as
whole numbers from -127 to 127 and one scale for each row, deflated: an entry is off by no more than
a known part of its row's scale, which the bound on the result takes into account. Curvatures are
symmetric and only steer steps: upper halves in half precision, divided by the node's weight. Raw
bytes have no headers; their lengths are known beforehand, also before they are inflated.

`GradientSum` and `LossesSum` ask for the same as sums over nodes (`Round.total`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_EXAMPLES, MAX_METRIC, MAX_MOMENT, MAX_WEIGHT
from gems_flwr.core.question import Disclosure, Group, LayerQuestion, Question, SumQuestion
from gems_flwr.core.records import METRICS, NUM_EXAMPLES
from gems_flwr.errors import BadReplyError, ModelError, shown
from gems_flwr.samples import Samples
from gems_flwr.spaces.cone import (
    LossSums,
    gradient_summand,
    large_enough,
    loss_sums,
    losses_along,
)
from gems_flwr.typing import Float

if TYPE_CHECKING:
    from gems_flwr.node import Node

GRADIENT, CODES, SCALES, ALONG = "gradient", "codes", "scales", "along"
CURVATURE, CLASSES, WEIGHT_SUM = "curvature", "classes", "weight-sum"
LOSS_SUM, LOSS_SUMS = "loss-sum", "loss-sums"

# Many more than a server has use for; each takes the node a moment.
_MOST_POINTS = 1000
# By which part of its row's largest number an entry may be off: half a step, and the rounding of
# division and multiplication in double precision.
_OFF = 0.5 / 127 * (1 + 1e-9)
# And that of taking a part away and adding it again, of which nodes may compute another last digit.
_DIFFERENCE = 1e-12
# In half precision.
_LARGEST = 6e4


@dataclass(frozen=True, eq=False)
class GradientReply:
    """A node's validated sums."""

    count: float  # how many samples
    weight: float  # the sum of their classes' weights
    loss: float  # the sum of weighted losses
    gradient: Float  # (C, D + 1), as it was rounded
    errors: Float  # (C,), by how much an entry of each row may be off
    curvature: Float  # for each true class, or for all of them: (C, C, C) or (1, C, C)

    def times(self, factor: float) -> GradientReply:
        """Return the sums as if there were more or fewer samples of the same kind."""
        return GradientReply(**{name: value * factor for name, value in vars(self).items()})

    def over(self, weight: float) -> GradientReply:
        """Return means in place of sums."""
        return GradientReply(**{name: value / weight for name, value in vars(self).items()})

    def __add__(self, other: GradientReply) -> GradientReply:
        return GradientReply(**{name: v + vars(other)[name] for name, v in vars(self).items()})


@dataclass(frozen=True)
class _AboutLoss(Question[Any]):
    """What questions about the training loss share."""

    is_about_output_layer: ClassVar[bool] = True

    scale: NDArray  # what inputs are divided by (D,)
    # How much a sample of each class counts, at least 0; empty where all count 1.
    class_weights: Sequence[float] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for name in self.array_fields:
            if not np.isfinite(getattr(self, name)).all():
                raise ModelError(f"{name} must be finite numbers")
        if self.scale.ndim != 1 or not (self.scale > 0).all():
            raise ModelError("the scale of inputs must be one number above 0 for each")
        object.__setattr__(self, "class_weights", tuple(self.class_weights))
        allowed = all(0 <= weight <= MAX_WEIGHT for weight in self.class_weights)
        self.check({"class_weights": (allowed, f"in [0, {MAX_WEIGHT:g}] each")})

    def layer_on(self, node: Node) -> tuple[Float, Float, Float]:
        """Return the node's layer with weights of scaled inputs, the scale, and class weights."""
        output, scale = node.output_layer(), _doubles(self.scale)
        if len(scale) != output.features:
            raise ModelError(f"{len(scale)} scales for {output.features} inputs")
        layer = output.scaled_in(node.model, scale)
        if self.class_weights and len(self.class_weights) != len(layer):
            have = len(self.class_weights)
            raise ModelError(f"the server weighs {have} classes, the layer has {len(layer)}")
        return layer, scale, np.array(self.class_weights or np.ones(len(layer)))

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is a loss; how many samples are behind it is checked when it is known."""
        return Disclosure("loss", masked_with=node.masked_with)

    def sums(self, node: Node, samples: Samples, by_class: bool) -> LossSums:
        """Return the sums, if the node's limits allow what is behind them and behind their rows."""
        sums = loss_sums(samples, *self.layer_on(node), by_class=by_class, device=node.device)
        groups = (
            Group("all samples", int(sums.count)),
            Group("a row of the gradient", sums.fewest, directions=1),  # type: ignore[arg-type]
        )
        features = sums.gradient.shape[1] - 1
        node.limits.allow(Disclosure("loss", features, groups, masked_with=node.masked_with))
        return sums


@dataclass(frozen=True)
class Gradient(LayerQuestion[GradientReply], _AboutLoss):
    """What are loss, gradient and curvature of this layer, as sums over your training data?"""

    kind: ClassVar[str] = "gradient"
    array_fields: ClassVar[tuple[str, ...]] = ("scale", "basis")

    # Directions, nearly orthonormal, along which the gradient is sent more exactly (K, D + 1).
    basis: NDArray
    by_class: bool = True  # whether the curvature is sent for each class, or once for all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.basis.ndim != 2 or self.basis.shape[1] != len(self.scale) + 1:
            raise ModelError(f"a basis of shape {self.basis.shape} for {len(self.scale)} inputs")

    def answer(self, node: Node) -> RecordDict:
        """Return the sums, rounded."""
        return self.packed(self.sums(node, node.inputs("train"), self.by_class))

    def packed(self, sums: LossSums) -> RecordDict:
        """Return the reply with some sums; see the module's docstring."""
        basis = _doubles(self.basis)
        weight = max(sums.weight, np.finfo(np.float64).tiny)
        along = np.clip(sums.gradient @ basis.T / weight, -_LARGEST, _LARGEST).astype("<f2")
        rest = sums.gradient - _along(along, weight, basis)
        largest = np.abs(rest).max(axis=1)
        # A scale in single precision that is too small would cut off the largest entry.
        scales = np.nextafter(largest.astype("<f4"), np.float32(np.inf), dtype="<f4")
        scales[largest == 0] = 0
        unit = rest / np.where(scales > 0, scales, 1).astype(np.float64)[:, None]
        codes = np.rint(unit * 127).astype("<i1")
        held, matrices = np.zeros(0, dtype=np.int64), sums.curvature
        if self.by_class:
            held = np.flatnonzero(sums.curvature.any(axis=(1, 2)))
            matrices = sums.curvature[held]
        rows, columns = np.triu_indices(len(sums.gradient))
        record = ConfigRecord(
            {
                CODES: zlib.compress(codes.tobytes(), 9),
                SCALES: scales.tobytes(),
                ALONG: along.tobytes(),
                CURVATURE: (matrices[:, rows, columns] / weight).astype("<f2").tobytes(),
                CLASSES: held.tolist(),
            }
        )
        numbers: dict[str, Any] = {NUM_EXAMPLES: sums.count}
        numbers |= {WEIGHT_SUM: float(sums.weight), LOSS_SUM: float(sums.loss)}
        return RecordDict({GRADIENT: record, METRICS: MetricRecord(numbers)})

    def read(self, content: RecordDict) -> GradientReply:
        """Return the sums, each within what samples can have."""
        record, metrics = content.get(GRADIENT), content.get(METRICS)
        if not isinstance(record, ConfigRecord) or not isinstance(metrics, MetricRecord):
            raise BadReplyError(
                f"expected a ConfigRecord '{GRADIENT}' and a MetricRecord '{METRICS}'"
            )
        classes, basis = self.output_layer.num_classes, _doubles(self.basis)
        shape = (classes, basis.shape[1])
        examples = _number(metrics, NUM_EXAMPLES, 1, MAX_EXAMPLES)
        weight = _number(metrics, WEIGHT_SUM, 0, MAX_WEIGHT * examples)
        loss = _number(metrics, LOSS_SUM, 0, MAX_METRIC)
        inflated = {CODES: _inflated(record.get(CODES), math.prod(shape))}
        codes = raw_values(inflated, CODES, "<i1", shape, (-127, 127))
        scales = raw_values(record, SCALES, "<f4", (classes,), (0, MAX_MOMENT * examples))
        along = _along(raw_values(record, ALONG, "<f2", (classes, len(basis))), weight, basis)
        return GradientReply(
            count=examples,
            weight=weight,
            loss=loss,
            gradient=along + codes * (scales / 127)[:, None],
            errors=scales * _OFF + _DIFFERENCE * np.abs(along).max(axis=1, initial=0),
            curvature=self._curvature(record, classes) * weight,
        )

    def _curvature(self, record: ConfigRecord, classes: int) -> Float:
        held = record.get(CLASSES)
        known = range(classes if self.by_class else 0)
        if not isinstance(held, list) or not set(held) <= set(known) or len(set(held)) < len(held):
            raise BadReplyError(f"'{CLASSES}' must be classes of the task, got {shown(held)}")
        rows, columns = np.triu_indices(classes)
        entries = np.array(held if self.by_class else [0], dtype=np.int64)
        halves = raw_values(record, CURVATURE, "<f2", (len(entries), len(rows)), (-1, 1))
        full = np.zeros((classes if self.by_class else 1, classes, classes))
        full[entries[:, None], rows, columns] = halves
        full[entries[:, None], columns, rows] = halves
        return full


@dataclass(frozen=True)
class GradientSum(SumQuestion, _AboutLoss):
    """What are loss, gradient and curvature of this layer over the samples of all nodes?"""

    kind: ClassVar[str] = "gradient-sum"
    array_fields: ClassVar[tuple[str, ...]] = ("scale", "center")

    center: NDArray  # the gradient is that of inputs from which it was taken (D,)
    by_class: bool = True
    # Classes with fewer samples on the node do not count, as in the sums of moments.
    min_count: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.center.shape != self.scale.shape:
            raise ModelError(f"a center of shape {self.center.shape} for {len(self.scale)} inputs")

    def summand(self, node: Node) -> dict[str, Float]:
        """Return the node's sums, by section."""
        _, scale, weights = self.layer_on(node)
        samples = _large_enough(node, self.min_count)
        sums = self.sums(node, samples, self.by_class)
        return gradient_summand(sums, _by_class(weights, samples), _doubles(self.center) / scale)


@dataclass(frozen=True)
class _AlongStep(_AboutLoss):
    """What questions about the losses along a step share."""

    array_fields: ClassVar[tuple[str, ...]] = ("scale", "direction", "points")

    direction: NDArray  # the step (C, D + 1)
    points: NDArray  # see `gems_flwr.spaces.cone.candidates` (M, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.points.shape
        if len(shape) != 2 or shape[1] != 2 or not 1 <= shape[0] <= _MOST_POINTS:
            raise ModelError(f"points must be 1 to {_MOST_POINTS} pairs, got shape {shape}")

    def losses(self, node: Node, samples: Samples) -> tuple[Float, Float]:
        """Return the loss at each point, and the weights of the classes."""
        layer, scale, weights = self.layer_on(node)
        direction = _doubles(self.direction)
        if direction.shape != layer.shape:
            raise ModelError(f"a step of shape {direction.shape} for a layer of {layer.shape}")
        # The layer itself is the first direction: its multiples take no bytes.
        directions, points = np.stack([layer, direction]), _doubles(self.points)
        about = (directions, points, scale, weights, node.device)
        return losses_along(samples, layer, *about), weights


@dataclass(frozen=True)
class Losses(LayerQuestion[Float], _AlongStep):
    """What are the losses of some layers along a step, as sums over your training data?"""

    kind: ClassVar[str] = "losses"

    def answer(self, node: Node) -> RecordDict:
        """Return the losses."""
        losses, _ = self.losses(node, node.inputs("train"))
        return RecordDict({METRICS: MetricRecord({LOSS_SUMS: [float(x) for x in losses]})})

    def read(self, content: RecordDict) -> Float:
        """Return the losses; one that became infinite counts as the largest number."""
        metrics = content.get(METRICS)
        losses = metrics.get(LOSS_SUMS) if isinstance(metrics, MetricRecord) else None
        wanted = len(self.points)
        if not isinstance(losses, list) or len(losses) != wanted or not all(x >= 0 for x in losses):
            wish = f"{wanted} numbers of at least 0"
            raise BadReplyError(f"'{LOSS_SUMS}' must be {wish}, got {shown(losses)}")
        return np.minimum(np.array(losses, dtype=np.float64), MAX_METRIC)


@dataclass(frozen=True)
class LossesSum(SumQuestion, _AlongStep):
    """What are the losses of some layers along a step over the samples of all nodes?"""

    kind: ClassVar[str] = "losses-sum"

    min_count: int | None = None

    def summand(self, node: Node) -> dict[str, Float]:
        """Return the node's sums, by section."""
        samples = _large_enough(node, self.min_count)
        losses, weights = self.losses(node, samples)
        return {"losses": losses, "weights": _by_class(weights, samples)}


def _large_enough(node: Node, min_count: int | None) -> Samples:
    """Return the samples that were in the moments, whose totals bound these sums."""
    least = node.limits.least_for_sums(min_count, masked=node.masked_with > 0)
    return large_enough(node.inputs("train"), least)


def _by_class(weights: Float, samples: Samples) -> Float:
    labels = samples.labels.long().cpu()
    return np.asarray(weights * torch.bincount(labels, minlength=len(weights)).numpy())


# --- numbers on the wire --------------------------------------------------------------------


def _doubles(values: NDArray) -> Float:
    """Return what was sent in double precision, the same on both sides."""
    return values.astype(np.float64)


def _along(parts: NDArray, weight: float, basis: Float) -> Float:
    """Return the part of a gradient that lies along the directions."""
    return np.asarray((_doubles(parts) * weight) @ basis)


def raw_values(
    record: Mapping[str, Any],
    key: str,
    kind: str,
    shape: tuple[int, ...],
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> Float:
    """Return the finite numbers within limits in raw bytes of a reply, in double precision.

    `kind` is how a number is written, such as ``"<f4"``.
    """
    data, wanted = record.get(key), math.prod(shape) * np.dtype(kind).itemsize
    if not isinstance(data, bytes):
        raise BadReplyError(f"'{key}' must be bytes, got {shown(data)}")
    if len(data) != wanted:
        raise BadReplyError(f"'{key}' must have {wanted} bytes, got {len(data)}")
    values = _doubles(np.frombuffer(data, dtype=kind).reshape(shape))
    if not np.isfinite(values).all():
        raise BadReplyError(f"'{key}' holds NaN or infinity")
    low, high = limits
    if ((values < low) | (values > high)).any():
        raise BadReplyError(f"'{key}' must be from {low:g} to {high:g}")
    return values


def _inflated(data: object, size: int) -> object:
    """Return deflated bytes, never more than expected, whatever the reply would become."""
    try:
        return zlib.decompressobj().decompress(data, size + 1) if isinstance(data, bytes) else data
    except zlib.error as error:
        raise BadReplyError(f"'{CODES}' cannot be inflated: {error}") from error


def _number(metrics: MetricRecord, key: str, low: float, high: float) -> float:
    value = metrics.get(key)
    if not isinstance(value, int | float) or not low <= value <= high:
        raise BadReplyError(
            f"'{key}' must be a number from {low:g} to {high:g}, got {shown(value)}"
        )
    return float(value)
