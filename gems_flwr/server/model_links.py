"""Sending models as differences to what each node has, and reading theirs.

The server knows, by node and record, which model it gave out last, as the node decoded it. A new
model goes out as the difference to that. A node's trained model comes back as the difference to
what it was given, and counts as that difference added to the model as the server has it: what
rounding took on the way down is not in the result, and is part of the next message. A node that has
the very model already, since it evaluated it, gets none. What a node has never been given goes
whole, its matrices in half precision.

Decided here: nodes that have different models get different messages, and start from models that
differ by rounding. A model is kept as long as a node has it; beyond `MOST_BYTES` the oldest are
forgotten, and their nodes get the next one whole. Nodes are told which of their models counted, so
that what rounding took from one that was lost or refused is not added to the next.

All of it is part of the checkpoint: a resumed run goes on with the same digits, if its nodes have
kept their state. A model's number is a digest of what it was made of, so a node that had got
further than the checkpoint has the right model or says that it lacks one. That is the case where a
run is interrupted while nodes evaluate, and replies are not kept: they train once more from a whole
model, in half precision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from numpy.typing import NDArray

from gems_flwr.compression.difference_coding import (
    Form,
    PackedModel,
    encode,
    encode_whole,
    halved,
)
from gems_flwr.errors import BadReplyError, CheckpointError, describe_fault
from gems_flwr.server.addressing import add_reason
from gems_flwr.server.log import log_event
from gems_flwr.typing import Arrays
from gems_flwr.wire.compression_messages import (
    CompressionRequest,
    needs_base,
    put_compression,
    take_bases,
)
from gems_flwr.wire.fault_reasons import is_without_mod
from gems_flwr.wire.keys import ARRAYS, MODEL
from gems_flwr.wire.packed_records import open_packed, pack_bytes, packed_models
from gems_flwr.wire.quick_records import records_of
from gems_flwr.wire.records import put_instead, to_numpy

if TYPE_CHECKING:
    from gems_flwr.server.round_methods import RoundMethods

MOST_BYTES = 2**28
_PREFIX = "links/"
_NOTES = f"{_PREFIX}notes"


class ModelLinks:
    """What nodes have been given, for one run; loaded for a round and saved with its outcome.

    Parameters
    ----------
    form : {"float16", "int8", "int4", "int2"}
        How differences travel.
    run : str
        A name for the run, so that what nodes keep from another one does not count.
    server_round : int
        The round that is played.
    arrays_key : str, default "arrays"
        What the record with the model is called in messages.
    like : mapping from str to ndarray, optional
        The initial model. Some servers make other types of numbers (FedAdam goes on in double
        precision, and counters become floats); nodes keep to those that they began with.
    """

    def __init__(
        self,
        form: Form,
        run: str,
        server_round: int,
        *,
        arrays_key: str = ARRAYS,
        like: Arrays | None = None,
    ) -> None:
        self._form, self._run, self._round = form, run, server_round
        self._arrays_key, self._like = arrays_key, like or {}
        # By number, oldest first: the model as nodes have it, and a digest of what it stands for.
        self._models: dict[int, Arrays] = {}
        self._sources: dict[int, str] = {}
        # By node and key: the number of the model that it has, and the last round in which one of
        # its own counted.
        self._held: dict[str, dict[str, int]] = {}
        self._counted: dict[str, dict[str, int]] = {}
        # Of the round under way: what each node was sent, by id; models before they were rounded;
        # what was encoded; keys of the models that came, by id.
        self._sent: dict[int, dict[str, int]] = {}
        self._exact: dict[int, Arrays] = {}
        self._made: dict[int, PackedModel] = {}
        self._came: dict[int, set[str]] = {}
        self._digests: dict[int, tuple[ArrayRecord, str]] = {}

    def collect(self, strategy: RoundMethods, messages: Iterable[Message]) -> list[Message]:
        """Send messages with packed models; return the replies with their models unpacked.

        A node that lacks what its message builds on is asked once more, with the whole model.
        """
        messages = list(messages)
        plain = {m.metadata.dst_node_id: RecordDict(dict(m.content)) for m in messages}
        for message in messages:
            # Flower's own strategies give one dict of records to all of them.
            message.content = RecordDict(dict(message.content))
            self._pack(message, strategy.name_of(message.metadata.dst_node_id))
        replies = strategy.send(messages)
        lacking = [r.metadata.src_node_id for r in replies if _lacks_base(r)]
        if lacking:
            log_event("send_whole_models", nodes=len(lacking))
            again = [_again(m, plain) for m in messages if m.metadata.dst_node_id in lacking]
            for message in again:
                self._held.pop(strategy.name_of(message.metadata.dst_node_id), None)
                self._pack(message, strategy.name_of(message.metadata.dst_node_id))
            replies = [r for r in replies if not _lacks_base(r)] + strategy.send(again)
        unable = [reply for reply in replies if _is_unable(reply)]
        if len(unable) < len(replies):  # where all are, the loop says so
            for reply in unable:
                mods = strategy.mods_needed()
                add_reason(
                    reply, f"write ClientApp(mods=[{mods}]), this node's app has no such mod"
                )
        return [reply for reply in replies if self._open(strategy, reply)]

    def settle(self, strategy: RoundMethods, nodes: Iterable[int]) -> None:
        """Note whose models of this round have counted, by id."""
        for node_id in nodes:
            rounds = dict.fromkeys(self._came.get(node_id, ()), self._round)
            self._counted.setdefault(strategy.name_of(node_id), {}).update(rounds)

    # --- messages -------------------------------------------------------------------------------

    def _pack(self, message: Message, node: str) -> None:
        """Replace the models in a message by what the node lacks of them."""
        content, records = message.content, dict[str, tuple[int, int, int]]()
        for key, record in records_of(content, ArrayRecord).items():
            if key != self._arrays_key and not key.startswith(f"{MODEL}/"):
                continue
            digest = self._digest(record)
            base = self._held.get(node, {}).get(key, 0)
            if base not in self._models:
                base = 0
            if base and self._sources[base] == digest:
                number = base
                self._note_exact(base, to_numpy(record))
                del content[key]
            else:
                number = self._encoded(base, record, digest)
                put_instead(content, key, pack_bytes(self._made[number]))
            records[key] = (base, number, self._counted.get(node, {}).get(key, 0))
        sent = {key: number for key, (_, number, _) in records.items()}
        self._sent[message.metadata.dst_node_id] = sent
        request = CompressionRequest(self._run, self._form, self._round, records)
        put_compression(content, request)

    def _encoded(self, base: int, record: ArrayRecord, digest: str) -> int:
        """Encode a model for those who have another; return its number."""
        number = _number_of(self._form, base, digest)
        if number not in self._made:
            model = to_numpy(record)
            if base:
                encoded = encode(model, self._models[base], self._form)
                packed, decoded = encoded.packed, encoded.decoded
            else:
                decoded = halved(self._as_nodes_have_it(model))
                packed = encode_whole(decoded)
            # Taken out first, so that it is the newest.
            self._models.pop(number, None)
            self._models[number], self._sources[number] = decoded, digest
            self._note_exact(number, model)
            self._made[number] = packed
        return number

    def _as_nodes_have_it(self, model: Arrays) -> Arrays:
        return {
            name: array.astype(self._like[name].dtype, copy=False) if name in self._like else array
            for name, array in model.items()
        }

    def _note_exact(self, number: int, model: Arrays) -> None:
        self._exact[number] = {
            name: np.asarray(model[name], array.dtype)
            for name, array in self._models[number].items()
        }

    def _digest(self, record: ArrayRecord) -> str:
        # The same record goes to many nodes; kept with the digest, its id is nobody else's.
        known = self._digests.get(id(record))
        if known is None:
            found = hashlib.blake2b(digest_size=8)
            for name, array in record.items():
                found.update(f"{name}|{array.dtype}|{array.shape}".encode())
                found.update(array.data)
            known = self._digests[id(record)] = record, found.hexdigest()
        return known[1]

    # --- replies --------------------------------------------------------------------------------

    def _open(self, strategy: RoundMethods, reply: Message) -> bool:
        """Note what a node has now, and unpack its models; False if that cannot be done."""
        if reply.has_error():
            return True
        node_id = reply.metadata.src_node_id
        held = self._held.setdefault(strategy.name_of(node_id), {})
        if needs_base(reply.content):
            strategy.refuse(node_id, "it asks again for a model that it was sent whole")
            return False
        held |= self._sent.get(node_id, {})
        try:
            self._came.setdefault(node_id, set()).update(self._unpack(reply.content, held))
        except BadReplyError as error:
            strategy.refuse(node_id, str(error))
            return False
        except Exception as error:
            # No reply ends a run, whatever it does to our own code.
            strategy.refuse(node_id, f"the reply cannot be used: {describe_fault(error)}")
            return False
        return True

    def _unpack(self, content: RecordDict, held: Mapping[str, int]) -> set[str]:
        """Put arrays in the place of packed models; return the keys that the node had them by."""
        bases, packed = take_bases(content), packed_models(content)
        if len(packed) > len(held):
            # Each is as large as a model once it is unpacked, and next to nothing before.
            raise BadReplyError(
                f"{len(packed)} packed models came from a node that was given {len(held)}"
            )
        by_number = {number: key for key, number in held.items()}
        for key, model in packed.items():
            base = bases.get(key, 0)
            if base not in by_number or base not in self._models:
                raise BadReplyError(
                    f"the model '{key}' is a difference to number {base}, which this node was not "
                    f"given; it has {sorted(by_number)}"
                )
            exact = self._exact.get(base, self._models[base])
            put_instead(content, key, open_packed(model, exact, self._form))
        return {by_number[bases[key]] for key in packed}

    # --- between rounds -------------------------------------------------------------------------

    def to_memory(self) -> dict[str, NDArray]:
        """Return what a checkpoint takes: models that nodes have, newest first up to a limit."""
        used = {number for by_key in self._held.values() for number in by_key.values()}
        kept, size = list[int](), 0
        for number in reversed([number for number in self._models if number in used]):
            size += sum(array.nbytes for array in self._models[number].values())
            if kept and size > MOST_BYTES:
                break
            kept.append(number)
        kept.reverse()
        held = {
            node: {key: number for key, number in by_key.items() if number in kept}
            for node, by_key in self._held.items()
        }
        notes = {
            "run": self._run,
            "held": held,
            "counted": self._counted,
            "sources": {str(number): self._sources[number] for number in kept},
        }
        arrays = {_NOTES: _as_array(notes)}
        for number in kept:
            prefix = f"{_PREFIX}{number}/"
            arrays |= {f"{prefix}{name}": array for name, array in self._models[number].items()}
        return arrays

    def recalled(self, memory: Arrays) -> ModelLinks:
        """Go on from what `to_memory` wrote, if there is anything; return the links themselves."""
        if _NOTES not in memory:
            return self
        try:
            notes = json.loads(memory[_NOTES].tobytes())
            self._run, self._held, self._counted = notes["run"], notes["held"], notes["counted"]
            self._sources = {int(number): each for number, each in notes["sources"].items()}
            models: dict[int, dict[str, NDArray]] = {number: {} for number in self._sources}
            for key, array in memory.items():
                if key.startswith(_PREFIX) and key != _NOTES:
                    number, _, name = key.removeprefix(_PREFIX).partition("/")
                    models[int(number)][name] = array
            self._models = dict(models)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"what nodes have been given cannot be read from the checkpoint ({error}); "
                "start afresh"
            ) from error
        return self


def without_links(memory: Arrays) -> Arrays:
    """Return what a strategy itself keeps from round to round."""
    return {key: array for key, array in memory.items() if not key.startswith(_PREFIX)}


def renamed_links(memory: Arrays, names: Mapping[str, str]) -> Arrays:
    """Return what nodes have been given, which is all but `without_links`, under new names."""
    links = {key: array for key, array in memory.items() if key.startswith(_PREFIX)}
    if _NOTES not in links:
        return links
    notes = json.loads(links[_NOTES].tobytes())
    for kind in ("held", "counted"):
        notes[kind] = {names.get(node, node): each for node, each in notes[kind].items()}
    return {**links, _NOTES: _as_array(notes)}


def links_without(memory: Arrays, nodes: Collection[str]) -> Arrays:
    """Return a memory that says nothing of some nodes."""
    if not nodes or _NOTES not in memory:
        return memory
    notes = json.loads(memory[_NOTES].tobytes())
    for kind in ("held", "counted"):
        notes[kind] = {node: each for node, each in notes[kind].items() if node not in nodes}
    return {**memory, _NOTES: _as_array(notes)}


def _as_array(notes: Mapping[str, object]) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(notes).encode(), np.uint8)


def _number_of(form: Form, base: int, digest: str) -> int:
    """Return the number of a model that is told as a difference to another one, or whole (0)."""
    made_of = hashlib.blake2b(f"{form}|{base}|{digest}".encode(), digest_size=6)
    return int.from_bytes(made_of.digest(), "big") or 1


def _lacks_base(reply: Message) -> bool:
    return reply.has_content() and needs_base(reply.content)


def _is_unable(reply: Message) -> bool:
    return reply.has_error() and is_without_mod(reply.error.reason or "")


def _again(message: Message, plain: Mapping[int, RecordDict]) -> Message:
    return Message(
        plain[message.metadata.dst_node_id],
        dst_node_id=message.metadata.dst_node_id,
        message_type=message.metadata.message_type,
        group_id=f"{message.metadata.group_id}-whole",
    )
