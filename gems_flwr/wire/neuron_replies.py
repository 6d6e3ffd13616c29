"""Requests for the balls of a hidden layer's neurons, replies that carry them, frozen layers.

A reply to a train message with a ``neuron-request`` carries, instead of the model, one array with
a row per neuron (see `NeuronBalls`) and one JSON text with the rest, which says
for which round and layer it was made.
"""

from __future__ import annotations

import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from gems_flwr.errors import BadReplyError, SpaceError
from gems_flwr.spaces.checks import shown
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.wire.keys import (
    CONFIG,
    FROZEN_LAYERS,
    JSON,
    LAYER,
    NEURON_REQUEST,
    NEURONS,
    SERVER_ROUND,
    SPACE_META,
)
from gems_flwr.wire.model_replies import instruction_config, pack_name
from gems_flwr.wire.records import checked_array, read_json
from gems_flwr.wire.requests import NeuronRequest


def ask_for_neurons(content: RecordDict, request: NeuronRequest) -> None:
    """Put a request into an instruction; the layers below the one asked for are frozen."""
    _put(content, NEURON_REQUEST, request.to_json())
    freeze_below(content, request.layer)


def freeze_below(content: RecordDict, layers: int) -> None:
    """Say in an instruction how many layers, from the input, training must leave alone."""
    if layers:
        _put(content, FROZEN_LAYERS, layers)


def requested_neurons(content: RecordDict) -> NeuronRequest | None:
    """Return the request in an instruction, or None where there is none."""
    text = instruction_config(content).get(NEURON_REQUEST)
    return NeuronRequest.from_json(text) if isinstance(text, str) else None


def frozen_layers(content: RecordDict) -> int:
    """Return how many layers, from the input, training must leave alone."""
    count = instruction_config(content).get(FROZEN_LAYERS, 0)
    return count if isinstance(count, int) else 0


def pack_neurons_reply(
    balls: NeuronBalls, *, layer: int, server_round: int, name: str
) -> RecordDict:
    """Return the content of a reply that carries the balls of one layer."""
    record = ArrayRecord({NEURONS: Array(balls.to_array())})
    meta = {**balls.to_meta(), LAYER: layer, SERVER_ROUND: server_round}
    text = ConfigRecord({JSON: json.dumps(meta, separators=(",", ":"))})
    return RecordDict({NEURONS: record, SPACE_META: text, **pack_name(name)})


def unpack_neurons_reply(
    content: RecordDict,
    request: NeuronRequest,
    *,
    width: int,
    dimension: int,
    outgoing: int,
    server_round: int,
) -> NeuronBalls:
    """Validate a reply that carries the balls of one layer.

    Parameters
    ----------
    content : RecordDict
        What the node sent.
    request : NeuronRequest
        What it was asked for.
    width, dimension, outgoing : int
        Neurons of the layer that was sent out, numbers per neuron, and how many of those are
        outgoing weights.
    server_round : int
        The round under way.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    record, text = content.get(NEURONS), content.get(SPACE_META)
    if not isinstance(record, ArrayRecord) or record.keys() != {NEURONS}:
        raise BadReplyError(f"expected an ArrayRecord '{NEURONS}' with one array of that name")
    if not isinstance(text, ConfigRecord):
        raise BadReplyError(f"expected a ConfigRecord '{SPACE_META}'")
    try:
        meta = read_json(text.get(JSON), SPACE_META)
        for key, wanted in {SERVER_ROUND: server_round, LAYER: request.layer}.items():
            if meta.get(key) != wanted:
                raise SpaceError(key, str(wanted), shown(meta.get(key)))
        array = checked_array(
            record[NEURONS], NEURONS, (width, dimension + 2), np.dtype(np.float32)
        )
        balls = NeuronBalls.from_array(array, meta)
        if balls.outgoing != outgoing:
            raise SpaceError("outgoing", str(outgoing), balls.outgoing)
        if balls.method != request.radius:
            raise SpaceError("method", request.radius, balls.method)
    except SpaceError as error:
        raise BadReplyError(str(error)) from error
    return balls


def _put(content: RecordDict, key: str, value: str | int) -> None:
    record = content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"the instruction has no ConfigRecord '{CONFIG}'")
    record[key] = value
