"""Replies about several models: what nodes have, and the part about each; see `ModelsRequest`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.averaging.steps import flat
from gems_flwr.bounds import MAX_CAPACITY, MAX_EXAMPLES, MAX_NOTE_CHARACTERS
from gems_flwr.errors import BadReplyError
from gems_flwr.spaces.checks import shown
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import (
    ARRAYS,
    BETA,
    CAPACITY,
    CONTROL,
    GRADIENT,
    JSON,
    LOCAL_LOSS,
    METRICS,
    MODEL,
    MULTI_MODEL,
    NUM_EXAMPLES,
    UPDATE_NORM,
)
from gems_flwr.wire.model_replies import (
    pack_name,
    single_numbers,
    unpack_metrics_reply,
    unpack_model_reply,
)
from gems_flwr.wire.multi_model_requests import vector_of, vector_record
from gems_flwr.wire.records import checked_array, read_json
from gems_flwr.wire.requests import ModelsRequest


@dataclass(frozen=True)
class Holdings:
    """What a node has: examples by model (above 0), and how many models it trains in a round."""

    examples: Mapping[str, int]
    capacity: int


@dataclass(frozen=True)
class ModelPart:
    """What a reply says about one model.

    Parameters
    ----------
    metrics : mapping from str to float
        What the train handler reported.
    num_examples : float
        Samples trained on.
    arrays : mapping from str to ndarray, optional
        The trained model.
    control : ndarray, optional
        The change of the node's control variate (SCAFFOLD).
    loss, norm, beta : float, optional
        The local loss; ‖U‖ or ‖U − βh‖; β.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    num_examples: float = 0.0
    arrays: Arrays | None = None
    control: NDArray | None = None
    loss: float | None = None
    norm: float | None = None
    beta: float | None = None


@dataclass(frozen=True)
class ModelsReply:
    """A validated reply: its parts by model, models that the node lacks, and failures."""

    parts: Mapping[str, ModelPart]
    needs: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


def put_gradient(content: RecordDict, gradient: NDArray) -> None:
    """Add the mean of the uncorrected gradients of training to a handler's reply."""
    content[GRADIENT] = vector_record(gradient)


def take_gradient(content: RecordDict) -> NDArray | None:
    """Take the mean gradient out of a handler's reply; None if it has none."""
    record = content.pop(GRADIENT, None)
    return vector_of(record) if isinstance(record, ArrayRecord) else None


def pack_holdings(holdings: Holdings, *, name: str) -> RecordDict:
    """Return a node's introduction."""
    examples = {key: int(count) for key, count in holdings.examples.items() if count > 0}
    note = ConfigRecord({JSON: json.dumps(examples), CAPACITY: int(holdings.capacity)})
    return RecordDict({MULTI_MODEL: note, **pack_name(name)})


def unpack_holdings(content: RecordDict, models: Mapping[str, Any]) -> Holdings:
    """Validate an introduction; models that the server does not train are left out.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    note = content.get(MULTI_MODEL)
    if not isinstance(note, ConfigRecord):
        raise BadReplyError(
            f"expected a ConfigRecord '{MULTI_MODEL}' with the node's examples; does its "
            "ClientApp have multi_model_mod?"
        )
    examples, capacity = read_json(note.get(JSON), MULTI_MODEL), note.get(CAPACITY)
    for model, count in examples.items():
        if not _is_count(count, MAX_EXAMPLES):
            raise BadReplyError(
                f"examples of model '{model}' are {shown(count)}, expected a count of at most "
                f"{MAX_EXAMPLES:g}"
            )
    if not _is_count(capacity, MAX_CAPACITY):
        raise BadReplyError(
            f"'{CAPACITY}' is {shown(capacity)}, expected a whole number from 0 up to "
            f"{MAX_CAPACITY:,}"
        )
    assert isinstance(capacity, int)
    return Holdings({m: examples[m] for m in models if examples.get(m)}, capacity)


def pack_models_reply(
    records: Mapping[str, MetricRecord],
    *,
    name: str,
    models: Mapping[str, ArrayRecord] | None = None,
    controls: Mapping[str, NDArray] | None = None,
    needs: tuple[str, ...] = (),
    failed: Mapping[str, str] | None = None,
) -> RecordDict:
    """Return a reply about several models."""
    content = pack_name(name)
    for model, record in records.items():
        content[f"{METRICS}/{model}"] = record
    for model, arrays in (models or {}).items():
        content[f"{MODEL}/{model}"] = arrays
    for model, vector in (controls or {}).items():
        content[f"{CONTROL}/{model}"] = vector_record(vector)
    if needs or failed:
        note = {"needs": list(needs), "failed": dict(failed or {})}
        content[MULTI_MODEL] = ConfigRecord({JSON: json.dumps(note)})
    return content


def pack_part(
    metrics: Mapping[str, int | float],
    *,
    loss: float | None = None,
    norm: float | None = None,
    beta: float | None = None,
) -> MetricRecord:
    """Return what a reply says about one model, but for arrays."""
    record = MetricRecord(dict(metrics))
    for key, value in ((LOCAL_LOSS, loss), (UPDATE_NORM, norm), (BETA, beta)):
        if value is not None:
            record[key] = float(value)
    return record


def unpack_models_reply(
    content: RecordDict, request: ModelsRequest, models: Mapping[str, Arrays], *, control: bool
) -> ModelsReply:
    """Validate a reply.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    request : ModelsRequest
        What it was asked for.
    models : mapping from str to mapping
        For each model, arrays with the names, shapes and dtypes that it must have.
    control : bool
        Whether changes of control variates were asked for.

    Raises
    ------
    BadReplyError
        Names the model and the key at fault, what was expected and what came.
    """
    note = content.get(MULTI_MODEL)
    told = read_json(note.get(JSON), MULTI_MODEL) if isinstance(note, ConfigRecord) else {}
    needs, failed = told.get("needs", []), told.get("failed", {})
    if not isinstance(needs, list) or not isinstance(failed, dict):
        raise BadReplyError(f"'{MULTI_MODEL}' must have a list 'needs' and an object 'failed'")
    absent = {*map(str, needs), *map(str, failed)}
    parts = {}
    for name in request.versions:
        if name in absent:
            continue
        try:
            parts[name] = _unpack_part(content, name, request, models[name], control)
        except BadReplyError as error:
            raise BadReplyError(f"model '{name}': {error}") from error
    asked = request.versions
    return ModelsReply(
        parts,
        tuple(name for name in asked if name in map(str, needs)),
        {name: str(failed[name])[:MAX_NOTE_CHARACTERS] for name in asked if name in failed},
    )


def _unpack_part(
    content: RecordDict, name: str, request: ModelsRequest, expected: Arrays, control: bool
) -> ModelPart:
    metrics = content.get(f"{METRICS}/{name}")
    if not isinstance(metrics, MetricRecord):
        raise BadReplyError(f"expected a MetricRecord '{METRICS}/{name}'")
    single = RecordDict({METRICS: metrics})
    if request.action == "losses":
        # A loss is all that was asked for; the number of examples is known.
        single[METRICS] = MetricRecord({**metrics, NUM_EXAMPLES: 1})
    arrays = None
    if request.action == "send" or (request.action == "train" and request.report == "model"):
        record = content.get(f"{MODEL}/{name}")
        if not isinstance(record, ArrayRecord):
            raise BadReplyError("the model was asked for, but none came")
        single[ARRAYS] = record
        arrays = unpack_model_reply(single, expected).arrays
    reply = unpack_metrics_reply(single)
    told = single_numbers(reply.metrics)
    numbers = {key: told.pop(key, None) for key in (LOCAL_LOSS, UPDATE_NORM, BETA)}
    wanted = {
        LOCAL_LOSS: request.action == "losses",
        UPDATE_NORM: request.action == "train" and request.report != "model",
        BETA: request.action == "train" and request.report == "residual",
    }
    for key, needed in wanted.items():
        value = numbers[key]
        if needed and value is None:
            raise BadReplyError(f"metric '{key}' is missing or not a single number")
        if needed and key != BETA and value is not None and value < 0:
            raise BadReplyError(f"metric '{key}' is {value}, expected at least 0")
    vector = None
    if control:
        record = content.get(f"{CONTROL}/{name}")
        if not isinstance(record, ArrayRecord) or record.keys() != {CONTROL}:
            raise BadReplyError(f"expected an ArrayRecord '{CONTROL}/{name}' with one vector")
        like = flat(expected)
        vector = checked_array(record[CONTROL], CONTROL, like.shape, like.dtype)
    return ModelPart(
        told,
        reply.num_examples,
        arrays,
        vector,
        *(numbers[k] for k in (LOCAL_LOSS, UPDATE_NORM, BETA)),
    )


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
