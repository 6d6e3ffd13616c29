"""Every error of the library, so that users can catch one base class.

A message says who or what is at fault, what was expected, what came, and what to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class GemsError(Exception):
    """Base class of all errors raised by gems-flwr."""


class BadReplyError(GemsError, ValueError):
    """A node's reply cannot be used; the node is left out and the round goes on."""


class CheckpointError(GemsError):
    """A checkpoint is damaged, belongs to another run, or cannot be written."""


class DiskError(GemsError):
    """The disk did not do what it was asked to: full, read-only, gone, or a file in the way."""


class FolderInUseError(GemsError):
    """Another run works in the folder; the message says which."""


class MultiModelError(GemsError, ValueError):
    """Budget, models and nodes of a multi-model run do not fit together."""


class NotEnoughNodesError(GemsError):
    """Fewer nodes than `min_nodes` were connected when waiting ended."""


@dataclass(frozen=True)
class Failure:
    """One node that did not contribute, and why.

    Parameters
    ----------
    node : str
        The node's name, or its id where it has told no name.
    reason : str
        What went wrong, in words for the operator.
    """

    node: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node}: {self.reason}"


class RoundFailedError(GemsError):
    """Fewer usable replies than `min_nodes` came in.

    Parameters
    ----------
    message : str
        What happened and what to do.
    replies : sequence
        The usable replies, so that nothing received is lost.
    failures : sequence of Failure
        Who did not contribute, and why.
    """

    def __init__(self, message: str, replies: Sequence[Any], failures: Sequence[Failure]) -> None:
        super().__init__(message)
        self.replies = tuple(replies)
        self.failures = tuple(failures)


class StateNotSavedError(CheckpointError):
    """A round was played and its state cannot be written.

    Parameters
    ----------
    message : str
        What happened, what is kept where, and what to do.
    state : ServerState
        The state after the round, so that nothing received is lost.
    """

    def __init__(self, message: str, state: Any) -> None:
        super().__init__(message)
        self.state = state


class SpaceError(GemsError, ValueError):
    """A space is malformed.

    Parameters
    ----------
    key : str
        Name of the offending field or array.
    expected : str
        What would have been accepted.
    got : object
        What came instead.
    """

    def __init__(self, key: str, expected: str, got: object) -> None:
        super().__init__(f"{key}: expected {expected}, got {got}")
        self.key = key
        self.expected = expected
        self.got = str(got)


class EmptyIntersectionError(GemsError, ValueError):
    """No model is good enough for all nodes, and the caller wanted to hear of it."""


class BypassedPrivacyError(GemsError, ValueError):
    """What the server asks for would leave the node without passing a privacy mod."""


class RefusedError(GemsError, PermissionError):
    """The server asks for more than the node's own limits allow."""

    def __init__(self, limit: str, why: str) -> None:
        super().__init__(f"refused by this node's limit {limit}: {why}")


class OutdatedMessageError(GemsError):
    """A message of an earlier round than the node has worked through."""


class NotGoodEnoughError(GemsError, ValueError):
    """Not even the centre is good enough, so there is no space around it.

    Parameters
    ----------
    asked : float
        The accuracy (at least) or loss (at most) that was asked for.
    reached : float
        What the centre reaches on the same data.
    what : {"accuracy", "loss"}
        Which of the two.
    """

    def __init__(self, asked: float, reached: float, what: str) -> None:
        relation = "at least" if what == "accuracy" else "at most"
        super().__init__(
            f"epsilon: the centre must reach {what} {relation} {asked:g}, it reaches {reached:g}; "
            "relax epsilon or train longer"
        )
        self.asked, self.reached, self.what = asked, reached, what


def describe_fault(error: BaseException) -> str:
    """Return one line on an exception: its kind, its message, and where it was raised."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        last = frames[-1]
        text += f" (in {last.name}, {Path(last.filename).name} line {last.lineno})"
    return text
