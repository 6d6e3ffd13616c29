"""What every strategy can be told, and in which range; listeners of the round loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from gems_flwr.compression.difference_coding import Form, check_form
from gems_flwr.devices import check_device
from gems_flwr.errors import OptionError
from gems_flwr.secure.secure_sum import SecureSum
from gems_flwr.server.state import RoundRecord, RunResult
from gems_flwr.server.stopping import StopRule
from gems_flwr.typing import Arrays


class Callback:
    """Override what you want to hear about; every method does nothing by default.

    Examples
    --------
    >>> from gems_flwr import Callback, FedAvg
    >>> class Bell(Callback):
    ...     def on_round_end(self, record):
    ...         print("round", record.round, "is done")
    >>> strategy = FedAvg(callbacks=[Bell()])
    """

    def on_setup(self, settings: Mapping[str, object], history: Sequence[RoundRecord]) -> None:
        """Hear, before `on_start`, what the strategy was told and what is known already.

        Parameters
        ----------
        settings : mapping from str to object
            The strategy's options by name, such as ``seed`` and ``checkpoint_dir``.
        history : sequence of RoundRecord
            Round 0, which is the initial model, and the rounds that a resumed run has behind it.
        """

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Hear that a run begins, or goes on after `finished_rounds`."""

    def on_exchange(self, server_round: int, nodes: int) -> None:
        """Hear that `nodes` messages are about to be sent."""

    def on_reply(self, server_round: int, node: str, usable: bool) -> None:
        """Hear that a node has answered, as soon as its reply has come in.

        `usable` is false for an error and for a reply that is too large. Whether the content of
        any other can be used is judged when all have answered; who was left out, and why, stands in
        the `RoundRecord` of `on_round_end`.
        """

    def on_model(self, server_round: int, arrays: Arrays, nodes: Sequence[str]) -> None:
        """Hear of a model that is published in the middle of a round; see `publish_every`.

        Parameters
        ----------
        server_round : int
            The round.
        arrays : mapping from str to ndarray
            The model.
        nodes : sequence of str
            Whose replies it is made of, in order.
        """

    def on_round_end(self, record: RoundRecord) -> None:
        """Hear that a round is done and its checkpoint written."""

    def on_end(self, result: RunResult) -> None:
        """Hear that the run is done."""

    def on_error(self, error: BaseException) -> None:
        """Hear that the run has ended with an error, or was interrupted."""


class Need(NamedTuple):
    """How many nodes must be connected, and which option says so."""

    nodes: int
    option: str


@dataclass(kw_only=True, eq=False)
class LoopSettings:
    """Settings that all strategies share; checked when they are made.

    Parameters
    ----------
    min_nodes : int, default 2
        Fewest nodes to go on with, at least 1: connected before a round, and with usable
        replies after it.
    wait_for_nodes : int, optional
        How many nodes to wait for before the first round; `min_nodes` if not given.
    wait_seconds : float, default 60
        How long to wait for nodes.
    return_seconds : float, default 0
        How long, once the others have answered, to wait for a node that was lost in the middle
        of an exchange (it crashed, its connection broke). If it is there, it is asked once more.
    fraction_train : float, default 1.0
        Share of the connected nodes that train in a round, in [0, 1]; never fewer than
        `min_nodes`.
    fraction_evaluate : float, default 0.0
        Share of the nodes that score the new model on their own data after each round, in
        [0, 1]. It costs as many bytes down as training does; 0 sends nothing.
    seed : int, default 0
        Source of all random choices.
    checkpoint_dir : path, optional
        Where to keep the state of the run, and `rounds.jsonl`. One run at a time has it.
    keep_replies : bool, default True
        Whether each reply is put into `checkpoint_dir` as it comes in, so that a run that is
        interrupted in the middle of a round does not ask for it again.
    resume : bool, default False
        Whether to go on from `checkpoint_dir`. If there is nothing yet, the run starts.
    max_reply_bytes : int, optional
        Largest payload of a reply, by default 2 GiB. A larger one is refused by node and size
        before it is unpacked or written to disk; Flower has it in memory by then. None: no limit.
    max_examples : float, optional
        Most examples that a node counts for in weighted means and cones, whatever it claims,
        above 0. Without it a node's weight is its own word, unless all weigh the same.
    secure : SecureSum, optional
        Lets the server see sums over nodes alone, never what a single one sends; nodes need
        `secure_sum_mod`. For `Gems` with cones, `FedAvg`, `OneShotAverage`, `PeriodicAveraging` and
        `DynamicAveraging`.
    compress : {"float32", "float16", "int8", "int4", "int2"}
        How models travel, in both directions. ``float32``: as they are. Otherwise as differences to
        what the receiver has, rounded to so many bits and deflated; what rounding takes is added
        to the next message (`gems_flwr.compression`). For strategies that send models; where nodes
        do not keep them by themselves, they need `compression_mod`.
    publish_every : int, default 0
        Publish a model as soon as `min_nodes` spaces are there, and with every so many more that
        come in: what a run with just these nodes gives. It is told to `Callback.on_model` and
        replaces ``published.safetensors`` in `checkpoint_dir`; ``published`` in the details says
        when. Nodes that connect meanwhile are asked before the round ends. 0 publishes nothing.
        For `Gems`; others have one model a round.
    device : str, default "cpu"
        Where the server computes what it solves or fine-tunes; see `gems_flwr.good_enough_mod`.
        What nodes use is their own affair, and averages are taken on the CPU.
    stop_rules : sequence of StopRule
        Asked after every round.
    callbacks : sequence of Callback
        Told about everything.
    """

    min_nodes: int = 2
    wait_for_nodes: int | None = None
    wait_seconds: float = 60.0
    return_seconds: float = 0.0
    fraction_train: float = 1.0
    fraction_evaluate: float = 0.0
    seed: int = 0
    checkpoint_dir: str | Path | None = None
    keep_replies: bool = True
    resume: bool = False
    max_reply_bytes: int | None = 2**31
    max_examples: float | None = None
    secure: SecureSum | None = None
    compress: Form = "float32"
    publish_every: int = 0
    device: str = "cpu"
    stop_rules: Sequence[StopRule] = ()
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        for name in ("fraction_train", "fraction_evaluate"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise OptionError(f"{name} must be between 0 and 1, got {value}")
        if self.min_nodes < 1:
            raise OptionError(f"min_nodes must be at least 1, got {self.min_nodes}")
        if self.wait_for_nodes is not None and self.wait_for_nodes < self.min_nodes:
            raise OptionError(
                f"wait_for_nodes ({self.wait_for_nodes}) must not be below "
                f"min_nodes ({self.min_nodes})"
            )
        for name in ("wait_seconds", "return_seconds"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("max_reply_bytes", "max_examples"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name} must be above 0 or None, got {value}")
        check_form(self.compress)
        check_device(self.device)
        if self.secure is not None and self.compress != "float32":
            raise OptionError(
                f"compress={self.compress!r} rounds what a single node sends, and a secure sum has "
                "bits of its own (SecureSum(bits=…)); take one of the two"
            )
        if self.seed < 0:
            raise OptionError(f"seed must be at least 0, got {self.seed}")
        if self.secure is not None:
            # Masked numbers are of no use to a run that is resumed: its nodes have new keys.
            self.keep_replies = False
        if self.resume and self.checkpoint_dir is None:
            raise OptionError("resume needs a checkpoint_dir")


P = ParamSpec("P")
R = TypeVar("R")
Settings = TypeVar("Settings", bound=LoopSettings)


def telling_of_errors(
    start: Callable[Concatenate[Settings, P], R],
) -> Callable[Concatenate[Settings, P], R]:
    """Let the callbacks hear of an error that ends a strategy's method, which is raised as it is.

    A display must give the terminal back, and a tracker close its run, in whatever way it ended.
    """

    @functools.wraps(start)
    def told(self: Settings, /, *arguments: P.args, **options: P.kwargs) -> R:
        try:
            return start(self, *arguments, **options)
        except BaseException as error:
            for callback in self.callbacks:
                # The error that counts is the run's own.
                with contextlib.suppress(Exception):
                    callback.on_error(error)
            raise

    return told
