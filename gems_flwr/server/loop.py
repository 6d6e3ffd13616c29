"""The round loop under every strategy of this library.

Flower's own ``Strategy.start`` has no hooks: it waits for ever for nodes, chooses them by a
global generator, sums replies in order of arrival, and forgets everything if it dies. This loop
keeps its signature and its four methods (``configure_train``, ``aggregate_train``,
``configure_evaluate``, ``aggregate_evaluate``), and solves those concerns once. A strategy
overrides `aggregate`; a protocol with several exchanges in a round overrides `play_round`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from gems_flwr import scoring
from gems_flwr.averaging.means import mean_metrics
from gems_flwr.errors import BadReplyError
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.exchange import Answer, Exchange
from gems_flwr.server.log import log_event, without_clashes
from gems_flwr.server.nodes import Nodes, wait_for_nodes
from gems_flwr.server.replay import play_despite_replies
from gems_flwr.server.round_log import RoundLog, owning_its_folder
from gems_flwr.server.settings import LoopSettings
from gems_flwr.server.state import RoundOutcome, RoundRecord, RunResult, ServerState
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import EVALUATE, TRAIN
from gems_flwr.wire.model_replies import (
    ModelReply,
    pack_instruction,
    unpack_metrics_reply,
    unpack_model_reply,
)
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import JsonRequest

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class RoundLoop(LoopSettings, Strategy):
    """Base of all strategies here; see the module's docstring.

    Parameters
    ----------
    **settings
        See `LoopSettings`.

    Examples
    --------
    A strategy of one's own, with everything that `RoundLoop` brings:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, RoundLoop
    >>> class Largest(RoundLoop):
    ...     def aggregate(self, answers):
    ...         models = [answer.value.arrays for answer in answers]
    ...         return {name: np.max([m[name] for m in models], axis=0) for name in models[0]}
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> grid = InProcessGrid(app, nodes=3)
    >>> result = Largest().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    >>> result.arrays.to_numpy_ndarrays()
    [array([4., 4.])]
    """

    # Strategies that are done after a fixed number of rounds say so here.
    rounds_needed: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._nodes = Nodes()
        self._exchange = Exchange(0, self._nodes)
        self._template: Arrays | None = None

    # --- what a strategy decides --------------------------------------------------------------

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Make the new global arrays out of the nodes' models, which come ordered by name.

        A strategy overrides this, or `play_round` if its nodes do not send models.
        """
        raise NotImplementedError(f"{self._name} aggregates no models, it plays its own rounds")

    def score(self, members: Sequence[NDArray], labels: NDArray) -> dict[str, float]:
        """Score what this strategy's arrays predict.

        Parameters
        ----------
        members : sequence of ndarray of shape (samples, classes)
            Class probabilities of each model in the arrays; most strategies have one.
        labels : ndarray of int
            True classes.
        """
        return scoring.score(members[0], labels)

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play one round: train, aggregate, and let the nodes evaluate if that was asked for."""
        replies = self.collect(
            self.configure_train(server_round, to_record(state.arrays), train_config, grid)
        )
        arrays, train_metrics = self.aggregate_train(server_round, replies)
        new_arrays = state.arrays if arrays is None else to_numpy(arrays)

        questions = list(
            self.configure_evaluate(server_round, to_record(new_arrays), evaluate_config, grid)
        )
        evaluate_metrics = (
            self.aggregate_evaluate(server_round, self.collect(questions)) if questions else None
        )
        return RoundOutcome(
            arrays=new_arrays,
            train_metrics=_scalars(train_metrics),
            evaluate_metrics=_scalars(evaluate_metrics),
        )

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Look at what a run begins with; by default there is no need to."""

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return why to stop after the rounds so far, or None to go on."""
        reasons = (rule(state.history) for rule in self.stop_rules)
        return next((reason for reason in reasons if reason), None)

    def rename_nodes(self, state: ServerState, names: Mapping[str, str]) -> ServerState:
        """Call nodes by other names in what a strategy keeps from round to round, if it does.

        Parameters
        ----------
        state : ServerState
            The state between two rounds.
        names : mapping from str to str
            New names by the old ones.
        """
        return state

    def needs_names(self) -> bool:
        """Whether the first message already depends on which node is which."""
        return self.fraction_train < 1 or 0 < self.fraction_evaluate < 1

    # --- Flower's four methods ----------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one train message for each chosen node."""
        self._template = to_numpy(arrays)
        nodes = self.choose_nodes(server_round, grid, self.fraction_train, TRAIN)
        return self.messages(server_round, nodes, TRAIN, arrays, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate the replies, leave out the bad ones, aggregate the rest."""
        answers = self.accept(replies, self._unpack_model, at_least=self.min_nodes)
        return to_record(self.aggregate(answers)), _mean_of(answers)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one evaluate message for each chosen node; none if evaluation is off."""
        if self.fraction_evaluate == 0:
            return []
        nodes = self.choose_nodes(server_round, grid, self.fraction_evaluate, EVALUATE)
        return self.messages(server_round, nodes, EVALUATE, arrays, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of the nodes' metrics; None where no node gave any."""
        answers = self.accept(replies, unpack_metrics_reply)
        return _mean_of(answers) if answers else None

    def summary(self) -> None:
        """Log the strategy's settings."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {
            k: v
            for k, v in settings.items()
            if isinstance(v, str | int | float | Path | JsonRequest)
        }
        log_event("settings", **plain)

    # --- tools for strategies -----------------------------------------------------------------

    def choose_nodes(
        self, server_round: int, grid: Grid, fraction: float, purpose: str
    ) -> list[int]:
        """Choose nodes by the run's own generator, from a list whose order is always the same."""
        connected = self._connected(grid, self.min_nodes)
        self._nodes.meet(grid, connected)
        # The tiny term keeps 0.29 * 100 from counting as 28.
        count = max(self.min_nodes, int(fraction * len(connected) + 1e-9))
        if count == len(connected):
            return sorted(connected, key=self._nodes.position)
        if self._exchange.grid is not None:
            # Who has joined since the run began has not been asked yet.
            self._nodes.ask_names(self._exchange.grid, connected, self._exchange.timeout)
        available = sorted(connected, key=self._nodes.position)
        rng = generator(self.seed, "choose", purpose, server_round)
        chosen = rng.choice(len(available), size=count, replace=False)
        return [available[i] for i in sorted(chosen)]

    def messages(
        self,
        server_round: int,
        nodes: Iterable[int],
        message_type: str,
        arrays: ArrayRecord | None,
        config: ConfigRecord,
        step: str = "",
    ) -> list[Message]:
        """Return one message per node, each with records of its own.

        `step` tells several exchanges of one message type in one round apart.
        """
        return [
            Message(
                content=pack_instruction(arrays, config, server_round=server_round, seed=self.seed),
                dst_node_id=node,
                message_type=message_type,
                group_id=f"{server_round}-{step}" if step else str(server_round),
            )
            for node in nodes
        ]

    def join(self, other: RoundLoop) -> None:
        """Take part in the round that another strategy is playing, as a part of it."""
        self._nodes, self._exchange = other._nodes, other._exchange

    def collect(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages and return the replies of the round under way; see `Exchange`."""
        return self._exchange.collect(self._exchange.unbarred(messages))

    def accept(
        self, replies: Iterable[Message], unpack: Callable[[RecordDict], T], *, at_least: int = 0
    ) -> list[Answer[T]]:
        """Validate and order replies; see `Exchange`."""
        return self._exchange.accept(replies, unpack, at_least=at_least)

    def _unpack_model(self, content: RecordDict) -> ModelReply:
        if self._template is None:
            # Nobody said what the model looks like (the method was called by itself): as in
            # Flower, the first reply sets the pattern for the others.
            records = list(content.array_records.values())
            try:
                self._template = to_numpy(records[0])
            except Exception as error:
                raise BadReplyError(f"no readable model in the reply: {error}") from error
        return unpack_model_reply(content, self._template)

    # --- the loop -----------------------------------------------------------------------------

    @owning_its_folder
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> RunResult:
        """Run the strategy; the signature is that of Flower's ``Strategy.start``.

        Parameters
        ----------
        grid : Grid
            Where the nodes are.
        initial_arrays : ArrayRecord
            The initial model.
        num_rounds : int, default 3
            Rounds to play. A one-round strategy plays one, whatever stands here.
        timeout : float, default 3600
            Seconds that nodes have for a reply.
        train_config, evaluate_config : ConfigRecord, optional
            Sent along with the messages.
        evaluate_fn : callable, optional
            Scores the global model at the server: before the first round and after each.

        Returns
        -------
        RunResult
            The final arrays, the metrics by round as in Flower, and the history.

        Raises
        ------
        NotEnoughNodesError
            If fewer than `min_nodes` nodes are connected when waiting ends.
        RoundFailedError
            If a round has fewer than `min_nodes` usable replies.
        CheckpointError
            If `resume` finds a checkpoint of another run, or the disk takes no more.
        FolderInUseError
            If another run works in `checkpoint_dir`.
        """
        grid = MeteredGrid.around(grid)
        # Node ids of another run mean nothing in this one.
        self._nodes = Nodes()
        self.prepare(to_numpy(initial_arrays), num_rounds)
        rounds = num_rounds if self.rounds_needed is None else self.rounds_needed
        round_log = self._open_round_log(initial_arrays)
        state = self._begin(initial_arrays, round_log, evaluate_fn)
        self._log_start(state, rounds)
        counted = grid.total
        if state.round < rounds:
            self._meet_nodes(grid, round_log, timeout)

        stopped_because = self.reason_to_stop(state)
        while state.round < rounds and not stopped_because:
            number, started = state.round + 1, time.perf_counter()
            if names := self._nodes.settle(grid):
                state = self.rename_nodes(state, names)
            exchange = Exchange(
                server_round=number,
                nodes=self._nodes,
                grid=grid,
                timeout=timeout,
                inbox=round_log.files if round_log and self.keep_replies else None,
                callbacks=self.callbacks,
                return_seconds=self.return_seconds,
                max_reply_bytes=self.max_reply_bytes,
                max_examples=self.max_examples,
            )
            configs = (train_config or ConfigRecord(), evaluate_config or ConfigRecord())
            outcome = self._play(exchange, state, grid, *configs)
            record = RoundRecord(
                round=number,
                seconds=time.perf_counter() - started,
                nodes_asked=self._exchange.asked,
                nodes_answered=self._exchange.answered,
                failures=self._exchange.failures,
                name_disputes=self._nodes.take_disputes(),
                traffic=grid.total - counted,
                train_metrics=outcome.train_metrics,
                evaluate_metrics=outcome.evaluate_metrics,
                server_metrics=_evaluate(evaluate_fn, number, outcome.arrays),
            )
            counted = grid.total
            state = state.after(record, outcome)
            if round_log:
                round_log.save(state)
            log_event("round_end", **_logged(record))
            for callback in self.callbacks:
                callback.on_round_end(record)
            stopped_because = self.reason_to_stop(state)

        result = state.result(stopped_because or "all rounds are done")
        self._log_end(result)
        for callback in self.callbacks:
            callback.on_end(result)
        return result

    def _play(
        self,
        exchange: Exchange,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play one round, without those whose replies make it fail."""

        def play(barred: Mapping[int, str]) -> RoundOutcome:
            self._exchange = dataclasses.replace(exchange, barred=barred)
            number = exchange.server_round
            return self.play_round(number, state, grid, train_config, evaluate_config)

        if exchange.inbox is None:
            return play({})  # to play it again everybody would have to train again
        return play_despite_replies(play, lambda: self._exchange)

    def _open_round_log(self, initial_arrays: ArrayRecord) -> RoundLog | None:
        if self.checkpoint_dir is None:
            return None
        return RoundLog(
            self.checkpoint_dir,
            strategy=self._name,
            seed=self.seed,
            model=to_numpy(initial_arrays),
        )

    def _begin(
        self,
        initial_arrays: ArrayRecord,
        round_log: RoundLog | None,
        evaluate_fn: EvaluateFn | None,
    ) -> ServerState:
        def fresh() -> ServerState:
            arrays = to_numpy(initial_arrays)
            first = RoundRecord(0, server_metrics=_evaluate(evaluate_fn, 0, arrays))
            return ServerState(arrays, (first,))

        return round_log.open(fresh, resume=self.resume) if round_log else fresh()

    def _log_start(self, state: ServerState, rounds: int) -> None:
        log_event("start", strategy=self._name, rounds=rounds, done=state.round)
        self.summary()
        for callback in self.callbacks:
            callback.on_start(self._name, rounds, state.round)

    def _log_end(self, result: RunResult) -> None:
        log_event(
            "end",
            strategy=self._name,
            rounds=result.history[-1].round,
            because=result.stopped_because,
            bytes_up=result.traffic.bytes_up,
            bytes_down=result.traffic.bytes_down,
            failures=len(result.failures),
        )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _meet_nodes(
        self, grid: MeteredGrid, round_log: RoundLog | None, timeout: float | None
    ) -> None:
        """Wait for the nodes, and learn their names where they are needed beforehand."""
        nodes = self._connected(grid, self.wait_for_nodes or self.min_nodes)
        self._nodes.settle(grid)
        # Names are needed beforehand to tell nodes apart, and to recognise replies that were
        # kept. Otherwise they come with the replies, and one-round methods stay at one round.
        if self.needs_names() or (round_log and round_log.files.has_replies()):
            self._nodes.ask_names(grid, nodes, timeout)

    def _connected(self, grid: Grid, wanted: int) -> list[int]:
        return wait_for_nodes(
            grid, wanted=wanted, at_least=self.min_nodes, seconds=self.wait_seconds
        )


def _logged(record: RoundRecord) -> dict[str, object]:
    metrics = record.server_metrics or record.evaluate_metrics or record.train_metrics
    fields = {
        "round": record.round,
        "asked": len(record.nodes_asked),
        "answered": len(record.nodes_answered),
        "bytes_up": record.traffic.bytes_up,
        "bytes_down": record.traffic.bytes_down,
        "seconds": record.seconds,
    }
    return without_clashes(fields, metrics)


def _mean_of(answers: Sequence[Answer[Any]]) -> MetricRecord:
    replies = [answer.value for answer in answers]
    means = mean_metrics([r.metrics for r in replies], [r.num_examples for r in replies])
    return MetricRecord(dict(means))


def _evaluate(
    evaluate_fn: EvaluateFn | None, server_round: int, arrays: Arrays
) -> dict[str, float]:
    if evaluate_fn is None:
        return {}
    return _scalars(evaluate_fn(server_round, to_record(arrays)))


def _scalars(metrics: MetricRecord | None) -> dict[str, float]:
    return {k: v for k, v in (metrics or {}).items() if not isinstance(v, list)}
