"""Messages of dynamic averaging, where a model is the exception and a number the rule.

==============  =================================================================
instruction     ``config`` with ``averaging`` (JSON of an `AveragingRequest`);
                ``arrays`` only if the node gets a new model, ``reference`` only
                if it gets a new reference that is not that model; both are
                packed where the request has ``compress``
reply           one MetricRecord with ``num-examples`` and, if asked for,
                ``squared-distance``; one ArrayRecord only on violation or on
                request
reply of a      ``averaging`` (ConfigRecord with ``needs-model``) instead of metrics
node without
its state
==============  =================================================================

Versions make repeated and outdated messages harmless: every model that the server hands out has a
number, and a request names the numbers of the model and of the reference that the node must have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from gems_flwr.bounds import MAX_EXAMPLES
from gems_flwr.compression.difference_coding import Form, PackedModel
from gems_flwr.errors import BadReplyError
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import (
    ARRAYS,
    AVERAGING,
    BATCHES,
    CONFIG,
    CORRECT_SHARE_SUM,
    METRICS,
    NEEDS_MODEL,
    REFERENCE,
    SERVER_ROUND,
    SQUARED_DISTANCE,
)
from gems_flwr.wire.model_replies import (
    pack_name,
    single_numbers,
    unpack_metrics_reply,
    unpack_model_reply,
)
from gems_flwr.wire.packed_records import open_packed_reply, pack_bytes, unpack_bytes
from gems_flwr.wire.quick_records import make_content, make_metrics, records_of


@dataclass(frozen=True)
class AveragingReply:
    """A validated reply.

    Parameters
    ----------
    needs_model : bool
        Whether the node has lost its state; then the rest is empty.
    num_examples : float
        Samples of this round, above 0.
    squared_distance : float, optional
        ‖f − r‖², if it was asked for.
    arrays : mapping from str to ndarray, optional
        The local model, if it was sent.
    metrics : mapping from str to float
        What else the train handler reported.
    """

    needs_model: bool = False
    num_examples: float = 0.0
    squared_distance: float | None = None
    arrays: Arrays | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


# A model as it comes in a message: as arrays, or as bytes.
SentModel = ArrayRecord | PackedModel


def take_new_models(content: RecordDict) -> tuple[SentModel | None, SentModel | None]:
    """Take the new model and the new reference, if any, out of an instruction."""
    return _sent_model(content, ARRAYS), _sent_model(content, REFERENCE)


def _sent_model(content: RecordDict, key: str) -> SentModel | None:
    record = content.pop(key, None)
    if isinstance(record, ConfigRecord):
        return unpack_bytes(record, key)
    return record if isinstance(record, ArrayRecord) else None


def put_local_model(content: RecordDict, model: ArrayRecord, server_round: int) -> None:
    """Make an instruction what an ordinary train handler expects: a model and a round."""
    config = content[CONFIG]
    assert isinstance(config, ConfigRecord)
    config[SERVER_ROUND] = server_round
    content[ARRAYS] = model


def pack_needs_model(name: str) -> RecordDict:
    """Return the reply of a node that has no local model, or not the one that it should have."""
    return RecordDict({AVERAGING: ConfigRecord({NEEDS_MODEL: True}), **pack_name(name)})


def needs_model(content: RecordDict) -> bool:
    """Return whether a reply says that the node has lost its state."""
    note = content.get(AVERAGING)
    return isinstance(note, ConfigRecord) and note.get(NEEDS_MODEL) is True


def pack_averaging_reply(
    metrics: Mapping[str, int | float],
    *,
    name: str,
    squared_distance: float | None,
    model: SentModel | None,
) -> RecordDict:
    """Return a reply: the handler's metrics, the distance if asked for, the model if it is due."""
    numbers = dict(metrics)
    if squared_distance is not None:
        numbers[SQUARED_DISTANCE] = float(squared_distance)
    records = {METRICS: make_metrics(numbers), **pack_name(name)}
    if model is not None:
        records[ARRAYS] = pack_bytes(model) if isinstance(model, PackedModel) else model
    return make_content(records)


def unpack_averaging_reply(
    content: RecordDict,
    expected: Arrays,
    *,
    measured: bool,
    must_send: bool,
    compress: Form = "float32",
) -> AveragingReply:
    """Validate a reply.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    expected : mapping from str to ndarray
        The reference: arrays with the names, shapes and dtypes that a model must have.
    measured : bool
        Whether the squared distance was asked for.
    must_send : bool
        Whether the model was asked for.
    compress : {"float32", "float16", "int8", "int4", "int2"}
        How it was asked for.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    if needs_model(content):
        return AveragingReply(needs_model=True)
    arrays: Arrays | None = None
    if compress != "float32":
        open_packed_reply(content, expected, compress)
    if records_of(content, ArrayRecord):
        arrays = unpack_model_reply(content, expected).arrays
    elif must_send:
        raise BadReplyError("the model was asked for, but none came")
    reply = unpack_metrics_reply(content)
    metrics = single_numbers(reply.metrics)
    distance = metrics.pop(SQUARED_DISTANCE, None)
    if measured and distance is None:
        raise BadReplyError(f"metric '{SQUARED_DISTANCE}' is missing or not a single number")
    if distance is not None and distance < 0:
        raise BadReplyError(f"metric '{SQUARED_DISTANCE}' is {distance}, expected at least 0")
    _check_sums(metrics)
    return AveragingReply(False, reply.num_examples, distance, arrays, metrics)


def mean_reply(metrics: Mapping[str, float], arrays: Arrays | None) -> AveragingReply:
    """Return the reply that stands for each of several nodes, of which only the mean is known."""
    others = dict(metrics)
    distance = others.pop(SQUARED_DISTANCE, None)
    return AveragingReply(False, 1.0, distance, arrays, others)


def _check_sums(metrics: Mapping[str, float]) -> None:
    """Refuse counts that are none: what is summed over the nodes is divided by them."""
    batches = metrics.get(BATCHES, 1)
    if not (batches == 0 or 1 <= batches <= MAX_EXAMPLES):
        raise BadReplyError(
            f"metric '{BATCHES}' is {batches}, expected 0, or 1 to {MAX_EXAMPLES:g}"
        )
    right = metrics.get(CORRECT_SHARE_SUM, 0)
    if not 0 <= right <= MAX_EXAMPLES:
        raise BadReplyError(
            f"metric '{CORRECT_SHARE_SUM}' is {right}, expected 0 to {MAX_EXAMPLES:g}"
        )
