"""Which question a reply answers.

A reply counts for a node only if it comes from that node and answers the very message that the
node was sent. What Flower's SuperLink says of a node that it has lost comes from the SuperLink
itself, under its own id: only the message that it answers tells which node is meant.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Error, Message

from gems_flwr.runtime.flower_internals import LOST, SUPERLINK_NODE_ID


def answered_node(reply: Message, waiting: Mapping[int, Message]) -> int | None:
    """Return the node whose question a reply answers.

    Parameters
    ----------
    reply : Message
        What came in, content or error.
    waiting : mapping from int to Message
        The questions without an answer so far, by node id.

    Returns
    -------
    int or None
        None for an answer to nothing that was asked, or in another node's name.
    """
    source, answered = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
    if source in waiting:
        # Grids that number no messages have no ids to compare.
        asked = waiting[source].metadata.message_id
        return source if not asked or answered == asked else None
    # Nobody but the SuperLink may speak for a node, and only to say that it gives no answer.
    if source != SUPERLINK_NODE_ID or not reply.has_error() or not answered:
        return None
    for node, question in waiting.items():
        if question.metadata.message_id == answered:
            return node
    return None


def is_lost(reply: Message | None) -> bool:
    """Return whether a reply says that the question or its answer was lost on the way."""
    return reply is not None and reply.has_error() and reply.error.code in LOST


def as_the_nodes(reply: Message, question: Message, seconds: float) -> Message:
    """Return a reply as the asked node's own, with the time if it says that the node is lost.

    Parameters
    ----------
    reply : Message
        The answer to `question`, from the node or about it.
    question : Message
        What the node was asked.
    seconds : float
        How long ago that was.
    """
    lost = is_lost(reply)
    if not lost and reply.metadata.src_node_id == question.metadata.dst_node_id:
        return reply
    said = reply.error.reason or f"error {reply.error.code}"
    reason = f"lost {seconds:.0f} s after it was asked: {said}" if lost else said
    return Message(Error(code=reply.error.code, reason=reason), reply_to=question)


def add_reason(reply: Message, more: str) -> None:
    """Let the reason of an error reply say something more."""
    said = reply.error.reason or f"error {reply.error.code}"
    reply.error = Error(code=reply.error.code, reason=f"{said}; {more}")
