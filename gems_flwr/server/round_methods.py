"""One round of a strategy: what it decides, Flower's four methods, and the tools to play it with.

Which nodes are asked, what messages they get, whose replies count: that is common to all
strategies. What is made of the replies is a strategy's own business. The loop over the rounds, and
everything that outlives a round, is in `gems_flwr.server.loop`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from gems_flwr import scoring
from gems_flwr.averaging.means import mean_metrics
from gems_flwr.errors import (
    BadReplyError,
    Failure,
    MissingModError,
    OptionError,
    RoundFailedError,
)
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.exchange import Answer, Exchange
from gems_flwr.server.log import log_event, log_text, log_warning, short
from gems_flwr.server.model_links import ModelLinks
from gems_flwr.server.model_totals import model_total
from gems_flwr.server.nodes import Nodes, wait_for_nodes
from gems_flwr.server.run_summary import settings_lines
from gems_flwr.server.secure_summing import SecureSums
from gems_flwr.server.settings import LoopSettings, Need
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.server.summing import PlainSums, Summing
from gems_flwr.server.withdrawing import Forgotten, not_forgotten, who_answered
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import EVALUATE, TRAIN
from gems_flwr.wire.model_replies import (
    USUAL_KEYS,
    MetricsReply,
    ModelReply,
    RecordKeys,
    pack_instruction,
    unpack_metrics_reply,
    unpack_model_reply,
)
from gems_flwr.wire.model_summands import ModelSummand
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import JsonRequest

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class RoundMethods(LoopSettings, Strategy):
    """What `RoundLoop` plays its rounds with; see the module's docstring.

    Parameters
    ----------
    **settings
        See `LoopSettings`.
    """

    # Strategies that are done after a fixed number of rounds say so here.
    rounds_needed: ClassVar[int | None] = None
    # Whether rounds are nothing but Flower's four methods, so that another strategy, such as
    # Flower's wrappers for differential privacy, may call them in a loop of its own.
    plays_in_other_loops: ClassVar[bool] = False
    # What an app's ClientApp(mods=[…]) must have for a strategy; nothing where any handler will do.
    mod_needed: ClassVar[str] = ""
    # Whether it makes no sense where numbers are predicted.
    needs_classes: ClassVar[bool] = False
    # Whether all that a strategy makes of its nodes' replies is made of sums, as `secure` demands.
    sums_replies: ClassVar[bool] = False
    # Whether there are models to publish in the middle of a round (`publish_every`).
    publishes: ClassVar[bool] = False
    # Whether nodes are sent models and send theirs, which may be packed (`compress`), and whether a
    # strategy does that by itself.
    sends_models: ClassVar[bool] = True
    packs_models: ClassVar[bool] = False
    # How many sums there are in a round; nodes exchange keys once for all of them.
    sums_in_round: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secure is not None and not self.sums_replies:
            raise OptionError(
                f"{self._name} looks at the replies of single nodes, which secure sums hide: they "
                "go with Gems, FedAvg, OneShotAverage, PeriodicAveraging and DynamicAveraging"
            )
        if self.publish_every and not self.publishes:
            raise OptionError(
                f"{self._name} has one model a round, publish_every goes with Gems: leave it out"
            )
        if self.compress != "float32" and not self.sends_models:
            raise OptionError(
                f"{self._name} sends other things than models, compress={self.compress!r} would "
                "change nothing: leave it out"
            )
        self._sums: Summing = PlainSums()
        if self.secure is not None:
            self._sums = SecureSums(self.secure, self.sums_in_round)
        self._nodes = Nodes()
        self._exchange = Exchange(0, self._nodes)
        self._template: Arrays | None = None
        self._is_playing = False
        self._links: ModelLinks | None = None
        # What nodes said last of the examples that they trained on, by id.
        self._examples: dict[int, int] = {}
        # Ids of those who have left, with a receipt.
        self._left: tuple[int, ...] = ()

    # --- what a strategy decides --------------------------------------------------------------

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Make the new global arrays out of the nodes' models, which come ordered by name.

        A strategy overrides this, or `play_round` if its nodes do not send models.
        """
        raise NotImplementedError(f"{self._name} aggregates no models, it plays its own rounds")

    def score(
        self, members: Sequence[NDArray], labels: NDArray, one: scoring.Score = scoring.score
    ) -> dict[str, float]:
        """Score what this strategy's arrays predict.

        Parameters
        ----------
        members : sequence of ndarray of shape (samples, classes)
            Class probabilities of each model in the arrays; most strategies have one. Where
            numbers are predicted, one for each sample.
        labels : ndarray
            True classes, or numbers.
        one : callable
            Scores the predictions of one model; that of classes by default.
        """
        return one(members[0], labels)

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play one round: train and aggregate. The loop lets nodes evaluate what comes of it."""
        messages = self.configure_train(server_round, to_record(state.arrays), train_config, grid)
        arrays, train_metrics = self.aggregate_train(server_round, self._replies(messages))
        return RoundOutcome(
            arrays=state.arrays if arrays is None else to_numpy(arrays),
            train_metrics={} if train_metrics is None else train_metrics,
        )

    def _replies(self, messages: Iterable[Message]) -> list[Message]:
        outgoing = list(messages)
        return self.collect(outgoing) if outgoing else []

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Look at what a run begins with; by default there is no need to."""

    def check_evaluation(self, initial: Arrays, evaluate_fn: EvaluateFn) -> None:
        """Try the server's own evaluation before the first round; by default there is no need to.

        Parameters
        ----------
        initial : mapping from str to ndarray
            The initial model.
        evaluate_fn : callable
            What was given to `start`.
        """

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

    def sample_size(self, connected: int, fraction: float, purpose: str) -> int:
        """Return how many of the connected nodes are asked to train, or to evaluate."""
        # The tiny term keeps 0.29 * 100 from counting as 28.
        return max(self.min_nodes, int(fraction * connected + 1e-9))

    def forget_nodes(self, state: ServerState, names: Sequence[str]) -> Forgotten:
        """Forget what nodes that have left have sent, as far as a strategy can.

        Parameters
        ----------
        state : ServerState
            Before the round in which they left.
        names : sequence of str
            Who left.
        """
        return not_forgotten(state, self._exchange, names)

    def contributors(self, state: ServerState) -> dict[str, int | None]:
        """Return whose contributions are in the model after the round, and their samples."""
        return who_answered(state, self._exchange)

    def told_examples(self) -> dict[str, int | None]:
        """Return how many examples nodes said that they have, as far as this process heard it."""
        return {self._nodes.name(node): count for node, count in self._examples.items()}

    def rounds_in_all(self, state: ServerState, rounds: int) -> int:
        """Return how many rounds there are, where what happened in a run can change that."""
        return rounds

    def nodes_needed(self, purpose: str) -> Need:
        """Return how many nodes must be connected for that, and which option says so."""
        return Need(self.min_nodes, "min_nodes")

    def merge_metrics(
        self, answers: Sequence[Answer[ModelReply] | Answer[MetricsReply]], purpose: str
    ) -> MetricRecord:
        """Return what is told of the nodes' metrics: of those that all have, the weighted mean."""
        replies = [answer.value for answer in answers]
        means = mean_metrics([r.metrics for r in replies], [r.num_examples for r in replies])
        return MetricRecord(dict(means))

    @property
    def record_keys(self) -> RecordKeys:
        """What the records in messages are called."""
        return USUAL_KEYS

    def needs_names(self) -> bool:
        """Whether messages depend on which node is which, or an account is kept by name.

        Who is chosen by the seed does not: that goes by what the grid tells; see `Nodes`.
        """
        # Who has which model matters from the second round on.
        return self.compress != "float32" and self.rounds_needed != 1

    # --- Flower's four methods ----------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one train message for each chosen node."""
        if not self._is_playing:
            self._join_another_loop(server_round)
        self._template = to_numpy(arrays)
        nodes = self.choose_nodes(server_round, grid, self.fraction_train, TRAIN)
        return self.messages(server_round, nodes, TRAIN, arrays, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate the replies, leave out the bad ones, aggregate the rest."""
        answers = self.accept(replies, self._unpack_model, at_least=self.min_nodes)
        return to_record(self.aggregate(answers)), self.merge_metrics(answers, TRAIN)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one evaluate message for each chosen node; none if evaluation is off."""
        if self.fraction_evaluate == 0:
            return []
        nodes = self.choose_nodes(server_round, grid, self.fraction_evaluate, EVALUATE)
        return self.messages(server_round, nodes, EVALUATE, arrays, config)

    def evaluate_metrics(
        self, server_round: int, messages: Sequence[Message]
    ) -> MetricRecord | None:
        """Send evaluate messages, and return what is told of the answers."""
        if self.secure is None or not messages:
            return self.aggregate_evaluate(server_round, self._replies(messages))
        request = ModelSummand(origin="nothing", weight_key=self.record_keys.weight)
        try:
            total = model_total(self, server_round, messages, {}, request, step="evaluate")
        except RoundFailedError as error:
            # The model is there; what is missing is the nodes' word on it.
            log_warning("not_evaluated", round=server_round, reason=str(error))
            return None
        return MetricRecord(dict(total.metrics))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of the nodes' metrics; None where no node gave any."""
        replies = list(replies)
        if not replies:
            return None
        unpack = partial(unpack_metrics_reply, weight_key=self.record_keys.weight)
        answers = self.accept(replies, unpack)
        return self.merge_metrics(answers, EVALUATE) if answers else None

    def summary(self) -> None:
        """Log the strategy's settings, for people and for programs."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shared = {field.name: field.default for field in dataclasses.fields(LoopSettings)}
        log_text(*settings_lines(settings, shared))
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
        connected = self._connected(grid, self.nodes_needed(purpose))
        self._nodes.meet(grid, connected)
        if self.needs_names() and self._exchange.grid is not None:
            # Who has joined since the run began has not been asked yet.
            self._ask_names(self._exchange.grid, connected, self._exchange.timeout)
        count = self.sample_size(len(connected), fraction, purpose)
        if count == len(connected):
            return sorted(connected, key=self._nodes.position)
        available = sorted(connected, key=self._nodes.place)
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
        group = f"{server_round}-{step}" if step else str(server_round)
        if self._exchange.replays:
            # About another model than before: what was answered then is no answer now.
            group += f"-again{self._exchange.replays}"
        return [
            Message(
                content=pack_instruction(
                    arrays, config, server_round=server_round, seed=self.seed, keys=self.record_keys
                ),
                dst_node_id=node,
                message_type=message_type,
                group_id=group,
            )
            for node in nodes
        ]

    def mods_needed(self) -> str:
        """Return what a ClientApp must have among its mods; nothing where any handler will do."""
        needed = ["secure_sum_mod()"] if self.secure is not None else []
        if self.compress != "float32" and not self.mod_needed:
            needed.append("compression_mod()")
        return ", ".join([*needed, *([self.mod_needed] if self.mod_needed else [])])

    def without_mod(self, said: Mapping[str, str]) -> MissingModError:
        """Return the refusal of nodes whose app cannot answer; `said` is what they answered."""
        first, *others = said
        nodes = f"node {first} and {len(others)} more have" if others else f"node {first} has"
        return MissingModError(
            f"write ClientApp(mods=[{self.mods_needed()}]): {nodes} no mod that answers "
            f"{self._name} ({short(said[first])})"
        )

    def join(self, other: RoundMethods) -> None:
        """Take part in the round that another strategy is playing, as a part of it."""
        self._nodes, self._exchange = other._nodes, other._exchange
        self._is_playing = other._is_playing

    def collect(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages and return the replies of the round under way; see `Exchange`.

        With `compress` models are packed on the way, in both directions.
        """
        outgoing = self._exchange.unbarred(messages)
        return self.send(outgoing) if self._links is None else self._links.collect(self, outgoing)

    def send(self, messages: Sequence[Message]) -> list[Message]:
        """Send messages as they are, and return the replies as they come."""
        return self._exchange.collect(messages)

    def refuse(self, node_id: int, reason: str) -> None:
        """Leave a node out of the round under way, whose reply cannot be used."""
        self._exchange.refuse(node_id, reason)

    def accept(
        self, replies: Iterable[Message], unpack: Callable[[RecordDict], T], *, at_least: int = 0
    ) -> list[Answer[T]]:
        """Validate and order replies; see `Exchange`."""
        return self._exchange.accept(replies, unpack, at_least=at_least)

    def leave_out(
        self, answers: Iterable[Answer[T]], reasons: Mapping[str, str]
    ) -> list[Answer[T]]:
        """Return the answers but those of some nodes; see `Exchange`."""
        return self._exchange.without(answers, reasons) if reasons else list(answers)

    def name_of(self, node_id: int) -> str:
        """Return what the run calls a node."""
        return self._nodes.name(node_id)

    @property
    def sums(self) -> Summing:
        """What adds up replies that are only looked at as a total."""
        return self._sums

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Who has not contributed to the round under way, and why."""
        return self._exchange.failures

    @property
    def answered_ids(self) -> tuple[int, ...]:
        """Ids of the nodes that have given a usable reply in the round under way."""
        return self._exchange.answered_ids

    def _unpack_model(self, content: RecordDict) -> ModelReply:
        if self._template is None:
            # Nobody said what the model looks like (the method was called by itself): as in
            # Flower, the first reply sets the pattern for the others.
            records = list(content.array_records.values())
            try:
                self._template = to_numpy(records[0])
            except Exception as error:
                raise BadReplyError(f"no readable model in the reply: {error}") from error
        return unpack_model_reply(content, self._template, self.record_keys.weight)

    def _join_another_loop(self, server_round: int) -> None:
        """Begin a round that another strategy plays by calling Flower's four methods."""
        if not self.plays_in_other_loops:
            raise OptionError(
                f"start {type(self).__name__} by itself, or use FedAvg here: it plays rounds of "
                "its own, and another strategy's loop (Flower's wrappers for differential "
                "privacy have one) would make something else of them"
            )
        if self.compress != "float32":
            raise OptionError(
                f"start {type(self).__name__} by itself: another strategy's loop sends messages of "
                f"its own, which compress={self.compress!r} cannot pack"
            )
        self._exchange = Exchange(server_round, self._nodes, max_examples=self.max_examples)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _ask_names(self, grid: MeteredGrid, nodes: list[int], timeout: float | None) -> None:
        """Ask for names; where too few nodes could go on without a mod, say so now."""
        unable = self._nodes.ask_names(grid, nodes, timeout)
        if self.needs_names() and unable and len(nodes) - len(unable) < self.min_nodes:
            raise self.without_mod({self._nodes.name(node): said for node, said in unable.items()})

    def _connected(self, grid: Grid, needed: Need, wanted: int | None = None) -> list[int]:
        return wait_for_nodes(
            grid,
            wanted=max(wanted or 0, needed.nodes),
            at_least=needed.nodes,
            seconds=self.wait_seconds,
            option=needed.option,
            counts=lambda node: not self._nodes.has_left(node),
        )
