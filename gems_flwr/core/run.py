"""What a run is made of and leaves behind: options of all strategies, seeds, states, the result.

`rounds.jsonl` holds one `RoundRecord` per line, the checkpoint holds one `ServerState`, and
`start` returns one `RunResult`, which is Flower's own `Result` and a little more.

Every random choice is made by a generator derived from the run's seed and a path of words and
numbers such as ``("choose", round)``. No generator is carried from round to round, so a resumed run
draws what the unbroken one would have drawn, whatever order replies came in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from gems_flwr.core.log import result_lines
from gems_flwr.core.records import to_record
from gems_flwr.errors import Failure, OptionError
from gems_flwr.typing import Arrays, Metrics

Goal = Literal["max", "min"]


def derive_seed(seed: int, *path: str | int) -> int:
    """Return a seed for one purpose, e.g. ``"train", 3, "node-1"``, from the run's seed.

    It is below 2**63, which numpy, torch and Flower's records all accept.
    """
    if seed < 0:
        raise OptionError(f"seed must be at least 0, got {seed}")
    text = "/".join(f"{type(part).__name__}:{part}" for part in (seed, *path))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """Return the numpy generator for one purpose; see `derive_seed`."""
    return np.random.default_rng(derive_seed(seed, *path))


# --- what is left behind --------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Payload bytes and messages in both directions; adds up."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes in both directions."""
        return self.bytes_up + self.bytes_down

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round; round 0 is the evaluation of the initial model."""

    round: int
    seconds: float = 0.0
    nodes_asked: tuple[str, ...] = ()
    nodes_answered: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    # Kinds of what nodes were asked, in order, such as ("cone", "score").
    exchanges: tuple[str, ...] = field(default=(), compare=False)
    traffic: Traffic = field(default_factory=Traffic)
    train_metrics: Metrics = field(default_factory=dict)
    evaluate_metrics: Metrics = field(default_factory=dict)
    server_metrics: Metrics = field(default_factory=dict)
    # Metrics that were reported and hold nothing, which a result shows as Flower's does.
    empty_metrics: tuple[str, ...] = ()

    def metric(self, name: str) -> float | None:
        """Return a number: the server's own if it has it, else the nodes' evaluation, training."""
        for metrics in (self.server_metrics, self.evaluate_metrics, self.train_metrics):
            value = metrics.get(name)
            if value is not None and not isinstance(value, list):
                return value
        return None

    def to_json(self) -> dict[str, Any]:
        """Return a flat dict for `rounds.jsonl`."""
        record: dict[str, Any] = dataclasses.asdict(self)
        record.update(record.pop("traffic"))
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RoundRecord:
        """Return the record that `to_json` wrote."""
        rest = dict(record)
        traffic = Traffic(**{f.name: rest.pop(f.name) for f in dataclasses.fields(Traffic)})
        rest["failures"] = [Failure(**failure) for failure in rest["failures"]]
        names = ("nodes_asked", "nodes_answered", "failures", "exchanges", "empty_metrics")
        rest |= {name: tuple(rest[name]) for name in names}
        return cls(**rest, traffic=traffic)


@dataclass(frozen=True)
class RoundOutcome:
    """What `RoundLoop.play_round` returns: the model, what the strategy remembers and reports."""

    arrays: Arrays
    train_metrics: Metrics = field(default_factory=dict)
    evaluate_metrics: Metrics = field(default_factory=dict)
    memory: Arrays = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerState:
    """All that a run needs to go on: saving it is a checkpoint, loading it is a resume."""

    arrays: Arrays  # the global model, or what stands for it (the members of an ensemble)
    history: tuple[RoundRecord, ...] = ()  # round 0 and every finished round
    # Arrays that a strategy keeps from round to round besides the model.
    memory: Arrays = field(default_factory=dict)
    # What a strategy reports of the run; anything that JSON can hold.
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self.history[-1].round if self.history else 0

    def after(self, record: RoundRecord, outcome: RoundOutcome) -> ServerState:
        """Return the state after one more round."""
        details = {**self.details, **outcome.details}
        return ServerState(outcome.arrays, (*self.history, record), outcome.memory, details)

    def result(self, stopped_because: str) -> RunResult:
        """Return this state as what `start` returns."""

        def by_round(metrics: str) -> dict[int, MetricRecord]:
            return {
                record.round: MetricRecord(dict(values))
                for record in self.history
                if (values := getattr(record, metrics)) or metrics in record.empty_metrics
            }

        return RunResult(
            arrays=to_record(self.arrays),
            train_metrics_clientapp=by_round("train_metrics"),
            evaluate_metrics_clientapp=by_round("evaluate_metrics"),
            evaluate_metrics_serverapp=by_round("server_metrics"),
            history=self.history,
            details=dict(self.details),
            stopped_because=stopped_because,
        )


@dataclass
class RunResult(Result):
    """Flower's result, with all rounds, what the strategy reports, and why the run ended."""

    history: tuple[RoundRecord, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    stopped_because: str = ""

    @property
    def traffic(self) -> Traffic:
        """Everything that crossed the network."""
        return sum((record.traffic for record in self.history), Traffic())

    @property
    def failures(self) -> tuple[tuple[int, Failure], ...]:
        """Every (round, failure)."""
        return tuple((record.round, f) for record in self.history for f in record.failures)

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *result_lines(self)])


# --- what every strategy takes --------------------------------------------------------------


class Callback:
    """Override what you need; every method does nothing by default.

    Examples
    --------
    >>> from gems_flwr import Callback, FedAvg
    >>> class Bell(Callback):
    ...     def on_round_end(self, record):
    ...         print("round", record.round, "is done")
    >>> strategy = FedAvg(callbacks=[Bell()])
    """

    def on_setup(self, settings: Mapping[str, object], history: Sequence[RoundRecord]) -> None:
        """Receive, before `on_start`, the strategy's options by name and the rounds so far."""

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """A run starts, or goes on after `finished_rounds`."""

    def on_exchange(self, server_round: int, nodes: int) -> None:
        """`nodes` messages are about to be sent."""

    def on_reply(self, server_round: int, node: str, usable: bool) -> None:
        """A node has answered; `usable` is false for an error and for a reply that is too large.

        The content of others is checked when all have answered; see `RoundRecord.failures`.
        """

    def on_round_end(self, record: RoundRecord) -> None:
        """A round is done and its checkpoint written."""

    def on_end(self, result: RunResult) -> None:
        """The run is done."""

    def on_error(self, error: BaseException) -> None:
        """The run has ended with an error, or was interrupted."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What a run bears of its nodes: waiting for them, and how large and heavy a reply may be.

    Parameters
    ----------
    wait_for_nodes : int, optional
        How many nodes to wait for before the first round; `min_nodes` if not given.
    wait_seconds : float, default 60
        How long to wait for nodes.
    return_seconds : float, default 0
        How long, once the others have answered, to wait for a node that was lost in the middle
        of an exchange (it crashed, its connection broke). If it is there, it is asked once more.
    max_reply_bytes : int, optional
        Largest payload of a reply, by default 2 GiB. A larger one is refused by node and size
        before it is unpacked or written to disk; Flower has it in memory by then. None: no limit.
    max_examples : float, optional
        Most examples that a node counts for in weighted means and cones, whatever it claims,
        above 0. Without it a node's weight is its own claim, unless all weigh the same.

    Examples
    --------
    >>> from gems_flwr import FedAvg, Tolerance
    >>> strategy = FedAvg(tolerance=Tolerance(wait_seconds=600, max_examples=10_000))
    """

    wait_for_nodes: int | None = None
    wait_seconds: float = 60.0
    return_seconds: float = 0.0
    max_reply_bytes: int | None = 2**31
    max_examples: float | None = None

    def __post_init__(self) -> None:
        for name in ("wait_seconds", "return_seconds"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("wait_for_nodes", "max_reply_bytes", "max_examples"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name} must be above 0 or None, got {value}")


# --- a rule for start(should_stop=…): it gets round and result, and returns a reason to stop ---


@dataclass(frozen=True)
class TargetReached:
    """Stop when a metric reaches a value.

    Parameters
    ----------
    value : float
        The target.
    metric : str, default "accuracy"
        Which metric; the server's own evaluation comes first, then the nodes'.
    goal : {"max", "min"}
        Whether larger ("max") or smaller ("min") values are better.

    Examples
    --------
    >>> from gems_flwr import TargetReached
    >>> rule = TargetReached(0.9)  # strategy.start(grid, arrays, should_stop=rule)
    """

    value: float
    metric: str = "accuracy"
    goal: Goal = "max"

    def __post_init__(self) -> None:
        if self.goal not in ("max", "min"):
            raise OptionError(f"goal must be 'max' or 'min', got '{self.goal}'")

    def __call__(self, server_round: int, result: RunResult) -> str | None:
        """Return why to stop, or None to go on."""
        value = result.history[-1].metric(self.metric) if result.history else None
        if value is None:
            return None
        reached = value >= self.value if self.goal == "max" else value <= self.value
        return f"{self.metric} {value:.4f} reached the target {self.value}" if reached else None
