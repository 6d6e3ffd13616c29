"""A trained model as a summand: its step, weighted, in fixed point.

What a node adds for a weighted mean of models is w · (trained - sent) for every array, w itself,
and w times its metrics, where w is its number of examples as a part of the largest that counts.
The mean is the quotient of the sums. Decided here: floating-point arrays move by no more than a
clip, or the node refuses; whole numbers (counters of batches) have a ring of 64 bits. Metrics fill
a fixed number of places in the order of their names, which go beside the masked numbers; where
nodes have different ones, nothing is made of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_EXAMPLES
from gems_flwr.errors import BadReplyError, OptionError, SecureSumError
from gems_flwr.secure.fixed_point import Layout, Section
from gems_flwr.typing import Arrays, Float
from gems_flwr.wire.keys import ARRAYS, METRIC_NAMES, MODEL_SUMMAND, NUM_EXAMPLES
from gems_flwr.wire.model_replies import (
    MetricsReply,
    ModelReply,
    unpack_metrics_reply,
    unpack_model_reply,
)
from gems_flwr.wire.requests import JsonRequest
from gems_flwr.wire.summands import pack_summand

MAX_METRICS = 16
# Losses, accuracies, seconds: what is larger is not told.
LARGEST_METRIC = 1e6
_LARGEST_WHOLE = 2.0**40
_WEIGHT, _METRICS, _ARRAY = "weight", "metrics", "array/"


@dataclasses.dataclass(frozen=True)
class ModelSummand(JsonRequest):
    """How a model is made a summand.

    Parameters
    ----------
    most_examples : float
        Examples that count as weight 1; a node with more counts as that many.
    weighted : bool
        Whether nodes count by their examples, or all the same.
    weight_key : str
        Metric that has the number of examples.
    origin : {"sent", "reference", "nothing"}
        What the step of the model is taken from: the model in the message, or the reference that a
        local learner keeps; or only metrics are wanted.
    arrays : str
        Record of the instruction that has the model that was sent.
    """

    most_examples: float = 2.0**24
    weighted: bool = True
    weight_key: str = NUM_EXAMPLES
    origin: Literal["sent", "reference", "nothing"] = "sent"
    arrays: str = ARRAYS

    def __post_init__(self) -> None:
        allowed = 0 < self.most_examples <= MAX_EXAMPLES
        self.check({"most_examples": (allowed, f"above 0 and at most {MAX_EXAMPLES:g}")})

    def weight(self, examples: float) -> float:
        """Return how much a node counts, in (0, 1]."""
        return min(1.0, examples / self.most_examples) if self.weighted else 1.0


def model_sections(
    model: Arrays, clip: float, bits: int, largest_metric: float = LARGEST_METRIC
) -> list[Section]:
    """Return what a model's summand is made of.

    Parameters
    ----------
    model : mapping from str to ndarray
        The model that is sent.
    clip : float
        Farthest that a weight may move in training, above 0.
    bits : int
        Of the ring of each weight.
    largest_metric : float
        Above which metrics are not told.
    """
    arrays = [
        Section(_ARRAY + key, array.shape, clip, bits)
        if array.dtype.kind == "f"
        else Section(_ARRAY + key, array.shape, _LARGEST_WHOLE, 64)
        for key, array in model.items()
    ]
    metrics = Section(_METRICS, (MAX_METRICS,), largest_metric, 64)
    return [*arrays, Section(_WEIGHT, (), 1.0, 64), metrics]


def ask_for_model_summand(content: RecordDict, request: ModelSummand) -> None:
    """Ask for the step of a model instead of the model."""
    content[MODEL_SUMMAND] = ConfigRecord({MODEL_SUMMAND: request.to_json()})


def take_model_summand(content: RecordDict) -> ModelSummand | None:
    """Take the question for a model's step out of an instruction, if it asks for one."""
    record = content.pop(MODEL_SUMMAND, None)
    if not isinstance(record, ConfigRecord):
        return None
    return ModelSummand.from_json(str(record[MODEL_SUMMAND]))


def model_summand(
    content: RecordDict, before: Arrays, layout: Layout, request: ModelSummand, *, name: str
) -> RecordDict:
    """Return a reply with a model's weighted step in place of one with the model.

    Parameters
    ----------
    content : RecordDict
        What the handler answered.
    before : mapping from str to ndarray
        What the step is taken from.
    layout : Layout
        How numbers are written.
    request : ModelSummand
        What was asked for.
    name : str
        The node's.

    Raises
    ------
    SecureSumError
        If the handler's answer is no model that fits, or has moved too far.
    """
    reply: ModelReply | MetricsReply
    try:
        if request.origin == "nothing":
            reply = unpack_metrics_reply(content, request.weight_key)
        else:
            reply = unpack_model_reply(content, before, request.weight_key)
    except BadReplyError as error:
        raise SecureSumError(f"the handler's answer cannot be summed: {error}") from error
    weight = request.weight(float(reply.num_examples))
    bounds = {section.name: section.bound for section in layout.sections}
    values: dict[str, Float] = {}
    for key, array in (reply.arrays if isinstance(reply, ModelReply) else {}).items():
        step = array.astype(np.float64) - before[key]
        most = bounds.get(_ARRAY + key, 0.0)
        if np.abs(step).max(initial=0.0) > most:
            raise SecureSumError(
                f"training moved '{key}' by {np.abs(step).max():g}, and the ring holds {most:g}: "
                "a smaller learning rate, or SecureSum(clip=…) at the server"
            )
        values[_ARRAY + key] = weight * step
    metrics = _told_metrics(reply.metrics, bounds.get(_METRICS, LARGEST_METRIC))
    places = np.zeros(MAX_METRICS)
    places[: len(metrics)] = [weight * value for value in metrics.values()]
    packed = pack_summand(
        {**values, _WEIGHT: np.array(weight), _METRICS: places}, layout, name=name
    )
    if metrics:
        packed[METRIC_NAMES] = ConfigRecord({METRIC_NAMES: list(metrics)})
    return packed


def _told_metrics(metrics: Mapping[str, Any], largest: float) -> dict[str, float]:
    """Return the single, finite numbers among metrics, in the order of their names."""
    plain = {
        key: float(value)
        for key, value in sorted(metrics.items())
        if not isinstance(value, list) and math.isfinite(value) and abs(value) <= largest
    }
    return dict(list(plain.items())[:MAX_METRICS])


def names_in(content: RecordDict) -> tuple[str, ...]:
    """Return the names of metrics beside a summand; none if they are not what they should be."""
    record = content.get(METRIC_NAMES)
    names = record.get(METRIC_NAMES) if isinstance(record, ConfigRecord) else None
    if not isinstance(names, list) or len(names) > MAX_METRICS:
        return ()
    fine = all(isinstance(name, str) and 0 < len(name) <= 100 for name in names)
    return tuple(map(str, names)) if fine else ()


def mean_of_total(total: Mapping[str, Float], model: Arrays) -> dict[str, NDArray]:
    """Return the weighted mean of the models whose summands add up to a total.

    Parameters
    ----------
    total : mapping from str to ndarray
        The sums.
    model : mapping from str to ndarray
        The model that was sent.
    """
    weight = float(total[_WEIGHT])
    if not weight > 0:
        raise OptionError("the weights of all nodes together are 0: lower most_examples")
    mean = {}
    for key, array in model.items():
        moved = array.astype(np.float64) + total[_ARRAY + key] / weight
        whole = array.dtype.kind != "f"
        mean[key] = np.asarray(np.rint(moved) if whole else moved).astype(array.dtype)
    return mean


def mean_metrics_of(total: Mapping[str, Float], names: Sequence[str]) -> dict[str, float]:
    """Return the weighted means of the metrics of those names."""
    values = total[_METRICS] / float(total[_WEIGHT])
    return {name: float(value) for name, value in zip(names, values, strict=False)}
