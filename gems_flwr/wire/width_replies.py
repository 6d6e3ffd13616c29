"""Replies of nodes whose network was tried at other widths.

Such a reply says no more than that it ran; where it did not, there is an error reply instead.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from gems_flwr.errors import BadReplyError
from gems_flwr.wire.keys import TRY_WIDTHS
from gems_flwr.wire.model_replies import pack_name


def pack_widths_reply(name: str) -> RecordDict:
    """Return the content of a reply that says that the network runs at other widths."""
    return RecordDict({TRY_WIDTHS: ConfigRecord({TRY_WIDTHS: True}), **pack_name(name)})


def unpack_widths_reply(content: RecordDict) -> bool:
    """Return True if the node has tried its network.

    Raises
    ------
    BadReplyError
        If the reply says something else.
    """
    record = content.get(TRY_WIDTHS)
    if not isinstance(record, ConfigRecord) or record.get(TRY_WIDTHS) is not True:
        raise BadReplyError(
            f"expected a ConfigRecord '{TRY_WIDTHS}'; does the node's ClientApp have "
            "good_enough_mod?"
        )
    return True
