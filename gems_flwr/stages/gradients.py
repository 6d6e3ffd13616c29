"""What nodes are asked in rounds of refinement: loss, gradient, curvature; then losses at points.

What lies along a few directions that the server names travels in half precision; nodes with few
classes have large gradients there, which cancel only in the sum. The rest of a gradient travels as
whole numbers from -127 to 127 and one scale for each row, deflated: an entry is off by no more than
a known part of its row's scale, which the bound on the result takes into account. Curvatures are
symmetric and only steer steps: upper halves in half precision, divided by the node's weight. Raw
bytes have no headers; their lengths are known beforehand, also before they are inflated.

The server chooses the layer, so a node answers under masks, or as often as its limits say. Alone it
leaves out classes with too few samples and rounds every sum by the rule of class moments
(`sum_steps`), unless its limits allow full moments. By how much a row may be off is in the reply.

`GradientSum` and `LossesSum` ask for the same as sums over nodes (`Round.total`).
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_EXAMPLES, MAX_METRIC, MAX_MOMENT, MAX_POINTS, MAX_WEIGHT
from gems_flwr.core.question import Disclosure, Group, LayerQuestion, Question, SumQuestion
from gems_flwr.core.records import METRICS, NUM_EXAMPLES
from gems_flwr.errors import BadReplyError, ModelError, RefusedError, shown
from gems_flwr.samples import Samples
from gems_flwr.spaces.cone import (
    LossSums,
    gradient_parts,
    gradient_summand,
    large_enough,
    loss_sums,
    losses_along,
    rounded,
    smallest_count,
    sum_steps,
)
from gems_flwr.spaces.cone.summed import summed_samples
from gems_flwr.typing import Float

if TYPE_CHECKING:
    from gems_flwr.node import Node

GRADIENT, CODES, SCALES, ALONG = "gradient", "codes", "scales", "along"
CURVATURE, CLASSES, WEIGHT_SUM = "curvature", "classes", "weight-sum"
STEPS, WITHHELD = "steps", "withheld"
LOSS_SUM, LOSS_SUMS = "loss-sum", "loss-sums"

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
    withheld: Float  # above 0 for classes that are in none of this (C,)

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
        """Return that it is a loss at a layer that the server chose."""
        return Disclosure("loss", masked_with=node.hidden_with, adaptive=1)

    def shown(self, node: Node) -> Samples:
        """Return the samples of classes that have enough, and note that they get an answer."""
        if isinstance(self, SumQuestion):
            # As in the moments, whose totals bound sums.
            samples = summed_samples(node, getattr(self, "min_count", None))
        else:
            samples = node.inputs("train")
            least = smallest_count(samples.inputs.shape[1]) if node.is_guarded else 1
            samples = large_enough(samples, least)
        if not len(samples) and not node.hidden_with:
            raise RefusedError("largest_rank", "no class has the samples that it takes")
        counts = samples.labels.long().bincount().tolist()
        groups = tuple(Group(f"class {label}", n) for label, n in enumerate(counts) if n)
        node.allow(dataclasses.replace(self.discloses(node), groups=groups), leaves=True)
        return samples

    def sums(self, node: Node, samples: Samples, by_class: bool) -> tuple[LossSums, Float]:
        """Return the sums, rounded as the samples behind them demand, and the steps of rows."""
        about = self.layer_on(node)
        sums = loss_sums(samples, *about, by_class=by_class, device=node.device)
        if not node.is_guarded or not len(samples):
            return sums, np.zeros(len(sums.gradient))
        parts, labels = gradient_parts(samples, *about, node.device), samples.labels.long().numpy()
        rows, numbers = parts[:, :-2], sums.gradient.size + sums.curvature.size
        steps = sum_steps(rows, labels, numbers)
        curvature = sums.curvature
        for label in np.unique(labels) if by_class else [0]:
            mine = labels == label if by_class else labels >= 0
            step = sum_steps(parts[mine, -1:], labels[mine], numbers)
            curvature[label] = rounded(curvature[label], step)
        return dataclasses.replace(
            sums,
            loss=float(rounded(sums.loss, sum_steps(parts[:, -2:-1], labels, 1))[0]),
            gradient=rounded(sums.gradient, steps[:, None]),
        ), steps


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
        width = len(self.scale) + 1
        # More directions than that are not orthonormal.
        if self.basis.ndim != 2 or self.basis.shape[1] != width or len(self.basis) > width:
            raise ModelError(f"a basis of shape {self.basis.shape} for {len(self.scale)} inputs")

    def answer(self, node: Node) -> RecordDict:
        """Return the sums, rounded."""
        samples = self.shown(node)
        reply = self.packed(*self.sums(node, samples, self.by_class))
        if missing := {*node.inputs("train").labels.tolist()} - {*samples.labels.tolist()}:
            reply.config_records[GRADIENT][WITHHELD] = sorted(map(int, missing))
        return reply

    def packed(self, sums: LossSums, steps: Float | None = None) -> RecordDict:
        """Return the reply with some sums, and the steps that rows are rounded to if any is."""
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
        if steps is not None and steps.any():
            record[STEPS] = np.nextafter(steps.astype("<f4"), np.float32(np.inf)).tobytes()
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
        steps = np.zeros(classes)
        if STEPS in record:
            steps = raw_values(record, STEPS, "<f4", (classes,), (0, MAX_MOMENT * examples))
        withheld = np.zeros(classes)
        withheld[_classes(record.get(WITHHELD, []), WITHHELD, classes)] = 1
        return GradientReply(
            count=examples,
            weight=weight,
            loss=loss,
            gradient=along + codes * (scales / 127)[:, None],
            errors=scales * _OFF + _DIFFERENCE * np.abs(along).max(axis=1, initial=0) + steps / 2,
            curvature=self._curvature(record, classes) * weight,
            withheld=withheld,
        )

    def _curvature(self, record: ConfigRecord, classes: int) -> Float:
        held = _classes(record.get(CLASSES), CLASSES, classes if self.by_class else 0)
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
        samples = self.shown(node)
        sums, _ = self.sums(node, samples, self.by_class)
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
        if len(shape) != 2 or shape[1] != 2 or not 1 <= shape[0] <= MAX_POINTS:
            raise ModelError(f"points must be 1 to {MAX_POINTS} pairs, got shape {shape}")

    def losses(self, node: Node, samples: Samples) -> tuple[Float, Float]:
        """Return the loss at each point, and the weights of the classes."""
        layer, scale, weights = self.layer_on(node)
        direction = _doubles(self.direction)
        if direction.shape != layer.shape:
            raise ModelError(f"a step of shape {direction.shape} for a layer of {layer.shape}")
        # The layer itself is the first direction: its multiples take no bytes.
        directions, points = np.stack([layer, direction]), _doubles(self.points)
        about = (directions, points, scale, weights, node.device)
        losses = losses_along(samples, layer, *about)
        sums, lengths = losses.sum(axis=0), np.linalg.norm(losses, axis=1, keepdims=True)
        if node.is_guarded:
            step = float(sum_steps(lengths, samples.labels.long().numpy(), len(points))[0])
            if step > 0:
                # The first point is where all begin: no other seems better than it is.
                sums = step * np.append(np.floor(sums[:1] / step), np.ceil(sums[1:] / step))
        return sums, weights


@dataclass(frozen=True)
class Losses(LayerQuestion[Float], _AlongStep):
    """What are the losses of some layers along a step, as sums over your training data?"""

    kind: ClassVar[str] = "losses"

    def answer(self, node: Node) -> RecordDict:
        """Return the losses."""
        losses, _ = self.losses(node, self.shown(node))
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
        samples = self.shown(node)
        losses, weights = self.losses(node, samples)
        return {"losses": losses, "weights": _by_class(weights, samples)}


def _classes(given: object, key: str, classes: int) -> list[int]:
    """Return some classes of the task in a reply, each once."""
    known = set(range(classes))
    if not isinstance(given, list) or not set(given) <= known or len(set(given)) < len(given):
        raise BadReplyError(f"'{key}' must be classes of the task, got {shown(given)}")
    return given


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
