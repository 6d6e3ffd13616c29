"""Replies that carry the balls of a hidden layer's neurons.

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
    JSON,
    LAYER,
    NEURONS,
    SERVER_ROUND,
    SPACE_META,
)
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import checked_array, read_json
from gems_flwr.wire.requests import NeuronRequest


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
        if balls.method != request.neurons.radius:
            raise SpaceError("method", request.neurons.radius, balls.method)
    except SpaceError as error:
        raise BadReplyError(str(error)) from error
    return balls
