"""Replies that carry the balls of a hidden layer's neurons.

A reply to a train message with a ``neuron-request`` carries, instead of the model, one array with
a row per neuron (see `NeuronBalls`) and one JSON text with the rest, which says
for which round and layer it was made. Where an output layer is to be made of the neurons, a
second array is the bias of the layer above.
"""

from __future__ import annotations

import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from gems_flwr.errors import BadReplyError, SpaceError
from gems_flwr.spaces.checks import shown
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.wire.keys import (
    BIAS_ABOVE,
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
    arrays = {NEURONS: Array(balls.to_array())}
    if balls.bias_above is not None:
        arrays[BIAS_ABOVE] = Array(balls.bias_above)
    record = ArrayRecord(arrays)
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
    above: int = 0,
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
    above : int
        Neurons of the layer above, where its bias was asked for.

    Raises
    ------
    BadReplyError
        Names the key at fault, what was expected and what came.
    """
    record, text = content.get(NEURONS), content.get(SPACE_META)
    wanted = {NEURONS, BIAS_ABOVE} if request.bias_above else {NEURONS}
    if not isinstance(record, ArrayRecord) or record.keys() != wanted:
        raise BadReplyError(
            f"expected an ArrayRecord '{NEURONS}' with {len(wanted)} array(s) named "
            f"{', '.join(sorted(wanted))}"
        )
    if not isinstance(text, ConfigRecord):
        raise BadReplyError(f"expected a ConfigRecord '{SPACE_META}'")
    try:
        meta = read_json(text.get(JSON), SPACE_META)
        for key, number in {SERVER_ROUND: server_round, LAYER: request.layer}.items():
            if meta.get(key) != number:
                raise SpaceError(key, str(number), shown(meta.get(key)))
        array = checked_array(
            record[NEURONS], NEURONS, (width, dimension + 2), np.dtype(np.float32)
        )
        single = np.dtype(np.float32)
        bias = (
            checked_array(record[BIAS_ABOVE], BIAS_ABOVE, (above,), single)
            if request.bias_above
            else None
        )
        balls = NeuronBalls.from_array(array, meta, bias)
        if balls.outgoing != outgoing:
            raise SpaceError("outgoing", str(outgoing), balls.outgoing)
        if balls.method != request.neurons.radius:
            raise SpaceError("method", request.neurons.radius, balls.method)
    except SpaceError as error:
        raise BadReplyError(str(error)) from error
    return balls
