"""What a run leaves behind: plain values that know how to be JSON.

`rounds.jsonl` holds one `RoundRecord` per line, the checkpoint holds one `ServerState`, and
`start` returns one `RunResult`, which is Flower's own `Result` and a little more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from gems_flwr.errors import Failure
from gems_flwr.runtime.metered_grid import Traffic
from gems_flwr.server.run_summary import result_lines
from gems_flwr.typing import Arrays, Metrics
from gems_flwr.wire.records import to_record


@dataclass(frozen=True)
class NameDispute:
    """A node that calls itself by a name which belongs to another, or to both.

    Parameters
    ----------
    node : str
        What the run calls the node.
    claimed : str
        What it calls itself, or is registered as.
    holder : str
        What the run calls the other one.
    """

    node: str
    claimed: str
    holder: str

    def __str__(self) -> str:
        return f"node {self.node} calls itself '{self.claimed}', as node {self.holder} does"


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round.

    Round 0 is the evaluation of the initial model, before any message. `exchanges` says what nodes
    were asked for, in order (``("space", "score")``), in a round that this process has played;
    `empty_metrics` names those metrics that were told and hold nothing, which a result shows as
    Flower's does.

    Examples
    --------
    >>> from gems_flwr import RoundRecord
    >>> record = RoundRecord(1, train_metrics={"loss": 0.5}, server_metrics={"loss": 0.4})
    >>> record.metric("loss")
    0.4
    """

    round: int
    seconds: float = 0.0
    nodes_asked: tuple[str, ...] = ()
    nodes_answered: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    name_disputes: tuple[NameDispute, ...] = ()
    # Not in rounds.jsonl, whose lines stay as they are; so of a resumed run only the new rounds'.
    exchanges: tuple[str, ...] = field(default=(), compare=False)
    traffic: Traffic = field(default_factory=Traffic)
    train_metrics: Metrics = field(default_factory=dict)
    evaluate_metrics: Metrics = field(default_factory=dict)
    server_metrics: Metrics = field(default_factory=dict)
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
        del record["exchanges"]
        record.update(record.pop("traffic"))
        if not self.empty_metrics:
            del record["empty_metrics"]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RoundRecord:
        """Return the record that `to_json` wrote."""
        names = {f.name for f in dataclasses.fields(Traffic)}
        rest = {key: value for key, value in record.items() if key not in names}
        rest["nodes_asked"] = tuple(rest["nodes_asked"])
        rest["nodes_answered"] = tuple(rest["nodes_answered"])
        rest["failures"] = tuple(Failure(**failure) for failure in rest["failures"])
        # Runs of earlier versions had none.
        rest["name_disputes"] = tuple(NameDispute(**d) for d in rest.get("name_disputes", ()))
        rest["empty_metrics"] = tuple(rest.get("empty_metrics", ()))
        return cls(**rest, traffic=Traffic(**{name: record[name] for name in names}))


@dataclass(frozen=True)
class RoundOutcome:
    """What a round changes: the model, what the strategy remembers, what it wants to tell.

    Examples
    --------
    What `RoundLoop.play_round` returns:

    >>> import numpy as np
    >>> from gems_flwr import RoundOutcome
    >>> outcome = RoundOutcome({"w": np.zeros(2)}, details={"left_out": ["north"]})
    >>> outcome.details
    {'left_out': ['north']}
    """

    arrays: Arrays
    train_metrics: Metrics = field(default_factory=dict)
    evaluate_metrics: Metrics = field(default_factory=dict)
    memory: Arrays = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerState:
    """All that a run needs to go on: saving it is a checkpoint, loading it is a resume.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The global model, or whatever stands for it (the members of an ensemble).
    history : tuple of RoundRecord
        Round 0 and every finished round.
    memory : mapping from str to ndarray
        Arrays that a strategy keeps from round to round besides the model.
    details : mapping
        What a strategy wants to tell about the run; anything that JSON can hold.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import RoundOutcome, RoundRecord, ServerState
    >>> state = ServerState({"w": np.zeros(2)}, (RoundRecord(0),))
    >>> state.after(RoundRecord(1), RoundOutcome({"w": np.ones(2)})).round
    1
    """

    arrays: Arrays
    history: tuple[RoundRecord, ...] = ()
    memory: Arrays = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self.history[-1].round if self.history else 0

    def after(self, record: RoundRecord, outcome: RoundOutcome) -> ServerState:
        """Return the state after one more round."""
        return ServerState(
            arrays=outcome.arrays,
            history=(*self.history, record),
            memory=outcome.memory,
            details={**self.details, **outcome.details},
        )

    def result(self, stopped_because: str) -> RunResult:
        """Return this state as what `start` returns."""

        def by_round(metrics: str) -> dict[int, MetricRecord]:
            return {
                record.round: MetricRecord(dict(values))
                for record in self.history
                if (values := getattr(record, metrics)) or metrics in record.empty_metrics
            }

        disputes = [
            {"round": record.round, **dataclasses.asdict(dispute)}
            for record in self.history
            for dispute in record.name_disputes
        ]
        return RunResult(
            arrays=to_record(self.arrays),
            train_metrics_clientapp=by_round("train_metrics"),
            evaluate_metrics_clientapp=by_round("evaluate_metrics"),
            evaluate_metrics_serverapp=by_round("server_metrics"),
            history=self.history,
            details={**self.details, **({"name_disputes": disputes} if disputes else {})},
            stopped_because=stopped_because,
        )


@dataclass
class RunResult(Result):
    """Flower's result, with the history of rounds, the traffic and why the run ended.

    Examples
    --------
    What `start` returns:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> grid = InProcessGrid(app, nodes=2)
    >>> strategy = FedAvg(fraction_evaluate=0.0)
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    >>> result.stopped_because, result.failures, result.traffic.messages_up
    ('all rounds are done', (), 4)
    """

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

    @property
    def name_disputes(self) -> tuple[tuple[int, NameDispute], ...]:
        """Every (round, dispute) about a name."""
        return tuple((record.round, d) for record in self.history for d in record.name_disputes)

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *result_lines(self)])
