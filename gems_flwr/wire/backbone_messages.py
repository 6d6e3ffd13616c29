"""Models whose layers below the output layer need not travel.

An instruction has the output layer as ``arrays`` and, in its config, the digest of the layers
below. A node that has those layers works with them. One that has not answers that it needs them,
and gets them as a record of their own, ``backbone``, in a second message; or they come with the
first.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import put, said
from gems_flwr.wire.keys import (
    ARRAYS,
    BACKBONE,
    BACKBONE_DIGEST,
    KEEP_BACKBONE,
    NEEDS_BACKBONE,
)
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import to_record


def refer_to_backbone(content: RecordDict, digest: str, *, keep: bool) -> None:
    """Say in an instruction which layers belong below the output layer that it has.

    Parameters
    ----------
    content : RecordDict
        The instruction.
    digest : str
        Of the layers; see `gems_flwr.networks.backbone`.
    keep : bool
        Whether more instructions will refer to them: a node that had to be given them keeps them.
    """
    put(content, BACKBONE_DIGEST, digest)
    if keep:
        put(content, KEEP_BACKBONE, True)


def named_backbone(content: RecordDict) -> str | None:
    """Return the digest in an instruction; None where the model came whole."""
    digest = said(content, BACKBONE_DIGEST)
    return digest if isinstance(digest, str) else None


def is_to_be_kept(content: RecordDict) -> bool:
    """Return whether more instructions will refer to the same layers."""
    return said(content, KEEP_BACKBONE) is True


def put_backbone(content: RecordDict, backbone: ArrayRecord) -> None:
    """Put the layers below the output layer into an instruction."""
    content[BACKBONE] = backbone


def take_backbone(content: RecordDict) -> ArrayRecord | None:
    """Take the layers below the output layer, if they came, out of an instruction."""
    record = content.pop(BACKBONE, None)
    return record if isinstance(record, ArrayRecord) else None


def put_whole_model(content: RecordDict, arrays: Arrays) -> None:
    """Make an instruction what an ordinary train handler expects: a whole model."""
    content[ARRAYS] = to_record(arrays)


def pack_needs_backbone(name: str) -> RecordDict:
    """Return the reply of a node that has other layers than the digest names."""
    return RecordDict({BACKBONE: ConfigRecord({NEEDS_BACKBONE: True}), **pack_name(name)})


def needs_backbone(content: RecordDict) -> bool:
    """Return whether a node says that it lacks the layers below the output layer."""
    note = content.get(BACKBONE)
    return isinstance(note, ConfigRecord) and note.get(NEEDS_BACKBONE) is True
