"""Models as differences to what the receiver has, in 8 or 4 bits; see `gems_flwr.compression`.

The server keeps, by node and record, which model it gave out last, as the node decoded it. A new
model goes out as the difference to that, a trained one comes back as the difference to what the
node was given. What rounding took on the way down is not in the result, and is part of the next
message. A node that has the very model already gets none; one that has never been given it gets it
whole, its matrices in half precision.

The record ``compression`` of a message is the JSON of `_Packing`, that of a reply the numbers of
the models that its packed models are differences to, by key, or ``needs-base`` if the node lacks
one: then it is asked again with the whole model.

- A model's number is a digest of what it was made of. All is part of the checkpoint, so a resumed
  run goes on with the same digits.
- Beyond `MOST_BYTES` the oldest models are forgotten, and their nodes get the next one whole.
- What rounding takes from a node's model is added to its next one, once the server says that this
  one counted. So a node that is asked twice in a round answers with the same bytes, and a fault in
  the handler leaves the state as it was.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from gems_flwr.carriers.known_layers import layers_digest
from gems_flwr.compression import (
    Form,
    PackedModel,
    check_compressible,
    decode,
    decode_whole,
    encode,
    encode_whole,
    halved,
)
from gems_flwr.core.log import log_event
from gems_flwr.core.question import Question
from gems_flwr.core.records import (
    ARRAYS,
    add_reason,
    is_without_mod,
    once_more,
    put_instead,
    read_json,
    records_of,
    to_numpy,
    to_record,
)
from gems_flwr.core.round import Carrier, Round, Send
from gems_flwr.errors import BadReplyError, CheckpointError, describe_fault
from gems_flwr.typing import Arrays

MOST_BYTES = 2**28
PACKED, _JSON, _NEEDS_BASE = "compression", "json", "needs-base"
# Strategies of several models have records like model/<name>.
_SEVERAL = "model/"
_PARTS = {"codes": bytes, "scales": bytes, "exact": bytes, "layout": str}
_NOTES = "packed/notes"


@dataclass(frozen=True)
class _Packing:
    """How models travel in a message and in its reply."""

    run: str  # what a node keeps from another run does not count
    form: Form
    round: int
    # By key: number of the model that the one in this message is a difference to (0: it is whole),
    # its own number (the same where the node has it, and it does not travel), and the last round in
    # which a model of this node counted (0: none).
    records: Mapping[str, tuple[int, int, int]]


# --- at the server ------------------------------------------------------------------------------


class PackedModels(Carrier):
    """Packs the models of messages, and unpacks those of replies."""

    needs_names: ClassVar[bool] = True
    needs_mod: ClassVar[bool] = True

    def __init__(self, form: Form, arrays_key: str = ARRAYS) -> None:
        self.name = f"compress={form}"
        self._form, self._arrays_key = form, arrays_key
        # FedAdam goes on in double precision; nodes keep to the types of the initial model.
        self._like: Arrays = {}
        self._new_run = secrets.token_hex(4)
        self.recall({})

    def check_model(self, arrays: Arrays) -> None:
        """Refuse a model of which nothing would be rounded."""
        check_compressible(arrays, self._form)
        self._like = arrays

    def carry(
        self, round: Round, messages: list[Message], question: Question[Any] | None, send: Send
    ) -> list[Message]:
        """Send messages with packed models; return the replies with their models unpacked."""
        sent = {message.metadata.dst_node_id: message for message in messages}
        plain = {node: RecordDict(dict(message.content)) for node, message in sent.items()}
        for message in messages:
            # Flower's own strategies give one dict of records to all of them.
            message.content = RecordDict(dict(message.content))
            self._pack(round, message)
        replies = send(messages)
        lacking = {r.metadata.src_node_id for r in replies if _lacks_base(r)}
        if lacking:
            log_event("send_whole_models", nodes=len(lacking))
            again = [once_more(m, plain[n], "whole") for n, m in sent.items() if n in lacking]
            for message in again:
                self._held.pop(round.nodes.name(message.metadata.dst_node_id), None)
                self._pack(round, message)
            replies = [r for r in replies if not _lacks_base(r)] + send(again)
        unable = [r for r in replies if r.has_error() and is_without_mod(r.error.reason or "")]
        if len(unable) < len(replies):  # where all are, the loop says so
            for reply in unable:
                add_reason(reply, "write ClientApp(mods=[good_enough_mod()]), it has no such mod")
        return [reply for reply in replies if self._open(round, reply)]

    def settle(self, round: Round) -> None:
        """Note whose models of the round have counted."""
        for node_id in round.answered_ids:
            rounds = dict.fromkeys(self._came.get(node_id, ()), round.number)
            self._counted.setdefault(round.nodes.name(node_id), {}).update(rounds)

    def _pack(self, round: Round, message: Message) -> None:
        """Replace the models in a message by what the node lacks of them."""
        content, records = message.content, dict[str, tuple[int, int, int]]()
        node = round.nodes.name(message.metadata.dst_node_id)
        held, counted = self._held.get(node, {}), self._counted.get(node, {})
        for key, record in records_of(content, ArrayRecord).items():
            if key != self._arrays_key and not key.startswith(_SEVERAL):
                continue
            digest = self._digest(record)
            number = base = held.get(key, 0) if held.get(key, 0) in self._models else 0
            if base and self._sources[base] == digest:
                self._note_exact(base, to_numpy(record))
                del content[key]
            else:
                number = self._encoded(base, record, digest)
                put_instead(content, key, pack_bytes(self._made[number]))
            records[key] = (base, number, counted.get(key, 0))
        if records:
            numbers = {key: number for key, (_, number, _) in records.items()}
            self._sent[message.metadata.dst_node_id] = numbers
            content[PACKED] = _note(vars(_Packing(self._run, self._form, round.number, records)))

    def _encoded(self, base: int, record: ArrayRecord, digest: str) -> int:
        """Encode a model for those who have another; return its number."""
        made_of = hashlib.blake2b(f"{self._form}|{base}|{digest}".encode(), digest_size=6)
        number = int.from_bytes(made_of.digest(), "big") or 1
        if number not in self._made:
            model = to_numpy(record)
            if base:
                encoded = encode(model, self._models[base], self._form)
                packed, decoded = encoded.packed, encoded.decoded
            else:
                like = {k: self._like[k].dtype if k in self._like else None for k in model}
                decoded = halved({k: np.asarray(each, like[k]) for k, each in model.items()})
                packed = encode_whole(decoded)
            # Taken out first, so that it is the newest.
            self._models.pop(number, None)
            self._models[number], self._sources[number] = decoded, digest
            self._note_exact(number, model)
            self._made[number] = packed
        return number

    def _note_exact(self, number: int, model: Arrays) -> None:
        held = self._models[number]
        self._exact[number] = {k: np.asarray(model[k], array.dtype) for k, array in held.items()}

    def _digest(self, record: ArrayRecord) -> str:
        # The same record goes to many nodes; kept with the digest, its id is no other's.
        if id(record) not in self._digests:
            self._digests[id(record)] = record, layers_digest(to_numpy(record))
        return self._digests[id(record)][1]

    def _open(self, round: Round, reply: Message) -> bool:
        """Note what a node has now, and unpack its models; False if that cannot be done."""
        node_id = reply.metadata.src_node_id
        if reply.has_error() or node_id not in self._sent:
            return True
        held = self._held.setdefault(round.nodes.name(node_id), {})
        if _lacks_base(reply):
            round.refuse(node_id, "it asks again for a model that it was sent whole")
            return False
        held |= self._sent[node_id]
        try:
            self._came.setdefault(node_id, set()).update(self._unpack(reply.content, held))
        except Exception as error:
            # No reply ends a run, whatever it does to our own code.
            fault = f"the reply cannot be used: {describe_fault(error)}"
            round.refuse(node_id, str(error) if isinstance(error, BadReplyError) else fault)
            return False
        return True

    def _unpack(self, content: RecordDict, held: Mapping[str, int]) -> set[str]:
        """Put arrays in the place of packed models; return the keys that the node had them by."""
        packed, bases = packed_models(content), dict[str, Any]()
        if PACKED in content:
            bases = read_json(_noted(content.pop(PACKED), _JSON), PACKED)
        if (count := len(packed)) > len(held):
            # Each is as large as a model once it is unpacked, and tiny before.
            raise BadReplyError(
                f"{count} packed models came from a node that was given {len(held)}"
            )
        keys = {number: key for key, number in held.items()}
        for key, model in packed.items():
            base = bases.get(key, 0)
            if not isinstance(base, int) or base not in keys or base not in self._models:
                raise BadReplyError(
                    f"the model '{key}' is a difference to number {base}, which this node was not "
                    f"given; it has {sorted(keys)}"
                )
            exact = self._exact.get(base, self._models[base])
            put_instead(content, key, open_packed(model, exact, self._form))
        return {keys[bases[key]] for key in packed}

    def to_memory(self) -> dict[str, Any]:
        """Return what a checkpoint takes: models that nodes have, newest first up to a limit."""
        used = {number for by_key in self._held.values() for number in by_key.values()}
        kept, size = list[int](), 0
        for number in reversed([number for number in self._models if number in used]):
            size += sum(array.nbytes for array in self._models[number].values())
            if kept and size > MOST_BYTES:
                break
            kept.insert(0, number)
        held = {n: {k: m for k, m in h.items() if m in kept} for n, h in self._held.items()}
        sources = {str(number): self._sources[number] for number in kept}
        notes = {"run": self._run, "held": held, "counted": self._counted, "sources": sources}
        memory = {_NOTES: np.frombuffer(json.dumps(notes).encode(), np.uint8)}
        for number in kept:
            memory |= {f"packed/{number}/{k}": array for k, array in self._models[number].items()}
        return memory

    def recall(self, memory: Arrays) -> None:
        """Go on from what `to_memory` returned, in a new round."""
        # By node and key: the number of the model that it has, and the last round in which one of
        # its own counted. By number, oldest first: the model as nodes have it, and its digest.
        self._run = self._new_run
        self._held: dict[str, dict[str, int]] = {}
        self._counted: dict[str, dict[str, int]] = {}
        self._models: dict[int, Arrays] = {}
        self._sources: dict[int, str] = {}
        # Of this round: what each node was sent, by id; models before they were rounded; what was
        # encoded; keys of the models that came, by id; digests of records.
        self._sent: dict[int, dict[str, int]] = {}
        self._exact: dict[int, Arrays] = {}
        self._made: dict[int, PackedModel] = {}
        self._came: dict[int, set[str]] = {}
        self._digests: dict[int, tuple[ArrayRecord, str]] = {}
        if _NOTES not in memory:
            return
        try:
            notes = json.loads(memory[_NOTES].tobytes())
            self._run, self._held, self._counted = notes["run"], notes["held"], notes["counted"]
            self._sources = {int(number): each for number, each in notes["sources"].items()}
            models: dict[int, dict[str, Any]] = {number: {} for number in self._sources}
            for key, array in memory.items():
                if key.startswith("packed/") and key != _NOTES:
                    number, _, name = key.removeprefix("packed/").partition("/")
                    models[int(number)][name] = array
            self._models.update(models)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"what nodes have been given cannot be read from the checkpoint ({error})"
            raise CheckpointError(f"{reason}; start afresh") from error


def _lacks_base(reply: Message) -> bool:
    return reply.has_content() and _noted(reply.content.get(PACKED), _NEEDS_BASE) is True


# --- on the node --------------------------------------------------------------------------------


def answer_packed(
    message: Message, context: Context, call: Callable[[Message], Message]
) -> Message:
    """Answer a message by `call`, with models unpacked before and packed after."""
    text = _noted(message.content.pop(PACKED), _JSON)
    packing = _Packing(**json.loads(str(text)))
    before, reply = dict(context.state), None
    try:
        memory = _Memory(context.state, packing)
        if memory.take(message.content):
            reply = call(message)
            if isinstance(reply, Message) and reply.has_content():
                memory.pack(reply.content)
        else:
            needs = RecordDict({PACKED: ConfigRecord({_NEEDS_BASE: True})})
            reply = Message(needs, reply_to=message)
        return reply
    finally:
        # The server takes a node that failed to be where it was.
        if not isinstance(reply, Message) or reply.has_error():
            context.state.clear()
            context.state.update(before)


class _Memory:
    """What a node keeps between messages: by key, the last model that it was given."""

    def __init__(self, state: RecordDict, packing: _Packing) -> None:
        self._state, self._packing = state, packing
        text = _noted(state.get(PACKED), _JSON)
        notes: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
        if notes.get("run") != packing.run:
            for key in [key for key in state if key.startswith(f"{PACKED}/")]:
                del state[key]
            notes = {"run": packing.run, "numbers": {}, "sent": {}}
        # By key: the number of the model that the node was given last, and the round in which it
        # sent one that may count.
        self._numbers: dict[str, int] = notes["numbers"]
        self._sent: dict[str, int] = notes["sent"]

    def take(self, content: RecordDict) -> bool:
        """Put the models into a message; False if the node lacks what one builds on."""
        sent, opened = packed_models(content), dict[str, ArrayRecord]()
        for key, (base, number, _) in self._packing.records.items():
            own = self._model(key, number)
            if own is None and key in sent and sent[key].is_whole:
                own = to_record(decode_whole(sent[key]))
            elif own is None and key in sent and (held := self._model(key, base)) is not None:
                own = to_record(decode(sent[key], to_numpy(held), self._packing.form))
            if own is None:
                return False
            opened[key] = own
        for key, record in opened.items():
            _, number, counted = self._packing.records[key]
            self._state[f"{PACKED}/model/{key}"] = record
            self._numbers[key] = number
            self._settle(key, counted)
            put_instead(content, key, record)
        self._save()
        return True

    def pack(self, content: RecordDict) -> None:
        """Replace the models in a reply by differences to those that the node was given."""
        bases: dict[str, int] = {}
        for name, key in self._models_in(content).items():
            base = self._state[f"{PACKED}/model/{key}"]
            left = self._state.get(f"{PACKED}/left/{key}")
            encoded = encode(
                to_numpy(content.array_records[name]),
                to_numpy(base),  # type: ignore[arg-type]
                self._packing.form,
                to_numpy(left) if isinstance(left, ArrayRecord) else None,
            )
            self._state[f"{PACKED}/next/{key}"] = to_record(encoded.left_over)
            self._sent[key] = self._packing.round
            put_instead(content, name, pack_bytes(encoded.packed))
            bases[name] = self._numbers[key]
        if bases:
            content[PACKED] = _note(bases)
        self._save()

    def _model(self, key: str, number: int) -> ArrayRecord | None:
        """Return the model of that number, if the node has it."""
        record = self._state.get(f"{PACKED}/model/{key}")
        same = number and self._numbers.get(key) == number
        return record if same and isinstance(record, ArrayRecord) else None

    def _settle(self, key: str, counted: int) -> None:
        """Take over what the last model left, if it counted; keep nothing of it, if it did not."""
        sent = self._sent.get(key, self._packing.round)
        if sent == self._packing.round:
            return  # asked again: it is not known yet
        left = self._state.pop(f"{PACKED}/next/{key}", None)
        del self._sent[key]
        if sent == counted and left is not None:
            self._state[f"{PACKED}/left/{key}"] = left

    def _models_in(self, content: RecordDict) -> dict[str, str]:
        """Return which records of a reply are models, each with the key that it was given by.

        A handler may name the one that it replies with; other arrays travel as they are.
        """

        def fits(name: str, key: str) -> bool:
            base = self._model(key, self._numbers.get(key, 0))
            return base is not None and _shapes(content.array_records[name]) == _shapes(base)

        names = list(content.array_records)
        found = {name: name for name in names if fits(name, name)}
        if not found and len(self._packing.records) == 1:
            [key] = self._packing.records
            others = [name for name in names if fits(name, key)]
            # Of several, such as a model and its gradient, it is not known which is which.
            found = {others[0]: key} if len(others) == 1 else {}
        return found

    def _save(self) -> None:
        run = self._packing.run
        self._state[PACKED] = _note({"run": run, "numbers": self._numbers, "sent": self._sent})


def _shapes(record: ArrayRecord) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (array.dtype, tuple(array.shape)) for name, array in record.items()}


# --- packed models in messages ------------------------------------------------------------------


def pack_bytes(packed: PackedModel) -> ConfigRecord:
    """Return the record of a packed model; empty parts, which Flower cannot count, are left out."""
    parts = {key: getattr(packed, key) for key in _PARTS}
    return ConfigRecord({key: part for key, part in parts.items() if part})


def unpack_bytes(record: ConfigRecord, key: str) -> PackedModel:
    """Return the packed model in a record."""
    for name, value in record.items():
        if name not in _PARTS or not isinstance(value, _PARTS[name]):
            raise BadReplyError(f"the packed model '{key}' has a '{name}' that is not part of one")
    return PackedModel(**dict(record))  # type: ignore[arg-type]


def packed_models(content: RecordDict) -> dict[str, PackedModel]:
    """Return the packed models of a message, by key; what travels exactly is never empty."""
    return {
        key: unpack_bytes(record, key)
        for key, record in records_of(content, ConfigRecord).items()
        if "exact" in record
    }


def open_packed(packed: PackedModel, base: Arrays, form: Form) -> ArrayRecord:
    """Return the arrays of a model that a node sent as a difference to `base`."""
    if packed.is_whole:
        raise BadReplyError("the model came whole, expected a difference to what the node was sent")
    return to_record(decode(packed, base, form))


def _note(values: Mapping[str, Any]) -> ConfigRecord:
    return ConfigRecord({_JSON: json.dumps(dict(values), separators=(",", ":"))})


def _noted(record: object, key: str) -> object:
    return record.get(key) if isinstance(record, ConfigRecord) else None
