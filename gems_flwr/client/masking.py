"""Whether what a node is about to answer will be masked: known on the node, told by nobody else.

`secure_sum_mod` says so around the mods and the handler inside it. A word in a message would be the
server's, and believed by a node that has no such mod.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

# How many nodes there are in the sum that the answer goes into; 0 where it goes out as it is.
_nodes: ContextVar[int] = ContextVar("nodes in the secure sum", default=0)


@contextlib.contextmanager
def masking(nodes: int) -> Iterator[None]:
    """Say that the answer goes into a secure sum over so many nodes."""
    token = _nodes.set(nodes)
    try:
        yield
    finally:
        _nodes.reset(token)


def masked_with() -> int:
    """Return how many nodes there are in the secure sum, or 0 if there is none."""
    return _nodes.get()
