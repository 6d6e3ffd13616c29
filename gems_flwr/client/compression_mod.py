"""The mod by which models travel as differences to what the receiver has.

It sits around the other mods and the user's handler::

    app = ClientApp(mods=[compression_mod()])

and does nothing unless the server's strategy has ``compress="int8"`` or the like. Then it puts the
arrays of a model in the place of its bytes before the handler sees the message, and the bytes of
the trained model in the place of its arrays in the reply. `dynamic_averaging_mod` does that by
itself, and `multi_model_mod` has this mod inside.

Decided here: the node keeps the last model that it was given under each key, and what rounding has
taken from the models that it sent, in its state in Flower (``context.state``). An error in the
handler leaves the state as it was. What rounding takes is added to the next model that is sent
under the same key, once the server says that the last one counted: one that was lost on its way, or
refused since training diverged, is of no account. So a node that is asked twice in a round answers
with the same bytes. A node that lacks what a message builds on says so, and is sent the whole
model. Records of a reply that have other arrays than the model travel as they are.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.compression.difference_coding import decode, decode_whole, encode
from gems_flwr.runtime.flower_internals import ClientAppCallable, Mod
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import wants_name
from gems_flwr.wire.compression_messages import (
    CompressionRequest,
    pack_needs_base,
    put_bases,
    take_compression,
)
from gems_flwr.wire.keys import COMPRESSION, JSON
from gems_flwr.wire.packed_records import pack_bytes, packed_models
from gems_flwr.wire.records import put_instead, to_numpy, to_record


def compression_mod() -> Mod:
    """Return a mod that packs and unpacks models; see the module's docstring.

    Examples
    --------
    Nodes whose training adds their number to each weight:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid, compression_mod
    >>> app = ClientApp(mods=[compression_mod()])
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> initial = ArrayRecord([np.zeros((100, 100))])
    >>> strategy = FedAvg(compress="int8", fraction_evaluate=0.0)
    >>> result = strategy.start(InProcessGrid(app, nodes=3), initial, num_rounds=2)
    >>> [weights] = result.arrays.to_numpy_ndarrays()
    >>> bool(np.allclose(weights, 2, atol=0.01)), result.traffic.bytes_up < 6 * weights.nbytes / 50
    (True, True)
    """
    return with_packed_models


def with_packed_models(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer a message whose models are packed, if they are; see `compression_mod`."""
    if wants_name(message.content):
        return fault_reply_mod(message, context, call_next)
    request = take_compression(message.content)
    if request is None:
        return call_next(message, context)
    before = dict(context.state)
    reply = fault_reply_mod(message, context, lambda m, c: _answer(m, c, call_next, request))
    if reply.has_error():
        # The server believes a node that failed to be where it was.
        context.state.clear()
        context.state.update(before)
    return reply


def _answer(
    message: Message, context: Context, call_next: ClientAppCallable, request: CompressionRequest
) -> Message:
    memory = _Memory(context.state, request.run)
    opened = _opened(message.content, memory, request)
    if opened is None:
        return Message(pack_needs_base(node_name(context)), reply_to=message)
    for key, record in opened.items():
        _, number, counted = request.records[key]
        memory.put_model(key, number, record)
        memory.settle(key, request.round, counted)
        put_instead(message.content, key, record)
    memory.save()
    reply = call_next(message, context)
    if not reply.has_error():
        _pack_reply(reply.content, memory, request)
        memory.save()
    return reply


def _opened(
    content: RecordDict, memory: _Memory, request: CompressionRequest
) -> dict[str, ArrayRecord] | None:
    """Return the models of a message, by key; None if the node lacks what one builds on."""
    sent, opened = packed_models(content), dict[str, ArrayRecord]()
    for key, (base, number, _) in request.records.items():
        own = memory.model(key, number)
        if own is None and key in sent and sent[key].is_whole:
            own = to_record(decode_whole(sent[key]))
        elif own is None and key in sent:
            held = memory.model(key, base)
            own = held and to_record(decode(sent[key], to_numpy(held), request.form))
        if own is None:
            return None
        opened[key] = own
    return opened


def _pack_reply(content: RecordDict, memory: _Memory, request: CompressionRequest) -> None:
    """Replace the models in a reply by differences to those that the node was given."""
    bases: dict[str, int] = {}
    for name, key in _models_in(content, memory, request).items():
        base = memory.model(key, memory.number(key))
        assert base is not None
        left_over = memory.left_over(key)
        encoded = encode(
            to_numpy(content.array_records[name]), to_numpy(base), request.form, left_over
        )
        memory.put_left_over(key, request.round, encoded.left_over)
        put_instead(content, name, pack_bytes(encoded.packed))
        bases[name] = memory.number(key)
    if bases:
        put_bases(content, bases)


def _models_in(content: RecordDict, memory: _Memory, request: CompressionRequest) -> dict[str, str]:
    """Return which records of a reply are models, each with the key that the node was given it by.

    A handler may call the one that it replies with as it likes.
    """

    def fits(name: str, key: str) -> bool:
        base = memory.model(key, memory.number(key))
        return base is not None and _form(content.array_records[name]) == _form(base)

    names = list(content.array_records)
    found = {name: name for name in names if fits(name, name)}
    if not found and len(request.records) == 1:
        [key] = request.records
        others = [name for name in names if fits(name, key)]
        # Of several, such as a model and its gradient, nobody knows which is which.
        found = {others[0]: key} if len(others) == 1 else {}
    return found


def _form(record: ArrayRecord) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (array.dtype, tuple(array.shape)) for name, array in record.items()}


class _Memory:
    """What a node keeps between messages, by key."""

    def __init__(self, state: RecordDict, run: str) -> None:
        self._state = state
        note = state.get(COMPRESSION)
        text = note.get(JSON) if isinstance(note, ConfigRecord) else None
        notes: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
        if notes.get("run") != run:
            for key in [key for key in state if key.startswith(f"{COMPRESSION}/")]:
                del state[key]
            notes = {"run": run, "numbers": {}, "sent": {}}
        self._notes = notes

    def number(self, key: str) -> int:
        """Return the number of the model that the node was given last, 0 if there is none."""
        return int(self._notes["numbers"].get(key, 0))

    def model(self, key: str, number: int) -> ArrayRecord | None:
        """Return the model of that number, if the node has it."""
        record = self._state.get(f"{COMPRESSION}/model/{key}")
        same = number and self.number(key) == number
        return record if same and isinstance(record, ArrayRecord) else None

    def put_model(self, key: str, number: int, record: ArrayRecord) -> None:
        """Keep a model in place of the one before."""
        self._state[f"{COMPRESSION}/model/{key}"] = record
        self._notes["numbers"][key] = number

    def left_over(self, key: str) -> Arrays | None:
        """Return what rounding has taken from the models that counted."""
        record = self._state.get(f"{COMPRESSION}/left/{key}")
        return to_numpy(record) if isinstance(record, ArrayRecord) else None

    def put_left_over(self, key: str, server_round: int, left_over: Arrays) -> None:
        """Note what rounding takes if the model of this round counts."""
        self._state[f"{COMPRESSION}/next/{key}"] = to_record(left_over)
        self._notes["sent"][key] = server_round

    def settle(self, key: str, server_round: int, counted: int) -> None:
        """Take over what the last model left, if it counted; keep nothing of it, if it did not."""
        sent = self._notes["sent"].get(key, server_round)
        if sent == server_round:
            return  # asked again: nobody knows yet
        left = self._state.pop(f"{COMPRESSION}/next/{key}", None)
        del self._notes["sent"][key]
        if sent == counted and left is not None:
            self._state[f"{COMPRESSION}/left/{key}"] = left

    def save(self) -> None:
        """Put the notes into the node's state."""
        self._state[COMPRESSION] = ConfigRecord({JSON: json.dumps(self._notes)})
