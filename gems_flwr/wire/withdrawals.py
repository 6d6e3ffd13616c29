"""The reply of a node that leaves a run, to whatever it was asked.

In Flower the server starts every exchange, so a node that wants to leave says so in its next reply:
a ConfigRecord ``withdrawal`` and its name, and nothing of what it was asked for.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from gems_flwr.wire.keys import WITHDRAW, WITHDRAWAL
from gems_flwr.wire.model_replies import pack_name


def pack_withdrawal(name: str) -> RecordDict:
    """Return the content of a reply by which a node leaves."""
    return RecordDict({WITHDRAWAL: ConfigRecord({WITHDRAW: True}), **pack_name(name)})


def withdraws(content: RecordDict) -> bool:
    """Return whether a node leaves by this reply.

    Whatever else a reply holds: nothing of a node that leaves is looked at.
    """
    note = content.get(WITHDRAWAL)
    return isinstance(note, ConfigRecord) and note.get(WITHDRAW) is True
