"""Screening: what a space may be, seen from the others, before it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from gems_flwr.core.log import log_warning
from gems_flwr.errors import Failure, RoundFailedError
from gems_flwr.spaces import screen_spaces
from gems_flwr.stages.stage import Play, Stage

T = TypeVar("T")

# What no comparison of models can show, reported in every robust result.
UNCHECKED_MODELS = (
    "models do not show which classes are behind them: a lie about classes that few nodes hold "
    "looks like honest data and is not noticed"
)


class Screen(Stage):
    """Hold each node's space against those of the others; see `gems_flwr.spaces.screen_spaces`."""

    option: ClassVar[str] = "robust"
    needs: ClassVar[frozenset[str]] = frozenset({"spaces", "comparable"})

    def play(self, play: Play) -> None:
        """Leave out, or adjust, what is implausible, and note why."""
        spaces = play.spaces
        result = screen_spaces(list(spaces.values()))
        play.spaces, notes = plausible(
            spaces, result.spaces, result.reasons, at_least=play.round.min_nodes, what="spaces"
        )
        play.details["screened"] = notes
        has_classes = "moments" in play.question.offers
        play.details |= unchecked_details(result.unchecked if has_classes else None)


def plausible(
    received: Mapping[str, T],
    screened: Sequence[T | None],
    reasons: Sequence[str],
    *,
    at_least: int,
    what: str,
) -> tuple[dict[str, T], dict[str, str]]:
    """Return what counts, and by node what was held against it, which is logged, too.

    Of what was `received`, `screened` is what may count, in the same order, None for a node that is
    left out; `reasons` are empty where nothing is held against a node. A RoundFailedError if fewer
    than `at_least` are left.
    """
    notes = {node: reason for node, reason in zip(received, reasons, strict=True) if reason}
    for node, reason in notes.items():
        log_warning("suspect", node=node, reason=reason)
    kept = {n: each for n, each in zip(received, screened, strict=True) if each is not None}
    if len(kept) < at_least:
        lines = "".join(f"\n  node {node}: {reason}" for node, reason in notes.items())
        raise RoundFailedError(
            f"{len(kept)} nodes sent plausible {what}, min_nodes is {at_least}{lines}",
            list(kept.items()),
            [Failure(node, reason) for node, reason in notes.items()],
        )
    return kept, notes


def unchecked_details(classes: Sequence[int] | None) -> dict[str, Any]:
    """Return what a robust result reports of what could not be checked, and log it if it matters.

    `classes` of cones are those that too few nodes hold; None where nodes sent models.
    """
    if classes is None:
        return {"unchecked": UNCHECKED_MODELS}
    if classes:
        reason = "too few nodes hold these classes for a lie about them to be noticed"
        log_warning("unchecked", classes=",".join(map(str, classes)), reason=reason)
    return {"unchecked_classes": list(classes)}
