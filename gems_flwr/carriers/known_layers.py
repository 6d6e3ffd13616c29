"""Messages without the layers that nodes know already.

A question about an output layer carries that layer and the digest of those below it. A node that
has them, in its own `model()` or from an earlier message, works with them. One that has not answers
that it lacks them and is asked again with them; small ones come with the first message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from gems_flwr.core.log import log_event
from gems_flwr.core.question import Question
from gems_flwr.core.records import ARRAYS, once_more, put_instead, to_numpy, to_record
from gems_flwr.core.round import Carrier, Round, Send
from gems_flwr.errors import ModelError
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from torch import nn

# Up to here it is cheaper to send the layers along than to ask whether they are needed: a second
# exchange costs a node more than a megabyte does.
SMALL_BYTES = 2**20

BELOW, _REFERENCE = "layers-below", "layers-below-digest"
_DIGEST, _LACKS = "digest", "lacks"
_KEPT = "gems-layers-below"
_DIGEST_BYTES = 16


class KnownLayers(Carrier):
    """Sends what lies below the output layer to the nodes that lack it, each at most once."""

    def __init__(self) -> None:
        # By digest, the ids of the nodes that were given these layers.
        self._given: dict[str, set[int]] = {}

    def carry(
        self, round: Round, messages: list[Message], question: Question[Any] | None, send: Send
    ) -> list[Message]:
        """Send messages with the output layer alone where nodes know the rest."""
        layer = round.layer
        if question is None or layer is None or not question.is_about_output_layer:
            return send(messages)
        whole = to_numpy(messages[0].content.array_records[ARRAYS])
        below = {key: array for key, array in whole.items() if key not in layer.keys}
        if not below:
            return send(messages)
        digest, record = layers_digest(below), to_record(below)
        head = to_record({key: whole[key] for key in layer.keys})
        given = self._given.setdefault(digest, set())
        small = sum(np.asarray(array).nbytes for array in below.values()) <= SMALL_BYTES
        carrying = {m.metadata.dst_node_id for m in messages} - given if small else set[int]()

        def put(message: Message, carrying: set[int]) -> Message:
            message.content[ARRAYS] = head
            message.content[_REFERENCE] = ConfigRecord({_DIGEST: digest})
            if message.metadata.dst_node_id in carrying:
                message.content[BELOW] = record
            given.update(carrying)
            return message

        # Copies, since the way below may change what it sends.
        contents = {m.metadata.dst_node_id: RecordDict(dict(m.content)) for m in messages}
        replies = send([put(message, carrying) for message in messages])
        lacking = {r.metadata.src_node_id for r in replies if _lacks(r)} - carrying
        if lacking:
            log_event("send_layers", round=round.number, nodes=len(lacking), digest=digest)
            receivers = [m for m in messages if m.metadata.dst_node_id in lacking]
            again = [once_more(m, contents[m.metadata.dst_node_id], "layers") for m in receivers]
            others = [reply for reply in replies if reply.metadata.src_node_id not in lacking]
            replies = [*others, *send([put(message, lacking) for message in again])]
        for reply in filter(_lacks, replies):
            reason = f"it asks again for the layers below '{layer.weight}', which it was sent"
            round.refuse(reply.metadata.src_node_id, reason)
        return [reply for reply in replies if not _lacks(reply)]


def layers_digest(arrays: Arrays) -> str:
    """Return a digest of arrays: their names, types, shapes and values, in whatever order."""
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(arrays):
        # As little-endian numbers, whatever the machine has.
        array = np.asarray(arrays[name])
        plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        total.update(f"{len(name)}:{name}{plain.dtype.str}{array.shape}".encode())
        total.update(plain.data if plain.size else b"")
    return total.hexdigest()


def lacks_layers(content: RecordDict) -> bool:
    """Return whether a node reports that it lacks the layers below the output layer."""
    note = content.get(BELOW)
    return isinstance(note, ConfigRecord) and _LACKS in note


def _lacks(reply: Message) -> bool:
    return reply.has_content() and lacks_layers(reply.content)


# --- on the node ----------------------------------------------------------------------------


def complete_model(
    message: Message, context: Context, model: Callable[[], nn.Module] | None
) -> frozenset[str] | None:
    """Put the whole model into a message that carries its output layer alone.

    What the node had to be given is kept in the context's state.

    Returns
    -------
    frozenset of str, or None
        What the server takes for the output layer, empty where the model came whole; None if the
        node has not the layers that the digest names (then it replies `lacking_layers`).
    """
    content = message.content
    reference, came = content.pop(_REFERENCE, None), content.pop(BELOW, None)
    digest = reference.get(_DIGEST) if isinstance(reference, ConfigRecord) else None
    if digest is None:
        return frozenset()
    if model is None:
        raise ModelError(
            "write good_enough_mod(data, model=Net): the model has arrays below its output layer, "
            "and only the torch module computes what that layer sees"
        )
    head = to_numpy(content.array_records[ARRAYS])
    state = {key: value.detach().cpu().numpy() for key, value in model().state_dict().items()}
    own = {key: array for key, array in state.items() if key not in head}
    below = _layers(str(digest), came, own, context)
    if below is None:
        return None
    whole = {**below, **head}
    # In the order of the module's layers, where they are the module's.
    ordered = {key: whole[key] for key in (*(k for k in state if k in whole), *whole)}
    put_instead(content, ARRAYS, to_record(ordered))
    return frozenset(head)


def lacking_layers() -> RecordDict:
    """Return the reply of a node that has not the layers that a digest names."""
    return RecordDict({BELOW: ConfigRecord({_LACKS: True})})


def _layers(digest: str, came: object, own: Arrays, context: Context) -> Arrays | None:
    """Return the layers that a digest names, wherever the node has them."""
    if isinstance(came, ArrayRecord):
        arrays = to_numpy(came)
        if (found := layers_digest(arrays)) != digest:
            raise ModelError(
                f"the layers below the output layer that came (digest {found}) are not those that "
                f"the server means ({digest})"
            )
        context.state[_KEPT] = came
        return arrays
    if layers_digest(own) == digest:
        return own
    kept = context.state.get(_KEPT)
    if isinstance(kept, ArrayRecord) and layers_digest(arrays := to_numpy(kept)) == digest:
        return arrays
    return None
