"""What a train handler reports, beside a reply that carries something else than its model.

A reply with a space or with neurons has the handler's metrics in a MetricRecord ``metrics``,
as an ordinary train reply does, so that the server can tell the user's own losses. They are checked
like those; a reply without them is as good as one with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import MetricRecord, RecordDict

from gems_flwr.typing import Metrics
from gems_flwr.wire.keys import METRICS, NUM_EXAMPLES
from gems_flwr.wire.model_replies import unpack_metrics_reply
from gems_flwr.wire.quick_records import records_of

T = TypeVar("T")


@dataclass(frozen=True)
class Told(Generic[T]):
    """A validated answer, and what the train handler reported beside it.

    Parameters
    ----------
    value : object
        The answer.
    num_examples : float
        How many samples the handler trained on; 0 where nothing was reported.
    metrics : mapping from str to float, or list of float
        Its other metrics, all finite.
    """

    value: T
    num_examples: float = 0.0
    metrics: Metrics = field(default_factory=dict)


def put_handler_metrics(content: RecordDict, trained: RecordDict) -> None:
    """Add the metrics of a handler's reply to one that goes out instead.

    Only finite numbers, and only with the number of examples that they are weighted by: a loss of
    NaN is no reason to lose what the node has to say.
    """
    finite = MetricRecord()
    for record in records_of(trained, MetricRecord).values():
        for key, value in record.items():
            numbers = value if isinstance(value, list) else [value]
            if all(isinstance(number, int) or math.isfinite(number) for number in numbers):
                finite[key] = value
    if isinstance(finite.get(NUM_EXAMPLES), int | float):
        content[METRICS] = finite


def unpack_told(content: RecordDict, unpack: Callable[[RecordDict], T]) -> Told[T]:
    """Validate a reply with `unpack`, and the handler's metrics in it where there are any.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    value = unpack(content)
    if not records_of(content, MetricRecord):
        return Told(value)
    reported = unpack_metrics_reply(content)
    return Told(value, reported.num_examples, reported.metrics)
