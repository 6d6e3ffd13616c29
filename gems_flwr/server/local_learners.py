"""Local learners: what all protocols share whose models live on the nodes (Kamp et al. 2018).

A node goes on training its own model from round to round; the server decides when models are
averaged. `PeriodicAveraging`, `DynamicAveraging` and `NoSync` differ in that decision alone:
which models a train message asks for (`request`), and what is made of those that came
(`synchronise`).

Decided here:

- A round is one call of the node's train handler, the paper's t. Messages go out only in rounds
  in which something can happen, every `period` rounds, and tell the node to train that often.
- Averages travel with the next message to the nodes that gave their models.
- A node that fails is out of the round; its state is what it was. One that has lost its state says
  so and begins anew from the reference, in the same round. One that sends what cannot be used
  (NaN, say) begins anew in the next.
- With `final_sync` the last round ends in a full synchronisation, whose average is the result and
  is delivered. Without it the result is the last average that there was.
- With `compress` models travel as differences to the reference, which all nodes have, in both
  directions. Nodes and server go on with the average as it was rounded; what rounding takes is
  added to later messages, on either side. The initial model is rounded to half precision, what that
  takes is added to the first average, and whoever lacks the reference gets models whole.
- What the nodes' own handlers report (a ``train_loss``) is averaged as in Flower and stands beside
  the protocol's metrics; one that is called like one of those gets the prefix ``client/``.
"""

from __future__ import annotations

import dataclasses
import secrets
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from gems_flwr.averaging.byte_budget import ByteLedger, Sent
from gems_flwr.averaging.means import with_floats_of
from gems_flwr.averaging.synchronisation import Coordinator, Synchronisation
from gems_flwr.compression.average_coding import left_by_halving
from gems_flwr.compression.difference_coding import encode_whole, halved
from gems_flwr.errors import OptionError, RoundFailedError
from gems_flwr.server.client_metrics import beside, mean_reports
from gems_flwr.server.learner_state import LearnerState, Tally
from gems_flwr.server.learner_sums import summed_answers
from gems_flwr.server.log import log_warning
from gems_flwr.server.model_averaging import AveragesModels, Outvoted
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import ask_for_averaging
from gems_flwr.wire.averaging_replies import (
    AveragingReply,
    unpack_averaging_reply,
)
from gems_flwr.wire.keys import ARRAYS, BATCHES, CORRECT_SHARE_SUM, LOSS_SUM, TRAIN
from gems_flwr.wire.packed_records import pack_bytes
from gems_flwr.wire.records import payload_bytes, to_record
from gems_flwr.wire.requests import AveragingRequest

# Metrics of ours in a round's record; a handler's of the same name gets a prefix.
_OURS = (
    *("models_up", "models_down", "synchronised", "delta"),
    *("cumulative_loss", "in_place_loss", "in_place_accuracy"),
)
# What handlers report for the `Tally`, which adds it up instead of averaging it.
_SUMMED = (LOSS_SUM, CORRECT_SHARE_SUM, BATCHES)

Replies = dict[str, AveragingReply]
# Gets the names of nodes, returns the models of those that could be reached.
AskForModels = Callable[[Collection[str]], Mapping[str, Arrays]]


@dataclass(kw_only=True, eq=False)
class LocalLearners(AveragesModels):
    """Base of the protocols for models that live on the nodes.

    Parameters
    ----------
    weighted : bool, default False
        Whether a node counts by its samples of the round (Algorithm 2), or all the same.
    final_sync : bool, default True
        Whether the last round ends in a full synchronisation.
    buffers : sequence of str
        Names of floating-point arrays that are no parameters, such as the running means of a batch
        norm: averaged with the model, kept out of distances. Integer arrays are left alone.
    **averaging
        See `AveragesModels`. All connected nodes train; `fraction_train` must stay 1.
    """

    mod_needed: ClassVar[str] = "dynamic_averaging_mod()"
    packs_models: ClassVar[bool] = True

    weighted: bool = False
    final_sync: bool = True
    buffers: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction_train != 1:
            raise OptionError(
                f"fraction_train must be 1, since all nodes go on learning, "
                f"got {self.fraction_train}"
            )
        if self.period < 1:
            raise OptionError(
                f"the number of rounds between checks must be >= 1, got {self.period}"
            )
        if self.secure is not None and self.weighted:
            raise OptionError("weighted must be false with secure sums: each node counts the same")
        self._last_round = 0
        self.run_name = ""

    # --- what a protocol decides ----------------------------------------------------------------

    @property
    @abstractmethod
    def period(self) -> int:
        """How many rounds apart messages are, at least 1."""

    @abstractmethod
    def request(
        self, server_round: int, nodes: Sequence[str], learners: LearnerState
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return, for nodes that train, what is asked of their models: `send`, `delta`, …."""

    @abstractmethod
    def synchronise(
        self, server_round: int, learners: LearnerState, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Average what is to be averaged; `ask` gets further models."""

    def adapted(
        self, learners: LearnerState, before: Tally, after: Tally, replies: Replies
    ) -> LearnerState:
        """Return the state for the next check; a protocol may change its threshold here."""
        return learners

    @property
    def keeps_ledger(self) -> bool:
        """Whether the protocol goes by what the run has cost."""
        return False

    def told(self, learners: LearnerState) -> Mapping[str, Any]:
        """Return what a protocol has to say of its own in a run's details."""
        return {}

    # --- the loop -------------------------------------------------------------------------------

    def needs_names(self) -> bool:
        """The server keeps account of who has which model."""
        return True

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Note which round is the last, and give the run a name."""
        self._last_round = num_rounds
        # What nodes keep from another run does not count; a round played again is the same run.
        self.run_name = secrets.token_hex(4)

    def rename_nodes(self, state: ServerState, names: Mapping[str, str]) -> ServerState:
        """Let nodes keep their models and their losses under new names."""
        learners = LearnerState.from_memory(state.memory)
        memory = state.memory if learners is None else learners.renamed(names).to_memory()
        tally = Tally.from_details(state.details).renamed(names)
        details = {**state.details, **tally.to_details()}
        return dataclasses.replace(state, memory=memory, details=details)

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Let the nodes train, and average models where that is due."""
        is_last = server_round == self._last_round
        if server_round % self.period and not is_last:
            return RoundOutcome(arrays=state.arrays, memory=state.memory, details=state.details)
        current = LearnerRound(self, server_round, state, grid, train_config)
        current.train()
        if server_round % self.period == 0:
            current.synchronise()
        if is_last:
            self.close(current)
        return current.outcome()

    def close(self, current: LearnerRound) -> None:
        """End the last round."""
        if self.final_sync:
            current.synchronise_all()
            current.deliver()

    def weight(self, reply: AveragingReply) -> float:
        """Return a node's weight in means."""
        return reply.num_examples if self.weighted else 1.0


class LearnerRound:
    """One round of a `LocalLearners` protocol: state, tally and model as they change."""

    def __init__(
        self,
        strategy: LocalLearners,
        server_round: int,
        state: ServerState,
        grid: Grid,
        config: ConfigRecord,
    ) -> None:
        self.strategy = strategy
        self.server_round = server_round
        self.config = config
        self.arrays = state.arrays
        self.before = self.tally = Tally.from_details(state.details)
        self.outvoted = Outvoted.from_details(state.details)
        self.learners = LearnerState.from_memory(state.memory) or self._first_state()
        nodes = strategy.choose_nodes(server_round, grid, 1.0, TRAIN)
        self.ids = {strategy._nodes.name(node): node for node in nodes}
        self.replies: Replies = {}
        if strategy.keeps_ledger:
            self._open_ledger(state)
        self._records: dict[int, ArrayRecord | ConfigRecord] = {}

    def _first_state(self) -> LearnerState:
        run = self.strategy.run_name
        if self.strategy.compress == "float32":
            return LearnerState(run, Coordinator(self.arrays))
        left_over = left_by_halving(self.arrays)
        return LearnerState(run, Coordinator(halved(self.arrays)), left_over=left_over)

    # --- the steps of a round -------------------------------------------------------------------

    def train(self) -> None:
        """Let all connected nodes train, deliver what is pending, and collect their reports."""
        names = list(self.ids)
        self.learners = self.learners.restart([n for n in names if n not in self.learners.known])
        steps = self.server_round - self.learners.round
        wanted = self.strategy.request(self.server_round, names, self.learners)
        requests = {name: {"steps": steps, **wanted[name]} for name in names}
        replies = self._exchange(requests, at_least=self.strategy.min_nodes)
        names = list(self.ids)
        lost = [name for name, reply in replies.items() if reply.needs_model]
        if lost:
            events = tuple((self.server_round, name) for name in lost)
            self.tally = dataclasses.replace(
                self.tally, lost_states=(*self.tally.lost_states, *events)
            )
            self.learners = self.learners.restart(lost)
        if lost and self.strategy.secure is None:  # a few are no sum: they begin in the next round
            wanted = self.strategy.request(self.server_round, lost, self.learners)
            requests = {name: {"steps": steps, **wanted[name]} for name in lost}
            replies |= self._exchange(requests, step="again")
        self.replies = {
            name: replies[name]
            for name in names
            if name in replies and not replies[name].needs_model
        }
        self.learners = dataclasses.replace(self.learners, round=self.server_round)
        self.tally = self.tally.with_losses({n: r.metrics for n, r in self.replies.items()})

    def synchronise(self) -> None:
        """Let the protocol decide."""
        checked = [r for r in self.replies.values() if r.squared_distance is not None]
        self.tally = self.tally.plus(violations=sum(r.arrays is not None for r in checked))
        self._settle(
            self.strategy.synchronise(self.server_round, self.learners, self.replies, self.ask)
        )
        self.learners = self.strategy.adapted(self.learners, self.before, self.tally, self.replies)

    def synchronise_all(self) -> None:
        """Average the models of all nodes that take part in this round."""
        models = self.all_models()
        if not models:
            return
        weights = [self.strategy.weight(self.replies[name]) for name in models]
        coordinator = self.learners.coordinator
        rule = self.strategy.rule
        self._settle(Synchronisation.of_models(rule, coordinator, models, weights, full=True))

    def all_models(self) -> dict[str, Arrays]:
        """Return the models that the nodes have now, averages that are under way included."""
        pending = {
            name: self.learners.models[self.learners.pending[name]]
            for name in self.replies
            if name in self.learners.pending
        }
        rest = [name for name in self.replies if name not in pending]
        sent = {n: a for n in rest if (a := self.replies[n].arrays) is not None}
        asked = self.ask([name for name in rest if name not in sent])
        models = {**pending, **sent, **asked}
        return {name: models[name] for name in self.replies if name in models}

    def deliver(self) -> None:
        """Send what is pending now, instead of with the next message."""
        waiting = [name for name in self.replies if name in self.learners.pending]
        self._exchange({name: {"steps": 0} for name in waiting}, step="delivery")

    def ask(self, names: Collection[str]) -> Mapping[str, Arrays]:
        """Ask nodes for their models as they are."""
        if not names:
            return {}
        self.tally = self.tally.plus(queries=len(names))
        request = {"steps": 0, "send": "always"}
        step = f"query-{self.tally.queries}"
        try:
            replies = self._exchange(dict.fromkeys(names, request), step=step)
        except RoundFailedError as error:
            # Too few for a secure sum: nothing is opened, and the models stay as they are.
            log_warning("no_models", round=self.server_round, reason=str(error))
            return {}
        return {n: r.arrays for n, r in replies.items() if r.arrays is not None}

    def outcome(self) -> RoundOutcome:
        """Return what the round has changed."""
        tally, before = self.tally, self.before
        metrics: dict[str, float] = {
            "models_up": tally.models_up - before.models_up,
            "models_down": tally.models_down - before.models_down,
            "synchronised": sum(n for r, n in tally.synchronisations if r == self.server_round),
        }
        if tally.batches > before.batches:
            metrics |= tally.in_place(before)
        if self.learners.delta:
            metrics["delta"] = self.learners.delta
        reported = mean_reports(self.replies.values(), without=_SUMMED)
        return RoundOutcome(
            arrays=self.arrays,
            train_metrics=beside(metrics, reported, _OURS),
            memory=self.learners.to_memory(),
            details={
                **tally.to_details(),
                **self.outvoted.to_details(self.strategy.rule),
                **self.strategy.told(self.learners),
            },
        )

    # --- messages -------------------------------------------------------------------------------

    def _settle(self, synchronisation: Synchronisation) -> None:
        form = self.strategy.compress
        if form != "float32":
            weights = {name: self.strategy.weight(reply) for name, reply in self.replies.items()}
            self.learners, synchronisation = self.learners.packed(synchronisation, form, weights)
        self.learners = self.learners.after(synchronisation)
        self.tally = self.tally.with_synchronisation(self.server_round, synchronisation)
        if synchronisation.average is not None:
            self.arrays = with_floats_of(self.arrays, synchronisation.average)
            self.outvoted = self.outvoted.after(
                self.server_round,
                self.strategy.rule,
                applied=synchronisation.applied,
                left_out=synchronisation.left_out,
                checked=synchronisation.checked,
            )

    def _exchange(
        self, requests: Mapping[str, Mapping[str, Any]], *, step: str = "", at_least: int = 0
    ) -> Replies:
        """Send requests with what each node has yet to be given; return the usable replies."""
        if not requests:
            return {}
        strategy, learners = self.strategy, self.learners
        messages = strategy.messages(
            self.server_round,
            [self.ids[name] for name in requests],
            TRAIN,
            None,
            self.config,
            step=step,
        )
        sent: list[ArrayRecord | ConfigRecord] = []
        for name, message in zip(requests, messages, strict=True):
            parcel = learners.parcel(name)
            model: ArrayRecord | ConfigRecord | None = None
            if parcel is not None:
                model = pack_bytes(parcel.packed)
            elif name in learners.pending:
                model = self._record(learners.pending[name])
            reference = None
            if learners.lacks_reference(name):
                reference = self._record(learners.reference_version)
            sent += [record for record in (model, reference) if record is not None]
            request = AveragingRequest(
                run=learners.run,
                model=learners.model_version(name),
                reference=learners.reference_version,
                adopt=learners.adopts(name),
                ignore=tuple(strategy.buffers),
                compress=strategy.compress,
                base=0 if parcel is None else parcel.base,
                **requests[name],
            )
            ask_for_averaging(message.content, request, model, reference)
        self.tally = self.tally.plus(models_down=len(sent))
        before = self._counted()
        wanted = next(iter(requests.values()))
        if strategy.secure is not None:
            answers, collected = summed_answers(
                strategy,
                self.server_round,
                messages,
                learners.reference if wanted.get("send") == "always" else None,
                at_least=at_least,
                step=step or "train",
            )
        else:
            collected = strategy.collect(messages)
            if learners.ledger is not None:
                came = [m.content[ARRAYS] for m in collected if _has_model(m)]
                ledger = learners.ledger.after(
                    self._counted() - before, _sent(came), _sent(sent), is_check=not step
                )
                learners = dataclasses.replace(learners, ledger=ledger)
            unpack = partial(
                unpack_averaging_reply,
                expected=learners.reference,
                measured=bool(wanted.get("measure")) or wanted.get("send") == "violated",
                must_send=bool(step.startswith("query")),
                compress=strategy.compress,
            )
            answers = strategy.accept(collected, unpack, at_least=at_least)
        if not step:
            learners = self._learn_names(learners)
        # Once a round is under way a node goes by the name that it has, whatever it tells now.
        names = {strategy._nodes.name(node): name for name, node in self.ids.items()}
        replies = {names[answer.node]: answer.value for answer in answers}
        there = [name for name, reply in replies.items() if not reply.needs_model]
        self.learners = learners.acknowledge(there)
        # Whoever answered what cannot be used begins anew; whoever did not answer need not.
        spoke = {
            names[strategy._nodes.name(m.metadata.src_node_id)]
            for m in collected
            if m.has_content()
        }
        newcomers = spoke - set(replies)
        self.learners = self.learners.forget(newcomers)
        # And it is out of this round, whatever it had reported before.
        self.replies = {n: r for n, r in self.replies.items() if n not in newcomers}
        models = sum(reply.arrays is not None for reply in replies.values())
        self.tally = self.tally.plus(models_up=models)
        return replies

    def _open_ledger(self, state: ServerState) -> None:
        """Bring the ledger up to what has been counted before this round's first message."""
        ledger = self.learners.ledger or ByteLedger(
            spent_bytes=sum(record.traffic.total_bytes for record in state.history)
        )
        asked_names = self._counted() - self.strategy._exchange.began.total_bytes
        self.learners = dataclasses.replace(self.learners, ledger=ledger.plus(asked_names))

    def _counted(self) -> int:
        grid = self.strategy._exchange.grid
        return 0 if grid is None else grid.total.total_bytes

    def _learn_names(self, learners: LearnerState) -> LearnerState:
        """Go by the names that replies have told, where a node had been known by its id only."""
        now = {name: self.strategy._nodes.name(node) for name, node in self.ids.items()}
        self.ids = {now[name]: node for name, node in self.ids.items()}
        return learners.renamed({old: new for old, new in now.items() if old != new})

    def _record(self, version: int) -> ArrayRecord | ConfigRecord:
        """Return a whole model as it travels, made once for all nodes that get it."""
        if version not in self._records:
            learners = self.learners
            is_reference = version == learners.reference_version
            model = learners.reference if is_reference else learners.models[version]
            plain = self.strategy.compress == "float32"
            self._records[version] = to_record(model) if plain else pack_bytes(encode_whole(model))
        return self._records[version]


def _has_model(reply: Message) -> bool:
    return reply.has_content() and isinstance(reply.content.get(ARRAYS), ArrayRecord | ConfigRecord)


def _sent(records: Sequence[Any]) -> Sent:
    size_bytes = sum(payload_bytes(RecordDict({ARRAYS: record})) for record in records)
    return Sent(len(records), size_bytes)
