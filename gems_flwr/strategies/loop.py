"""The round loop under every strategy of this library.

It has the signature and the four methods of Flower's ``Strategy.start``, and solves once what that
leaves open: waiting for nodes, choosing them, the order of sums, checkpoints, hooks. A strategy
overrides `aggregate`; a protocol with exchanges of its own overrides `play_round`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from gems_flwr.averaging import mean_metrics
from gems_flwr.carriers import MeteredGrid
from gems_flwr.core.flower import log_strategy_start_info
from gems_flwr.core.folder import RoundLog, owned_folder
from gems_flwr.core.log import (
    is_heard,
    log_event,
    log_text,
    log_warning,
    short,
)
from gems_flwr.core.nodes import Nodes
from gems_flwr.core.records import (
    EVALUATE,
    TRAIN,
    USUAL_KEYS,
    MetricsReply,
    ModelReply,
    RecordKeys,
    is_without_mod,
    single_numbers,
    to_numpy,
    to_record,
    unpack_metrics_reply,
    unpack_model_reply,
)
from gems_flwr.core.round import Carrier, Round
from gems_flwr.core.run import (
    Callback,
    RoundOutcome,
    RoundRecord,
    RunResult,
    ServerState,
    Tolerance,
)
from gems_flwr.core.sums import PlainSums
from gems_flwr.errors import (
    BadReplyError,
    GemsError,
    MissingModError,
    OptionError,
    RoundFailedError,
    describe_fault,
)
from gems_flwr.secure.secure_sum import SecureSum
from gems_flwr.typing import Arrays, Metrics

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
# Gets a finished round and the result so far; true, or the reason, to stop.
StopRule = Callable[[int, RunResult], bool | str | None]

# All nodes, and all pairs of up to ten; a broken round is not played more often than that.
_MOST_TRIALS = 64


_CARRIER = "carrier/"  # what carriers keep in a checkpoint, beside the strategy's own memory


@dataclass(kw_only=True, eq=False)
class RoundLoop(Strategy):
    """Base of all strategies here; see the module's docstring.

    Parameters
    ----------
    min_nodes : int, default 2
        Fewest nodes to go on with, at least 1: connected before a round, and with usable
        replies after it.
    fraction_train : float, default 1.0
        Share of the connected nodes that train in a round, in [0, 1]; never fewer than
        `min_nodes`.
    seed : int, default 0
        Source of all random choices.
    checkpoint_dir : path, optional
        Where to keep the state of the run, each reply as it comes in, and `rounds.jsonl`.
    secure : SecureSum, optional
        Lets the server see sums over nodes only, never what a single one sends.
    tolerance : Tolerance
        Waiting for nodes, and limits on replies.
    callbacks : sequence of Callback
        Notified of everything.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import RoundLoop
    >>> class Largest(RoundLoop):
    ...     def aggregate(self, replies):
    ...         models = [reply.arrays for reply in replies.values()]
    ...         return {name: np.max([m[name] for m in models], axis=0) for name in models[0]}
    """

    # How many rounds a strategy takes, where that is fixed.
    rounds_needed: ClassVar[int | None] = None
    # Whether another strategy, such as Flower's wrappers for differential privacy, may call
    # Flower's four methods in a loop of its own.
    plays_in_other_loops: ClassVar[bool] = False
    # What an app's ClientApp(mods=[…]) must have; empty where any handler will do.
    mod_needed: ClassVar[str] = ""
    # Whether all that a strategy makes of replies is made of sums, as `secure` demands.
    sums_replies: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False  # whether it makes no sense where numbers are predicted
    # An option of strategies that let nodes evaluate each new model. Not annotated: a field of a
    # dataclass would keep this place in the order of options.
    fraction_evaluate = 0.0
    # How many sums there are in a round; nodes exchange keys once for all of them.
    sums_in_round: ClassVar[int] = 2

    min_nodes: int = 2
    fraction_train: float = 1.0
    seed: int = 0
    checkpoint_dir: str | Path | None = None
    secure: SecureSum | None = None
    tolerance: Tolerance = dataclasses.field(default_factory=Tolerance)
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        for name in ("fraction_train", "fraction_evaluate"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        wait_for = self.tolerance.wait_for_nodes
        if self.min_nodes < 1:
            raise OptionError(f"min_nodes must be at least 1, got {self.min_nodes}")
        if wait_for is not None and wait_for < self.min_nodes:
            raise OptionError(
                f"wait_for_nodes ({wait_for}) must not be below min_nodes ({self.min_nodes})"
            )
        if self.seed < 0:
            raise OptionError(f"seed must be at least 0, got {self.seed}")
        if self.secure is not None and not self.sums_replies:
            raise OptionError(
                f"{self._name} looks at the replies of single nodes, which secure sums hide: they "
                "go with Gems, PrivateGems, FedAvg and OneShotAverage"
            )
        self._nodes = Nodes()
        self._round: Round | None = None
        self._template: Arrays | None = None
        self._carriers: Sequence[Carrier] = ()
        self._sums = PlainSums()

    # --- what a strategy decides --------------------------------------------------------------

    def aggregate(self, replies: Mapping[str, ModelReply]) -> Arrays:
        """Return the new global arrays, from the nodes' models by name, in the order of names."""
        raise NotImplementedError(f"{self._name} aggregates no models, it plays its own rounds")

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Play one round: train and aggregate. The loop lets nodes evaluate the result."""
        grid: Any = round.grid
        messages = self.configure_train(round.number, to_record(state.arrays), round.config, grid)
        arrays, metrics = self.aggregate_train(round.number, round.send(list(messages)))
        return RoundOutcome(
            arrays=state.arrays if arrays is None else to_numpy(arrays),
            train_metrics={} if metrics is None else metrics,
        )

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Look at what a run starts with; by default there is no need to."""

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return why to stop after the rounds so far, or None to go on."""
        return None

    def needs_names(self) -> bool:
        """Whether messages depend on which node is which, or an account is kept by name."""
        return any(carrier.needs_names for carrier in self.carriers()) and self.rounds_needed != 1

    def carriers(self) -> Sequence[Carrier]:
        """Return new carriers of messages for a run, the outermost first."""
        return ()

    def sample_size(self, connected: int, fraction: float, purpose: str) -> int:
        """Return how many of the connected nodes are asked to train, or to evaluate."""
        # The tiny term keeps 0.29 * 100 from counting as 28.
        return max(self.min_nodes, int(fraction * connected + 1e-9))

    def nodes_needed(self, purpose: str) -> tuple[int, str]:
        """Return how many nodes must be connected for that, and which option says so."""
        return self.min_nodes, "min_nodes"

    @property
    def record_keys(self) -> RecordKeys:
        """What the records in messages are called."""
        return USUAL_KEYS

    def merge_metrics(
        self, replies: Mapping[str, ModelReply] | Mapping[str, MetricsReply], purpose: str
    ) -> MetricRecord:
        """Return the weighted mean of those metrics that all nodes report."""
        each: list[Any] = list(replies.values())
        means = mean_metrics([r.metrics for r in each], [r.num_examples for r in each])
        return MetricRecord(dict(means))

    # --- Flower's four methods ----------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one train message for each chosen node."""
        round = self._current(server_round)
        self._template = to_numpy(arrays)
        names = self._chosen(round, grid, self.fraction_train, TRAIN)
        return round.messages(map(round.id_of, names), arrays, TRAIN, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, leave out the bad ones, aggregate the rest."""
        round = self._current(server_round)
        usable = round.accept(replies, self._read_model, at_least=self.min_nodes)
        return to_record(self.aggregate(usable)), self.merge_metrics(usable, TRAIN)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one evaluate message for each chosen node; none if evaluation is off."""
        if self.fraction_evaluate == 0:
            return []
        round = self._current(server_round)
        names = self._chosen(round, grid, self.fraction_evaluate, EVALUATE)
        return round.messages(map(round.id_of, names), arrays, EVALUATE, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of the nodes' metrics; None where no node gave any."""
        replies = list(replies)
        if not replies:
            return None
        weight_key = self.record_keys.weight
        usable = self._current(server_round).accept(
            replies, lambda _, content: unpack_metrics_reply(content, weight_key)
        )
        return self.merge_metrics(usable, EVALUATE) if usable else None

    def summary(self) -> None:
        """Log the strategy's settings: those that are words, numbers or groups of such."""
        settings = self._settings()
        kinds = (str, int, float, Path)
        fine = {k: v for k, v in settings.items() if isinstance(v, kinds) or is_dataclass(v)}
        log_event("settings", **fine)

    # --- the run ------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: StopRule | Sequence[StopRule] | None = None,
        *,
        resume: bool = False,
    ) -> RunResult:
        """Run the strategy; the signature is that of Flower's ``Strategy.start``, and `resume`.

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
        should_stop : callable or sequence of callables, optional
            Gets the round and the result so far, after each round; true, or a reason, ends the
            run. `TargetReached` is such a rule.
        resume : bool, default False
            Whether to go on from `checkpoint_dir`. If there is nothing yet, the run starts.

        Returns
        -------
        RunResult
            The final arrays, the metrics by round as in Flower, and the history.

        Raises
        ------
        NotEnoughNodesError, RoundFailedError
            If fewer than `min_nodes` nodes are connected, or give a usable reply.
        CheckpointError, FolderInUseError
            If `checkpoint_dir` is of another run, in use, or its disk takes no more.
        """
        if resume and self.checkpoint_dir is None:
            raise OptionError("resume needs a checkpoint_dir")
        rules = [] if should_stop is None else should_stop
        rules = [rules] if callable(rules) else list(rules)
        # One record for all rounds, as in Flower: what `configure_train` changes in it stays.
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        with self._held_folder():
            metered: Any = MeteredGrid.around(grid)
            began = time.perf_counter()
            initial = to_numpy(initial_arrays)
            # Node ids of another run mean nothing in this one.
            self._nodes = Nodes()
            self._carriers, self._sums = self.carriers(), self._new_sums()
            for carrier in self._carriers:
                carrier.check_model(initial)
            self.prepare(initial, num_rounds)
            rounds = num_rounds if self.rounds_needed is None else self.rounds_needed
            round_log = self._open_round_log(initial)

            def first_state() -> ServerState:
                scored = _recorded(server_metrics=_evaluate(evaluate_fn, 0, initial))
                return ServerState(initial, (RoundRecord(0, **scored),))

            state = round_log.open(first_state, resume=resume) if round_log else first_state()
            self._log_start(state, rounds, train_config, evaluate_config)
            counted = metered.total

            def fresh(number: int, **more: Any) -> Round:
                return Round(
                    number,
                    self._nodes,
                    metered,
                    config=train_config,
                    timeout=timeout,
                    # Masked numbers are of no use to a resumed run: its nodes have new keys.
                    inbox=round_log.files if round_log and self.secure is None else None,
                    callbacks=self.callbacks,
                    carriers=self._carriers,
                    sums=self._sums,
                    needs_names=self.needs_names(),
                    **self._shared(),
                    **more,
                )

            if state.round < rounds:
                self._meet_nodes(fresh(0), round_log)

            stopped_because = self._reason_to_stop(state, rules)
            while state.round < rounds and not stopped_because:
                number, started = state.round + 1, time.perf_counter()
                log_text("", f"[ROUND {number}/{rounds}]")

                def play(barred: Mapping[int, str], now: ServerState = state) -> RoundOutcome:
                    round = fresh(now.round + 1, model=now.arrays, barred=barred)
                    return self._played(round, now, evaluate_config)

                outcome = self._despite_replies(play)
                assert self._round is not None
                record = RoundRecord(
                    round=number,
                    seconds=time.perf_counter() - started,
                    nodes_asked=self._round.asked,
                    nodes_answered=self._round.answered,
                    failures=self._round.failures,
                    exchanges=("name",) * self._nodes.take_questions() + self._round.kinds,
                    traffic=metered.total - counted,
                    **_recorded(
                        train_metrics=outcome.train_metrics,
                        evaluate_metrics=outcome.evaluate_metrics,
                        server_metrics=_evaluate(evaluate_fn, number, outcome.arrays),
                    ),
                )
                counted = metered.total
                state = state.after(record, outcome)
                if round_log:
                    round_log.save(state)
                log_event("round_end", **_logged(record))
                for callback in self.callbacks:
                    callback.on_round_end(record)
                stopped_because = self._reason_to_stop(state, rules)

            self._round = None
            result = state.result(stopped_because or "all rounds are done")
            self._log_end(result, time.perf_counter() - began)
            for callback in self.callbacks:
                callback.on_end(result)
            return result

    @contextlib.contextmanager
    def _held_folder(self) -> Iterator[None]:
        """Hold the `checkpoint_dir`, if there is one, and notify the callbacks of an error.

        A display must give the terminal back, and a tracker close its run, however it ends.
        """
        folder = self.checkpoint_dir
        with contextlib.nullcontext() if folder is None else owned_folder(folder):
            try:
                yield
            except BaseException as error:
                for callback in self.callbacks:
                    # The error that counts is the run's own.
                    with contextlib.suppress(Exception):
                        callback.on_error(error)
                raise

    def _played(self, round: Round, state: ServerState, config: ConfigRecord) -> RoundOutcome:
        """Play one round, and let the nodes evaluate what comes of it."""
        self._round = round
        own, carried = _split(state.memory)
        for carrier in self._carriers:
            carrier.recall(carried)
        try:
            outcome = self.play_round(round, dataclasses.replace(state, memory=own))
            for carrier in self._carriers:
                carrier.settle(round)
            outcome = self._evaluated(round, outcome, config)
        except RoundFailedError as error:
            reasons = {failure.node: failure.reason for failure in error.failures}
            none_usable = self.mods_needed() and not error.replies
            if none_usable and reasons and all(map(is_without_mod, reasons.values())):
                raise self._without_mod(reasons) from error
            raise
        return dataclasses.replace(outcome, memory=_joined(outcome.memory, self._carriers))

    def _despite_replies(self, play: Callable[[Mapping[int, str]], RoundOutcome]) -> RoundOutcome:
        """Play a round; if it fails for no known reason, without those who make it fail.

        Limits are meant to keep out whatever cannot be used together with others
        (`gems_flwr.bounds`). If a round fails all the same, its replies lie on disk, and a resumed
        run would fail again. So it is played again without one node after the other, then without
        any two. Errors of ours, and those that come whoever is left out, are raised as they are.
        """
        try:
            return play({})
        except (GemsError, OSError, MemoryError):
            raise
        except Exception as error:
            first = self._round
            if first is None or first.inbox is None:
                raise  # to play it again all nodes would have to train again
            fault, answered = describe_fault(error), first.answered_ids
            log_warning("round_broke", reason=fault, suspects=len(answered))
            trials = itertools.chain(*(itertools.combinations(answered, size) for size in (1, 2)))
            for barred in itertools.islice(trials, _MOST_TRIALS):
                reason = f"the round can be played without this reply, and with it fails: {fault}"
                try:
                    # Who was refused before stays out: asked again, it might answer otherwise.
                    outcome = play({**first.refused, **dict.fromkeys(barred, reason)})
                except Exception:  # not these, then, or not these alone
                    continue
                for node in barred:
                    log_warning("left_out", node=first.nodes.name(node), reason=reason)
                return outcome
            raise

    def _evaluated(self, round: Round, outcome: RoundOutcome, config: ConfigRecord) -> RoundOutcome:
        """Let the nodes' own handlers evaluate the model of a round, if that was asked for."""
        methods = ("configure_evaluate", "aggregate_evaluate")
        if self.fraction_evaluate == 0 and all(
            getattr(type(self), name) is getattr(RoundLoop, name) for name in methods
        ):
            return outcome  # a subclass with methods of its own is called, as in Flower
        grid: Any = round.grid
        messages = self.configure_evaluate(round.number, to_record(outcome.arrays), config, grid)
        metrics = self.evaluate_metrics(round, list(messages))
        return (
            outcome if metrics is None else dataclasses.replace(outcome, evaluate_metrics=metrics)
        )

    def evaluate_metrics(self, round: Round, messages: Sequence[Message]) -> MetricRecord | None:
        """Send evaluate messages, and return what is made of the answers."""
        return self.aggregate_evaluate(round.number, round.send(messages) if messages else [])

    # --- helpers ------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _current(self, server_round: int) -> Round:
        """Return the round under way, or that of another strategy that calls Flower's methods."""
        if self._round is not None and self._round.grid is not None:
            return self._round
        name = type(self).__name__
        if not self.plays_in_other_loops:
            raise OptionError(
                f"start {name} by itself, or use FedAvg here: it plays rounds of its own, "
                "and another strategy's loop (Flower's wrappers for differential privacy have "
                "one) would make something else of them"
            )
        if any(carrier.needs_names for carrier in self.carriers()) or self.secure is not None:
            raise OptionError(
                f"start {name} by itself: another strategy's loop sends messages of its "
                "own, which are neither packed (compress) nor masked (secure)"
            )
        if self._round is None or self._round.number != server_round:
            self._round = Round(server_round, self._nodes, **self._shared())
        return self._round

    def _shared(self) -> dict[str, Any]:
        """Return the options that rounds have in this strategy's loop and in others'."""
        shared = {name: getattr(self, name) for name in ("seed", "min_nodes", "tolerance")}
        return {**shared, "keys": self.record_keys}

    def _chosen(self, round: Round, grid: Any, fraction: float, purpose: str) -> list[str]:
        """Return the names of the nodes that are to train, or to evaluate."""
        if round.grid is None:  # of another strategy's loop
            metered: Any = MeteredGrid.around(grid)
            round = dataclasses.replace(round, grid=metered)
        return round.sample(
            purpose=purpose,
            size=lambda connected: self.sample_size(connected, fraction, purpose),
            needed=self.nodes_needed(purpose),
        )

    def _read_model(self, node_id: int, content: RecordDict) -> ModelReply:
        if self._template is None:
            # The method was called by itself: as in Flower, the first reply sets the pattern.
            records = list(content.array_records.values())
            try:
                self._template = to_numpy(records[0])
            except Exception as error:
                raise BadReplyError(f"no readable model in the reply: {error}") from error
        return unpack_model_reply(content, self._template, self.record_keys.weight)

    def mods_needed(self) -> str:
        """Return what a ClientApp must have among its mods; nothing where any handler will do."""
        plain = self.secure is None and not any(c.needs_mod for c in self._carriers)
        return self.mod_needed or ("" if plain else "good_enough_mod()")

    def _without_mod(self, reasons: Mapping[str, str]) -> MissingModError:
        """Return the refusal of nodes whose app cannot answer; `reasons` is what they answered."""
        first, *others = reasons
        nodes = f"node {first} and {len(others)} more have" if others else f"node {first} has"
        return MissingModError(
            f"write ClientApp(mods=[{self.mods_needed()}]): {nodes} no mod that answers "
            f"{self._name} ({short(reasons[first])})"
        )

    def _new_sums(self) -> PlainSums:
        if self.secure is None:
            return PlainSums()
        from gems_flwr.carriers import MaskedSums

        return MaskedSums(self.secure, self.sums_in_round)

    def _open_round_log(self, initial: Arrays) -> RoundLog | None:
        if (folder := self.checkpoint_dir) is None:
            return None
        log_event("checkpoints", folder=Path(folder).resolve())
        names = [carrier.name for carrier in self._carriers if carrier.name]
        return RoundLog(folder, strategy=self._name, seed=self.seed, model=initial, carriers=names)

    def _reason_to_stop(self, state: ServerState, rules: Sequence[StopRule]) -> str | None:
        default = f"should_stop ended the run after round {state.round}"
        for rule in rules if state.round else ():
            if found := rule(state.round, state.result(default)):
                return found if isinstance(found, str) else default
        return self.reason_to_stop(state)

    def _meet_nodes(self, round: Round, round_log: RoundLog | None) -> None:
        """Wait for the nodes, and learn their names where they are needed beforehand."""
        needed = max(map(self.nodes_needed, (TRAIN, EVALUATE)))
        nodes = round.connected(*needed, wanted=self.tolerance.wait_for_nodes)
        grid: Any = round.grid
        self._nodes.meet(grid, nodes)
        # Names are needed beforehand to tell nodes apart, and to recognise replies that were
        # kept. Otherwise they come with the replies, and one-round methods stay at one round.
        named = round_log and round_log.files.has_named_replies()
        if self.needs_names() or named:
            unable = self._nodes.ask_names(grid, nodes, round.timeout)
            if self.needs_names() and unable and len(nodes) - len(unable) < self.min_nodes:
                raise self._without_mod({self._nodes.name(n): why for n, why in unable.items()})

    def _settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _log_start(self, state: ServerState, rounds: int, *configs: ConfigRecord | None) -> None:
        log_event("start", strategy=self._name, rounds=rounds, done=state.round)
        log_text(f"Starting {self._name} strategy:")
        if is_heard():
            log_strategy_start_info(rounds, to_record(state.arrays), *configs)
        self.summary()
        settings = self._settings()
        for callback in self.callbacks:
            callback.on_setup(settings, state.history)
            callback.on_start(self._name, rounds, state.round)

    def _log_end(self, result: RunResult, seconds: float) -> None:
        sizes = {name: getattr(result.traffic, name) for name in ("bytes_up", "bytes_down")}
        reason = {"because": result.stopped_because, **sizes, "failures": len(result.failures)}
        log_event("end", strategy=self._name, rounds=result.history[-1].round, **reason)
        if is_heard():
            finished = f"Strategy execution finished in {seconds:.2f}s"
            log_text("", finished, "", "Final results:", "")
            log_text(*(f"\t{line}" for line in str(result).splitlines()), "")


def _split(memory: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {key: value for key, value in memory.items() if not key.startswith(_CARRIER)}
    carried = {k.removeprefix(_CARRIER): v for k, v in memory.items() if k.startswith(_CARRIER)}
    return own, carried


def _joined(own: Arrays, carriers: Sequence[Carrier]) -> dict[str, Any]:
    kept = {key: value for carrier in carriers for key, value in carrier.to_memory().items()}
    return {**own, **{f"{_CARRIER}{key}": value for key, value in kept.items()}}


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
    # Metrics, which nodes name, may not pass for fields.
    taken = {"event", *fields}
    named = single_numbers(metrics).items()
    return {**fields, **{f"metric.{k}" if k in taken else k: v for k, v in named}}


def _evaluate(evaluate_fn: EvaluateFn | None, server_round: int, arrays: Arrays) -> Metrics:
    metrics = evaluate_fn(server_round, to_record(arrays)) if evaluate_fn else None
    return {} if metrics is None else metrics


def _recorded(**metrics: Metrics) -> dict[str, Any]:
    """Return metrics as a record keeps them: plain, with a note of records that are empty."""
    empty = (name for name, each in metrics.items() if isinstance(each, MetricRecord) and not each)
    return {**{name: dict(each) for name, each in metrics.items()}, "empty_metrics": tuple(empty)}
