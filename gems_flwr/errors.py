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


def describe_fault(error: BaseException) -> str:
    """Return one line on an exception: its kind, its message, and where it was raised."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        last = frames[-1]
        text += f" (in {last.name}, {Path(last.filename).name} line {last.lineno})"
    return text
