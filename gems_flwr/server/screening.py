"""What strategies make of a screening: who stays, what is held against whom, what went unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gems_flwr.errors import Failure, RoundFailedError
from gems_flwr.server.exchange import Answer
from gems_flwr.server.log import log_warning

T = TypeVar("T")

# What no comparison of models can tell, said in every robust result.
UNCHECKED_MODELS = (
    "models do not say which classes are behind them: a lie about classes that few nodes hold "
    "looks like honest data and is not noticed"
)
UNCHECKED_NEURONS = (
    "useless neurons of plausible length are not noticed: those of honest nodes with other data "
    "or other initial weights are as unlike the rest"
)


def plausible(
    received: Mapping[str, T],
    screened: Sequence[T | None],
    reasons: Sequence[str],
    *,
    at_least: int,
    what: str,
) -> tuple[dict[str, T], dict[str, str]]:
    """Return what counts, and by node what was held against it, which is logged, too.

    Parameters
    ----------
    received : mapping from str to anything
        What the nodes sent, by name.
    screened : sequence
        The same as it may count, in the same order; None for a node that is left out.
    reasons : sequence of str
        Of every node, empty where nothing is held against it.
    at_least : int
        How many must be left.
    what : str
        What they sent, for the error.

    Raises
    ------
    RoundFailedError
        If fewer are left.
    """
    notes = {node: reason for node, reason in zip(received, reasons, strict=True) if reason}
    for node, reason in notes.items():
        log_warning("suspect", node=node, reason=reason)
    kept = {n: each for n, each in zip(received, screened, strict=True) if each is not None}
    if len(kept) < at_least:
        lines = "".join(f"\n  node {node}: {reason}" for node, reason in notes.items())
        raise RoundFailedError(
            f"{len(kept)} nodes sent plausible {what}, min_nodes is {at_least}{lines}",
            [Answer(node, each) for node, each in kept.items()],
            [Failure(node, reason) for node, reason in notes.items()],
        )
    return kept, notes


def unchecked_details(classes: Sequence[int] | None) -> dict[str, Any]:
    """Return what a robust result says of what could not be checked, and log it if it matters.

    Parameters
    ----------
    classes : sequence of int, optional
        Classes of cones that too few nodes hold; None where nodes sent models.
    """
    if classes is None:
        return {"unchecked": UNCHECKED_MODELS}
    if classes:
        reason = "too few nodes hold these classes for a lie about them to be noticed"
        log_warning("unchecked", classes=",".join(map(str, classes)), reason=reason)
    return {"unchecked_classes": list(classes)}


def joined(before: Mapping[str, str], now: Mapping[str, str], place: str = "") -> dict[str, str]:
    """Return reasons by node, those of now behind those of before, with the place if named."""
    found = dict(before)
    for node, reason in now.items():
        said = f"{place}: {reason}" if place else reason
        found[node] = f"{found[node]}; {said}" if node in found else said
    return found
