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


class OptionError(GemsError, ValueError):
    """An option is out of its range, or contradicts another; the message names it.

    Examples
    --------
    >>> from gems_flwr import DynamicAveraging
    >>> DynamicAveraging(follow_loss=-1)
    Traceback (most recent call last):
    gems_flwr.errors.OptionError: follow_loss must be at least 0, got -1
    """


class ModelError(GemsError, ValueError):
    """A model, or the data for it, is not what a method can work with.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr import resize_model
    >>> resize_model(torch.nn.Linear(2, 2, bias=False), {})
    Traceback (most recent call last):
    gems_flwr.errors.ModelError: the arrays are not this model's: missing ['weight'], surplus []
    """


class BadReplyError(GemsError, ValueError):
    """A node's reply cannot be used; the node is left out and the round goes on.

    Raise it in a strategy of your own to refuse a reply.

    Examples
    --------
    >>> from gems_flwr import GemsError, BadReplyError
    >>> issubclass(BadReplyError, GemsError)
    True
    """


class SecureSumError(GemsError):
    """A secure sum cannot be made, or must not be: keys, shares, signatures or too few nodes.

    Examples
    --------
    >>> from gems_flwr import GemsError, SecureSumError
    >>> issubclass(SecureSumError, GemsError)
    True
    """


class CheckpointError(GemsError):
    """A checkpoint is damaged, belongs to another run, or cannot be written.

    Examples
    --------
    >>> from gems_flwr import CheckpointError, StateNotSavedError
    >>> issubclass(StateNotSavedError, CheckpointError)
    True
    """


class DiskError(GemsError):
    """The disk did not do what it was asked to: full, read-only, gone, or a file in the way.

    Examples
    --------
    >>> from gems_flwr import DiskError, GemsError
    >>> issubclass(DiskError, GemsError)
    True
    """


class FolderInUseError(GemsError):
    """Another run works in the folder; the message says which.

    Examples
    --------
    >>> from gems_flwr import FolderInUseError, GemsError
    >>> issubclass(FolderInUseError, GemsError)
    True
    """


class FlowerCliError(GemsError, RuntimeError):
    """A command of Flower's did not do what it was asked to; the message is its own.

    Examples
    --------
    >>> from gems_flwr import FlowerCliError, GemsError
    >>> issubclass(FlowerCliError, GemsError)
    True
    """


class NotInstalledError(GemsError, RuntimeError):
    """A command needs more than is installed; the message says what to install.

    Examples
    --------
    >>> from gems_flwr import GemsError, NotInstalledError
    >>> issubclass(NotInstalledError, GemsError)
    True
    """


class MultiModelError(GemsError, ValueError):
    """Budget, models and nodes of a multi-model run do not fit together.

    Examples
    --------
    >>> from gems_flwr import GemsError, MultiModelError
    >>> issubclass(MultiModelError, GemsError)
    True
    """


class MissingModError(GemsError):
    """The nodes' app has no mod that answers what the strategy asks; the message says which to add.

    Examples
    --------
    >>> from gems_flwr import GemsError, MissingModError
    >>> issubclass(MissingModError, GemsError)
    True
    """


class NotEnoughNodesError(GemsError):
    """Fewer nodes than a strategy needs were connected when waiting ended.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid, NotEnoughNodesError
    >>> strategy = FedAvg(min_nodes=2, wait_seconds=0)
    >>> try:
    ...     strategy.start(InProcessGrid(ClientApp(), nodes=1), ArrayRecord([np.zeros(2)]))
    ... except NotEnoughNodesError:
    ...     print("start more nodes")
    start more nodes
    """


class OfflineError(GemsError, ValueError):
    """Files that cannot be aggregated, or looked at.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from gems_flwr import OfflineError, aggregate_files
    >>> with TemporaryDirectory() as folder:
    ...     try:
    ...         aggregate_files([], Path(folder, "model.safetensors"))
    ...     except OfflineError as error:
    ...         print(error)
    name at least one space file, or a node to remove
    """


@dataclass(frozen=True)
class Failure:
    """One node that did not contribute, and why.

    Parameters
    ----------
    node : str
        The node's name, or its id where it has told no name.
    reason : str
        What went wrong, in words for the operator.

    Examples
    --------
    >>> from gems_flwr import Failure
    >>> print(Failure("north", "no reply within 60 s"))
    node north: no reply within 60 s
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

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid, RoundFailedError
    >>> grid = InProcessGrid(ClientApp(), nodes=2)  # without a train handler
    >>> try:
    ...     FedAvg().start(grid, ArrayRecord([np.zeros(2)]))
    ... except RoundFailedError as error:
    ...     print(len(error.replies), "replies,", len(error.failures), "failures")
    0 replies, 2 failures
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

    Examples
    --------
    >>> from gems_flwr import StateNotSavedError
    >>> StateNotSavedError("no space left on the device", state="the state").state
    'the state'
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

    Examples
    --------
    >>> from gems_flwr import SpaceError
    >>> print(SpaceError("radius", "a number above 0", -1))
    radius: expected a number above 0, got -1
    """

    def __init__(self, key: str, expected: str, got: object) -> None:
        super().__init__(f"{key}: expected {expected}, got {got}")
        self.key = key
        self.expected = expected
        self.got = str(got)


class EmptyIntersectionError(GemsError, ValueError):
    """No model is good enough for all nodes, and the caller wanted to hear of it.

    Raised by ``Gems(on_empty="fail")`` and by ``aggregate_files(on_empty="fail")``.

    Examples
    --------
    >>> from gems_flwr import EmptyIntersectionError, GemsError
    >>> issubclass(EmptyIntersectionError, GemsError)
    True
    """


class BypassedPrivacyError(GemsError, ValueError):
    """What the server asks for would leave the node without passing a privacy mod.

    Examples
    --------
    >>> from gems_flwr import BypassedPrivacyError, GemsError
    >>> issubclass(BypassedPrivacyError, GemsError)
    True
    """


class RefusedError(GemsError, PermissionError):
    """The server asks for more than the node's own limits allow.

    Parameters
    ----------
    limit : str
        Which limit of `NodeLimits`.
    why : str
        What was asked for, and what is allowed.

    Examples
    --------
    >>> from gems_flwr import RefusedError
    >>> print(RefusedError("allow_scores", "this node tells no scores"))
    refused by this node's limit allow_scores: this node tells no scores
    """

    def __init__(self, limit: str, why: str) -> None:
        super().__init__(f"refused by this node's limit {limit}: {why}")


class OutdatedMessageError(GemsError):
    """A message of an earlier round than the node has worked through.

    Examples
    --------
    >>> from gems_flwr import GemsError, OutdatedMessageError
    >>> issubclass(OutdatedMessageError, GemsError)
    True
    """


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

    Examples
    --------
    >>> from gems_flwr import NotGoodEnoughError
    >>> NotGoodEnoughError(asked=0.9, reached=0.8, what="accuracy").reached
    0.8
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
