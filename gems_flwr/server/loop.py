"""The round loop under every strategy of this library.

Flower's own ``Strategy.start`` has no hooks: it waits for ever for nodes, chooses them by a
global generator, sums replies in order of arrival, and forgets everything if it dies. This loop
keeps its signature and its four methods (``configure_train``, ``aggregate_train``,
``configure_evaluate``, ``aggregate_evaluate``), and solves those concerns once. A strategy
overrides `aggregate`; a protocol with several exchanges in a round overrides `play_round`. What
both find ready is in `gems_flwr.server.round_methods`.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from gems_flwr.compression.difference_coding import check_compressible
from gems_flwr.errors import DiskError, RoundFailedError
from gems_flwr.model_card import FILE as CARD
from gems_flwr.receipts import RECEIPTS
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.exchange import Exchange
from gems_flwr.server.log import is_heard, log_event, log_text, log_warning, without_clashes
from gems_flwr.server.model_links import ModelLinks, links_without, renamed_links, without_links
from gems_flwr.server.nodes import Nodes
from gems_flwr.server.replay import play_despite_replies
from gems_flwr.server.round_log import RoundLog, owning_its_folder
from gems_flwr.server.round_methods import EvaluateFn, RoundMethods
from gems_flwr.server.run_card import write_model_card
from gems_flwr.server.run_summary import end_lines, start_lines
from gems_flwr.server.settings import telling_of_errors
from gems_flwr.server.state import RoundOutcome, RoundRecord, RunResult, ServerState
from gems_flwr.server.withdrawing import (
    play_without_leavers,
    put_receipts,
    who_left,
    without_leavers,
)
from gems_flwr.typing import Arrays, Metrics
from gems_flwr.wire.fault_reasons import is_without_mod
from gems_flwr.wire.keys import EVALUATE, TRAIN
from gems_flwr.wire.model_replies import single_numbers
from gems_flwr.wire.records import to_numpy, to_record

# Gets a finished round and the result so far.
ShouldStop = Callable[[int, RunResult], bool]


@dataclass(kw_only=True, eq=False)
class RoundLoop(RoundMethods):
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

    @owning_its_folder
    @telling_of_errors
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: ShouldStop | None = None,
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
        should_stop : callable, optional
            Gets the round and the result so far, after each round; True ends the run. Flower's own
            strategies have it from 1.43 on.

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
        grid, began = MeteredGrid.around(grid), time.perf_counter()
        # Node ids of another run mean nothing in this one.
        self._nodes, self._left, self._examples = Nodes(), (), {}
        self._links_name = secrets.token_hex(4)
        self._like = to_numpy(initial_arrays)
        check_compressible(self._like, self.compress)
        self.prepare(to_numpy(initial_arrays), num_rounds)
        rounds = num_rounds if self.rounds_needed is None else self.rounds_needed
        round_log = self._open_round_log(initial_arrays)
        state = self._begin(initial_arrays, round_log, evaluate_fn)
        self._log_start(state, rounds, train_config, evaluate_config)
        counted = grid.total
        self._nodes.recall_withdrawn(who_left(state.details))
        put_receipts(self.checkpoint_dir, state.details, RECEIPTS)
        if state.round < self.rounds_in_all(state, rounds):
            self._meet_nodes(grid, round_log, timeout)
        # One record for all rounds, as in Flower: what `configure_train` changes in it stays.
        configs = (
            ConfigRecord() if train_config is None else train_config,
            ConfigRecord() if evaluate_config is None else evaluate_config,
        )

        stopped_because = self.reason_to_stop(state) or _asked_to_stop(should_stop, state)
        while state.round < (last := self.rounds_in_all(state, rounds)) and not stopped_because:
            number, started = state.round + 1, time.perf_counter()
            log_text("", f"[ROUND {number}/{last}]")
            if names := self._nodes.settle(grid):
                state = self._renamed(state, names)
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
                began=grid.total if state.round else counted,
            )
            outcome = self._play(exchange, state, grid, *configs)
            record = RoundRecord(
                round=number,
                seconds=time.perf_counter() - started,
                nodes_asked=self._exchange.asked,
                nodes_answered=self._exchange.answered,
                failures=self._exchange.failures,
                name_disputes=self._nodes.take_disputes(),
                exchanges=("names",) * self._nodes.take_questions() + self._exchange.purposes,
                traffic=grid.total - counted,
                **_told(
                    train_metrics=outcome.train_metrics,
                    evaluate_metrics=outcome.evaluate_metrics,
                    server_metrics=_evaluate(evaluate_fn, number, outcome.arrays),
                ),
            )
            counted = grid.total
            self._examples |= self._exchange.examples
            state = self._without_leavers(state.after(record, outcome))
            if round_log:
                round_log.save(state)
                put_receipts(self.checkpoint_dir, state.details, RECEIPTS)
            log_event("round_end", **_logged(record))
            for callback in self.callbacks:
                callback.on_round_end(record)
            stopped_because = self.reason_to_stop(state) or _asked_to_stop(should_stop, state)

        result = state.result(stopped_because or "all rounds are done")
        self._put_card(result)
        self._log_end(result, time.perf_counter() - began)
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

        def once(now: ServerState) -> RoundOutcome:
            number = exchange.server_round
            links = self._links = self._new_links(number, now)
            now = dataclasses.replace(now, memory=without_links(now.memory))
            outcome = self.play_round(number, now, grid, train_config, evaluate_config)
            if links is not None:
                refused = self._exchange.refused
                links.settle(self, [node for node in self.answered_ids if node not in refused])
            outcome = self._evaluated(number, outcome, evaluate_config, grid)
            if links is None:
                return outcome
            return dataclasses.replace(outcome, memory={**outcome.memory, **links.to_memory()})

        def play(barred: Mapping[int, str]) -> RoundOutcome:
            self._exchange = dataclasses.replace(exchange, barred=barred)
            self._is_playing = True
            try:
                return play_without_leavers(self, self._exchange, state, self._left, once)
            except RoundFailedError as error:
                said = {failure.node: failure.reason for failure in error.failures}
                nobody = self.mods_needed() and not error.replies
                if nobody and said and all(map(is_without_mod, said.values())):
                    raise self.without_mod(said) from error
                raise
            finally:
                self._is_playing = False

        if exchange.inbox is None:
            return play({})  # to play it again everybody would have to train again
        return play_despite_replies(play, lambda: self._exchange)

    def _new_links(self, server_round: int, state: ServerState) -> ModelLinks | None:
        """Return what nodes have been given before a round, where models are packed."""
        if self.compress == "float32" or self.packs_models:
            return None
        return ModelLinks(
            self.compress,
            self._links_name,
            server_round,
            arrays_key=self.record_keys.arrays,
            like=self._like,
        ).recalled(state.memory)

    def _renamed(self, state: ServerState, names: Mapping[str, str]) -> ServerState:
        """Call nodes by other names in all that is kept from round to round."""
        own = dataclasses.replace(state, memory=without_links(state.memory))
        renamed, links = self.rename_nodes(own, names), renamed_links(state.memory, names)
        return dataclasses.replace(renamed, memory={**renamed.memory, **links})

    def _without_leavers(self, state: ServerState) -> ServerState:
        """Return a state that says nothing of those who have left, but for the receipts."""
        self._left = self._nodes.withdrawn
        names = who_left(state.details)
        return dataclasses.replace(
            state,
            details=without_leavers(state.details, names),
            memory=links_without(state.memory, names),
        )

    def _evaluated(
        self, server_round: int, outcome: RoundOutcome, config: ConfigRecord, grid: Grid
    ) -> RoundOutcome:
        """Let the nodes' own handlers evaluate the model of a round, if that was asked for."""
        methods = ("configure_evaluate", "aggregate_evaluate")
        if self.fraction_evaluate == 0 and all(
            getattr(type(self), name) is getattr(RoundLoop, name) for name in methods
        ):
            return outcome  # a subclass with methods of its own is called, as in Flower
        messages = list(
            self.configure_evaluate(server_round, to_record(outcome.arrays), config, grid)
        )
        metrics = self.evaluate_metrics(server_round, messages)
        if metrics is None:
            return outcome
        return dataclasses.replace(outcome, evaluate_metrics=metrics)

    def _open_round_log(self, initial_arrays: ArrayRecord) -> RoundLog | None:
        if self.checkpoint_dir is None:
            return None
        log_event("checkpoints", folder=Path(self.checkpoint_dir).resolve())
        return RoundLog(
            self.checkpoint_dir,
            strategy=self._name,
            seed=self.seed,
            model=to_numpy(initial_arrays),
            compress=self.compress,
        )

    def _begin(
        self,
        initial_arrays: ArrayRecord,
        round_log: RoundLog | None,
        evaluate_fn: EvaluateFn | None,
    ) -> ServerState:
        def fresh() -> ServerState:
            arrays = to_numpy(initial_arrays)
            if evaluate_fn is not None:
                self.check_evaluation(arrays, evaluate_fn)
            first = RoundRecord(0, **_told(server_metrics=_evaluate(evaluate_fn, 0, arrays)))
            return ServerState(arrays, (first,))

        return round_log.open(fresh, resume=self.resume) if round_log else fresh()

    def _log_start(self, state: ServerState, rounds: int, *configs: ConfigRecord | None) -> None:
        log_event("start", strategy=self._name, rounds=rounds, done=state.round)
        if is_heard():
            log_text(*start_lines(self._name, rounds, state, *configs))
        self.summary()
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for callback in self.callbacks:
            callback.on_setup(settings, state.history)
            callback.on_start(self._name, rounds, state.round)

    def _log_end(self, result: RunResult, seconds: float) -> None:
        log_event(
            "end",
            strategy=self._name,
            rounds=result.history[-1].round,
            because=result.stopped_because,
            bytes_up=result.traffic.bytes_up,
            bytes_down=result.traffic.bytes_down,
            failures=len(result.failures),
        )
        if is_heard():
            log_text(*end_lines(result, seconds))

    def _put_card(self, result: RunResult) -> None:
        """Put the model card into the folder; a disk that refuses it costs nothing else."""
        if self.checkpoint_dir is None:
            return
        try:
            write_model_card(result, Path(self.checkpoint_dir) / CARD, strategy=self)
        except DiskError as error:
            log_warning("no_model_card", reason=error)

    def _meet_nodes(
        self, grid: MeteredGrid, round_log: RoundLog | None, timeout: float | None
    ) -> None:
        """Wait for the nodes, and learn their names where they are needed beforehand."""
        needed = max(map(self.nodes_needed, (TRAIN, EVALUATE)), key=lambda need: need.nodes)
        nodes = self._connected(grid, needed, self.wait_for_nodes)
        self._nodes.settle(grid)
        # Names are needed beforehand to tell nodes apart, and to recognise replies that were
        # kept. Otherwise they come with the replies, and one-round methods stay at one round.
        named = round_log and round_log.files.has_named_replies()
        if self.needs_names() or named or self._nodes.awaits_leavers:
            self._ask_names(grid, nodes, timeout)


def _logged(record: RoundRecord) -> dict[str, object]:
    metrics = record.server_metrics or record.evaluate_metrics or record.train_metrics
    fields: dict[str, object] = {
        "round": record.round,
        "asked": len(record.nodes_asked),
        "answered": len(record.nodes_answered),
        "bytes_up": record.traffic.bytes_up,
        "bytes_down": record.traffic.bytes_down,
        "seconds": record.seconds,
    }
    return without_clashes(fields, single_numbers(metrics))


def _evaluate(evaluate_fn: EvaluateFn | None, server_round: int, arrays: Arrays) -> Metrics:
    metrics = evaluate_fn(server_round, to_record(arrays)) if evaluate_fn else None
    return {} if metrics is None else metrics


def _told(**metrics: Metrics) -> dict[str, Any]:
    """Return metrics as a record keeps them: plain, with a word on records that are empty."""
    empty = (name for name, each in metrics.items() if isinstance(each, MetricRecord) and not each)
    return {**{name: dict(each) for name, each in metrics.items()}, "empty_metrics": tuple(empty)}


def _asked_to_stop(should_stop: ShouldStop | None, state: ServerState) -> str | None:
    if should_stop is None or not state.round:
        return None
    reason = f"should_stop said so after round {state.round}"
    return reason if should_stop(state.round, state.result(reason)) else None
