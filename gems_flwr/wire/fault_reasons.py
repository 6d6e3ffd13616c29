"""The reason in an error reply: which request failed, on which node, and why.

A node writes all three into one line; the server takes the line apart again where many nodes say
the same.
"""

from __future__ import annotations

import re

_PREFIX = re.compile(r"[\w.]+ failed on node [^\n]*?: ")
_NUMBER = re.compile(r"[-+]?(?<![\w.])\d[\d_,.]*(e[-+]?\d+)?")
# The place in the code, which is said of faults that are none of this library's own.
_PLACE = re.compile(r"\(in [^()]*, [^()]* line \d+\)$")


def fault_reason(kind: str, node: str, fault: str) -> str:
    """Return the reason of an error reply.

    Parameters
    ----------
    kind : str
        Type of the message that could not be answered.
    node : str
        What the node calls itself.
    fault : str
        What went wrong, and what to do.
    """
    return f"{kind} failed on node {node}: {fault}"


def fault_in(reason: str) -> str:
    """Return what went wrong, without the words that differ from node to node."""
    return _PREFIX.sub("", reason, count=1) if _PREFIX.match(reason) else reason


def is_refusal(reason: str) -> bool:
    """Return whether a mod of this library says no, and not a handler that ran into something."""
    return bool(_PREFIX.match(reason)) and not _PLACE.search(reason)


def is_without_mod(reason: str) -> bool:
    """Return whether an app without a mod of this library took a request for an ordinary message.

    Its handler ran into something, which no mod put into words, or answered with a model where
    something else was asked for.
    """
    ran_into = reason.startswith("<class") or bool(_PLACE.search(reason))
    something_else = ("expected an ArrayRecord", "expected a ConfigRecord")
    return not _PREFIX.match(reason) and (ran_into or reason.startswith(something_else))


def without_numbers(reason: str) -> str:
    """Return a reason in which every number is left out, for those whom they are no business of."""
    prefix = _PREFIX.match(reason)
    start = prefix.end() if prefix else 0
    return reason[:start] + _NUMBER.sub("…", reason[start:])
