"""Every error of the library, so that users can catch one base class.

A message says who or what is at fault, what was expected, what came, and what to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class GemsError(Exception):
    """Base class of all errors raised by gems-flwr.

    Examples
    --------
    >>> from gems_flwr import FedAvg, GemsError
    >>> try:
    ...     FedAvg(fraction_train=2)
    ... except GemsError as error:
    ...     print(error)
    fraction_train must be between 0 and 1, got 2
    """


# --- mistakes of users ------------------------------------------------------------------------


class OptionError(GemsError, ValueError):
    """An option is out of its range, or contradicts another; the message names it."""


def check_options(owner: object, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raise an OptionError for the first attribute that breaks its rule.

    `rules` says of each attribute's name whether it holds, and what is allowed.
    """
    for name, (holds, allowed) in rules.items():
        if not holds:
            raise OptionError(f"{name} must be {allowed}, got {getattr(owner, name)!r}")


class ModelError(GemsError, ValueError):
    """A model, or the data for it, is not what a method can work with."""


class MultiModelError(GemsError, ValueError):
    """Budget, models and nodes of a multi-model run do not fit together."""


class MissingModError(GemsError):
    """The nodes' app has no mod that answers what the strategy asks; the message says which."""


class OfflineError(GemsError, ValueError):
    """Files cannot be aggregated, or read."""


class NotInstalledError(GemsError, RuntimeError):
    """A command needs more than is installed; the message says what to install."""


class FlowerCliError(GemsError, RuntimeError):
    """A command of Flower failed; the message is its own."""


# --- replies and rounds -----------------------------------------------------------------------


class BadReplyError(GemsError, ValueError):
    """A node's reply cannot be used; the node is left out and the round goes on.

    Raise it in a strategy or question of your own to refuse a reply.
    """


class SpaceError(GemsError, ValueError):
    """A space is malformed: in which field or array, what was expected there, and what came."""

    def __init__(self, key: str, expected: str, got: object) -> None:
        super().__init__(f"{key}: expected {expected}, got {got}")
        self.key, self.expected, self.got = key, expected, str(got)


@dataclass(frozen=True)
class Failure:
    """One node that did not contribute, by its name or id, and why."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node}: {self.reason}"


class RoundFailedError(GemsError):
    """Fewer usable replies than `min_nodes` came in; it has those, and who did not contribute."""

    def __init__(self, message: str, replies: Sequence[Any], failures: Sequence[Failure]) -> None:
        super().__init__(message)
        self.replies, self.failures = tuple(replies), tuple(failures)


class NotEnoughNodesError(GemsError):
    """Fewer nodes than a strategy needs were connected when waiting ended."""


class SecureSumError(GemsError):
    """A secure sum cannot be made, or must not be: keys, shares, signatures or too few nodes."""


class EmptyIntersectionError(GemsError, ValueError):
    """No model is good enough for all nodes, and ``on_empty="fail"`` was asked for."""


# --- files ------------------------------------------------------------------------------------


class DiskError(GemsError):
    """The disk failed: full, read-only, gone, or a file in the way."""


class FolderInUseError(GemsError):
    """Another run works in the folder; the message says which."""


class CheckpointError(GemsError):
    """A checkpoint is damaged, belongs to another run, or cannot be written."""


# --- on a node --------------------------------------------------------------------------------


class RefusedError(GemsError, PermissionError):
    """The server asks for more than a limit of the node's own `NodeLimits` allows."""

    def __init__(self, limit: str, why: str) -> None:
        super().__init__(f"refused by this node's limit {limit}: {why}")
        self.limit = limit


class BypassedPrivacyError(GemsError, ValueError):
    """What the server asks for would leave the node without passing a privacy mod."""


class OutdatedMessageError(GemsError):
    """A message of an earlier round than the node has worked through."""


class NotGoodEnoughError(GemsError, ValueError):
    """Not even the centre reaches the accuracy or loss asked for, so no space is around it."""

    def __init__(self, asked: float, reached: float, what: str) -> None:
        relation = "at least" if what == "accuracy" else "at most"
        super().__init__(
            f"epsilon: the centre must reach {what} {relation} {asked:g}, it reaches {reached:g}; "
            "relax epsilon or train longer"
        )
        self.asked, self.reached, self.what = asked, reached, what


# --- in words ---------------------------------------------------------------------------------

_SHOWN_CHARACTERS = 80


def describe_fault(error: BaseException) -> str:
    """Return one line on an exception: its kind, its message, and where it was raised."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        last = frames[-1]
        text += f" (in {last.name}, {Path(last.filename).name} line {last.lineno})"
    return text


def shown(value: object) -> str:
    """Return a value as a short text, whatever it is: Python writes no integer of 5,000 digits."""
    try:
        text = repr(value) if isinstance(value, str) else str(value)
    except (ValueError, RecursionError):
        return f"{type(value).__name__} of great length"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
