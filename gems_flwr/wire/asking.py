"""Requests in instructions: every one is put there, and read there, by a function of this module.

A request is a text in the instruction's ``config``, under a key of its own. What else it needs,
such as models that the node lacks, goes beside it.

==============  =================================================================
request         what ``config`` has
==============  =================================================================
a space         ``space-request``
a score         ``verify``, and ``score-request`` if the score is to be noised
a gradient      ``gradient-request``; an ArrayRecord ``refinement`` beside it
losses          ``losses-request``, likewise
moment sums     ``sums-request``; an ArrayRecord ``moment-sums`` from the third on
                (see `gems_flwr.wire.moment_requests`)
a noisy sum     ``private-sum-request`` and ``sum-layout``; an ArrayRecord
                ``private-sum`` with the center, but for the first one
a choice        ``choice-request``; an ArrayRecord ``candidates`` with all layers
                (see `gems_flwr.wire.choice_messages`)
neurons         ``neuron-request``, and ``frozen-layers``
a trial         ``try-widths``: does the network run at other widths?
statistics      ``statistics-request``
averaging       ``averaging``; ``arrays`` only if the node gets a new model,
                ``reference`` only if it gets a new reference that is not that
several models  ``multi-model``; an ArrayRecord ``model/<name>`` for each model
                that the node lacks, ``control/<name>`` for SCAFFOLD
a name          ``tell-name``, in a train message without a model
==============  =================================================================

Beside a request for moment sums, a score, a choice, a gradient or losses there may be a
``sum-layout``: then the answer is a summand (see `gems_flwr.wire.summands`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from gems_flwr.wire.keys import (
    ARRAYS,
    AVERAGING,
    CONFIG,
    CONTROL,
    FROZEN_LAYERS,
    MODEL,
    MULTI_MODEL,
    NEURON_REQUEST,
    REFERENCE,
    SCORE_REQUEST,
    SPACE_REQUEST,
    STATISTICS_REQUEST,
    TELL_NAME,
    TRY_WIDTHS,
    VERIFY,
)
from gems_flwr.wire.requests import (
    AveragingRequest,
    JsonRequest,
    ModelsRequest,
    NeuronRequest,
    ScoreRequest,
    StatisticsRequest,
)
from gems_flwr.wire.space_requests import SpaceRequest

Request = TypeVar("Request", bound=JsonRequest)


def put(content: RecordDict, key: str, value: str | int | bool) -> None:
    """Put a value into an instruction's config.

    Raises
    ------
    ValueError
        If the instruction has none: the request would be lost.
    """
    record = content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"the instruction has no ConfigRecord '{CONFIG}'")
    record[key] = value


def said(content: RecordDict, key: str) -> object:
    """Return a value in an instruction's config, or None where there is none."""
    record = content.get(CONFIG)
    return record.get(key) if isinstance(record, ConfigRecord) else None


def requested(content: RecordDict, key: str, kind: type[Request]) -> Request | None:
    """Return the request under a key of an instruction, or None where there is none.

    Raises
    ------
    ValueError
        If it asks for what this version does not know, or for what is out of range.
    """
    text = said(content, key)
    return kind.from_json(text) if isinstance(text, str) else None


# --- names ------------------------------------------------------------------------------------


def ask_for_name(content: RecordDict) -> None:
    """Ask in an instruction for the node's name, and nothing else."""
    put(content, TELL_NAME, True)


def wants_name(content: RecordDict) -> bool:
    """Return whether an instruction asks for the node's name."""
    return said(content, TELL_NAME) is True


# --- spaces and scores ------------------------------------------------------------------------


def ask_for_space(content: RecordDict, request: SpaceRequest) -> None:
    """Put a request for a space into an instruction."""
    put(content, SPACE_REQUEST, request.to_json())


def requested_space(content: RecordDict) -> SpaceRequest | None:
    """Return the request for a space in an instruction, or None where there is none."""
    return requested(content, SPACE_REQUEST, SpaceRequest)  # type: ignore[type-abstract]


def ask_for_score(content: RecordDict, request: ScoreRequest | None = None) -> None:
    """Ask in an instruction for the score of the model in it, and nothing else."""
    put(content, VERIFY, True)
    if request is not None and request.private:
        put(content, SCORE_REQUEST, request.to_json())


def wants_score(content: RecordDict) -> bool:
    """Return whether an instruction asks for a score."""
    return bool(said(content, VERIFY))


def requested_score(content: RecordDict) -> ScoreRequest:
    """Return how the score is to be told; exactly where nothing is said."""
    return requested(content, SCORE_REQUEST, ScoreRequest) or ScoreRequest()


# --- hidden layers ----------------------------------------------------------------------------


def ask_for_neurons(content: RecordDict, request: NeuronRequest) -> None:
    """Put a request into an instruction; the layers below the one asked for are frozen."""
    put(content, NEURON_REQUEST, request.to_json())
    freeze_below(content, request.layer)


def requested_neurons(content: RecordDict) -> NeuronRequest | None:
    """Return the request for neurons in an instruction, or None where there is none."""
    return requested(content, NEURON_REQUEST, NeuronRequest)


def freeze_below(content: RecordDict, layers: int) -> None:
    """Say in an instruction how many layers, from the input, training must leave alone."""
    if layers:
        put(content, FROZEN_LAYERS, layers)


def frozen_layers(content: RecordDict) -> int:
    """Return how many layers, from the input, training must leave alone."""
    count = said(content, FROZEN_LAYERS)
    return count if isinstance(count, int) else 0


def ask_to_try_widths(content: RecordDict) -> None:
    """Ask in an instruction whether the node's network runs at other widths than its own."""
    put(content, TRY_WIDTHS, True)


def wants_widths_tried(content: RecordDict) -> bool:
    """Return whether an instruction asks for that, and nothing else."""
    return bool(said(content, TRY_WIDTHS))


# --- models -----------------------------------------------------------------------------------


def ask_for_statistics(content: RecordDict, request: StatisticsRequest) -> None:
    """Put a request for statistics beside the model into an instruction."""
    put(content, STATISTICS_REQUEST, request.to_json())


def requested_statistics(content: RecordDict) -> StatisticsRequest | None:
    """Return the request for statistics in an instruction, or None where there is none."""
    return requested(content, STATISTICS_REQUEST, StatisticsRequest)


def ask_for_averaging(
    content: RecordDict,
    request: AveragingRequest,
    model: ArrayRecord | ConfigRecord | None = None,
    reference: ArrayRecord | ConfigRecord | None = None,
) -> None:
    """Add a request to an instruction, with a new model and a new reference where there are any.

    Either may be packed (`gems_flwr.wire.packed_records`).
    """
    put(content, AVERAGING, request.to_json())
    if model is not None:
        content[ARRAYS] = model
    if reference is not None:
        content[REFERENCE] = reference


def requested_averaging(content: RecordDict) -> AveragingRequest | None:
    """Return what the server asks of the local model; None where this is another protocol."""
    text = said(content, AVERAGING)
    return _averaging(text) if isinstance(text, str) else None


@lru_cache(maxsize=64)
def _averaging(text: str) -> AveragingRequest:
    """Return what a text asks for: in a quiet round the same of all nodes."""
    return AveragingRequest.from_json(text)


def ask_for_models(
    content: RecordDict,
    request: ModelsRequest,
    weights: Mapping[str, ArrayRecord] | None = None,
    controls: Mapping[str, ArrayRecord] | None = None,
) -> None:
    """Add a request to an instruction, with the models that the node lacks."""
    put(content, MULTI_MODEL, request.to_json())
    for name, record in (weights or {}).items():
        content[f"{MODEL}/{name}"] = record
    for name, record in (controls or {}).items():
        content[f"{CONTROL}/{name}"] = record


def requested_models(content: RecordDict) -> ModelsRequest | None:
    """Return what the server asks of several models; None where this is another protocol."""
    return requested(content, MULTI_MODEL, ModelsRequest)
