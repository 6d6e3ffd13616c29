"""Models that travel as differences to what the receiver has: what a message says about them.

============  ===================================================================
instruction   ``compression`` (ConfigRecord with the JSON of a `CompressionRequest`)
              beside packed models, each under the key that its arrays would have
reply         ``compression`` with the JSON of the numbers of the models that its
              packed models are differences to, by key
reply of a    ``compression`` with ``needs-base``, and nothing else but its name
node that
lacks one
============  ===================================================================

Every model that the server hands out has a number, which stands for what it was made of: whoever
has a model of that number has that model, whatever has become of the server since. A node keeps the
last one that it was given under each key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from flwr.app import ConfigRecord, RecordDict

from gems_flwr.compression.difference_coding import FORMS, Form
from gems_flwr.errors import BadReplyError
from gems_flwr.wire.keys import COMPRESSION, JSON, NEEDS_BASE
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import read_json
from gems_flwr.wire.requests import JsonRequest


@dataclass(frozen=True)
class CompressionRequest(JsonRequest):
    """How models travel in this message and in its reply.

    Parameters
    ----------
    run : str
        Which run this is; what a node keeps from another run does not count.
    form : {"float16", "int8", "int4", "int2"}
        How differences travel.
    round : int
        Which round this is: asked twice in it, a node answers with the same bytes.
    records : mapping from str to three ints
        By key: number of the model that the one in this message is a difference to (0: it is
        whole), and its own number. Where both are the same the node has it, and it does not travel.
        And the last round in which a model of this node under that key counted (0: none): what
        rounding took from one that was lost, or refused, is of no account.
    """

    separators: ClassVar[tuple[str, str]] = (",", ":")

    run: str
    form: Form
    round: int
    records: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check({"form": (self.form in FORMS[1:], f"one of {list(FORMS[1:])}")})


def put_compression(content: RecordDict, request: CompressionRequest) -> None:
    """Say in an instruction how its models travel."""
    content[COMPRESSION] = ConfigRecord({JSON: request.to_json()})


def take_compression(content: RecordDict) -> CompressionRequest | None:
    """Take that out of an instruction; None where models travel as they are."""
    record = content.pop(COMPRESSION, None)
    text = record.get(JSON) if isinstance(record, ConfigRecord) else None
    return CompressionRequest.from_json(text) if isinstance(text, str) else None


def pack_needs_base(name: str) -> RecordDict:
    """Return the reply of a node that lacks a model which the one in the message adds to."""
    return RecordDict({COMPRESSION: ConfigRecord({NEEDS_BASE: True}), **pack_name(name)})


def needs_base(content: RecordDict) -> bool:
    """Return whether a reply says that."""
    note = content.get(COMPRESSION)
    return isinstance(note, ConfigRecord) and note.get(NEEDS_BASE) is True


def put_bases(content: RecordDict, bases: Mapping[str, int]) -> None:
    """Say in a reply which models its packed models are differences to."""
    content[COMPRESSION] = ConfigRecord({JSON: json.dumps(bases, separators=(",", ":"))})


def take_bases(content: RecordDict) -> dict[str, int]:
    """Take that out of a reply; empty where nothing in it is packed.

    Raises
    ------
    BadReplyError
        If it says something else.
    """
    note = content.pop(COMPRESSION, None)
    if note is None:
        return {}
    bases = read_json(note.get(JSON) if isinstance(note, ConfigRecord) else None, COMPRESSION)
    if not all(isinstance(number, int) for number in bases.values()):
        raise BadReplyError(f"'{COMPRESSION}' must hold whole numbers")
    return bases
