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
"""

from __future__ import annotations

import dataclasses
import secrets
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from gems_flwr.averaging.means import with_floats_of
from gems_flwr.averaging.synchronisation import Coordinator, Synchronisation
from gems_flwr.errors import OptionError
from gems_flwr.server.learner_state import Ledger, Tally
from gems_flwr.server.model_averaging import AveragesModels, Outvoted
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import Arrays
from gems_flwr.wire.averaging_replies import (
    AveragingReply,
    ask_for_averaging,
    unpack_averaging_reply,
)
from gems_flwr.wire.keys import TRAIN
from gems_flwr.wire.records import to_record
from gems_flwr.wire.requests import AveragingRequest

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
        self._last_round = 0
        self.run_name = ""

    # --- what a protocol decides ----------------------------------------------------------------

    @property
    @abstractmethod
    def period(self) -> int:
        """How many rounds apart messages are, at least 1."""

    @abstractmethod
    def request(
        self, server_round: int, nodes: Sequence[str], ledger: Ledger
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return, for nodes that train, what is asked of their models: `send`, `delta`, …."""

    @abstractmethod
    def synchronise(
        self, server_round: int, ledger: Ledger, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Average what is to be averaged; `ask` gets further models."""

    def adapted(self, ledger: Ledger, before: Tally, after: Tally) -> Ledger:
        """Return the ledger for the next check; a protocol may change its threshold here."""
        return ledger

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
        ledger = Ledger.from_memory(state.memory)
        memory = state.memory if ledger is None else ledger.renamed(names).to_memory()
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
        turn = Turn(self, server_round, state, grid, train_config)
        turn.train()
        if server_round % self.period == 0:
            turn.synchronise()
        if is_last:
            self.close(turn)
        return turn.outcome()

    def close(self, turn: Turn) -> None:
        """End the last round."""
        if self.final_sync:
            turn.synchronise_all()
            turn.deliver()

    def weight(self, reply: AveragingReply) -> float:
        """Return a node's weight in means."""
        return reply.num_examples if self.weighted else 1.0


class Turn:
    """One round of a `LocalLearners` protocol: ledger, tally and model as they change."""

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
        self.ledger = Ledger.from_memory(state.memory) or Ledger(
            strategy.run_name, Coordinator(state.arrays)
        )
        nodes = strategy.choose_nodes(server_round, grid, 1.0, TRAIN)
        self.ids = {strategy._nodes.name(node): node for node in nodes}
        self.replies: Replies = {}
        self._records: dict[int, ArrayRecord] = {}

    # --- the steps of a round -------------------------------------------------------------------

    def train(self) -> None:
        """Let all connected nodes train, deliver what is pending, and collect their reports."""
        names = list(self.ids)
        self.ledger = self.ledger.restart([n for n in names if n not in self.ledger.known])
        steps = self.server_round - self.ledger.round
        wanted = self.strategy.request(self.server_round, names, self.ledger)
        requests = {name: {"steps": steps, **wanted[name]} for name in names}
        replies = self._exchange(requests, at_least=self.strategy.min_nodes)
        names = list(self.ids)
        lost = [name for name, reply in replies.items() if reply.needs_model]
        if lost:
            events = tuple((self.server_round, name) for name in lost)
            self.tally = dataclasses.replace(
                self.tally, lost_states=(*self.tally.lost_states, *events)
            )
            self.ledger = self.ledger.restart(lost)
            wanted = self.strategy.request(self.server_round, lost, self.ledger)
            requests = {name: {"steps": steps, **wanted[name]} for name in lost}
            replies |= self._exchange(requests, step="again")
        self.replies = {
            name: replies[name]
            for name in names
            if name in replies and not replies[name].needs_model
        }
        self.ledger = dataclasses.replace(self.ledger, round=self.server_round)
        self.tally = self.tally.with_losses({n: r.metrics for n, r in self.replies.items()})

    def synchronise(self) -> None:
        """Let the protocol decide."""
        checked = [r for r in self.replies.values() if r.squared_distance is not None]
        self.tally = self.tally.plus(violations=sum(r.arrays is not None for r in checked))
        self._settle(
            self.strategy.synchronise(self.server_round, self.ledger, self.replies, self.ask)
        )
        self.ledger = self.strategy.adapted(self.ledger, self.before, self.tally)

    def synchronise_all(self) -> None:
        """Average the models of all nodes that take part in this round."""
        models = self.all_models()
        if not models:
            return
        weights = [self.strategy.weight(self.replies[name]) for name in models]
        coordinator = self.ledger.coordinator
        rule = self.strategy.rule
        self._settle(Synchronisation.of_models(rule, coordinator, models, weights, full=True))

    def all_models(self) -> dict[str, Arrays]:
        """Return the models that the nodes have now, averages that are under way included."""
        pending = {
            name: self.ledger.models[self.ledger.pending[name]]
            for name in self.replies
            if name in self.ledger.pending
        }
        rest = [name for name in self.replies if name not in pending]
        sent = {n: a for n in rest if (a := self.replies[n].arrays) is not None}
        asked = self.ask([name for name in rest if name not in sent])
        models = {**pending, **sent, **asked}
        return {name: models[name] for name in self.replies if name in models}

    def deliver(self) -> None:
        """Send what is pending now, instead of with the next message."""
        waiting = [name for name in self.replies if name in self.ledger.pending]
        self._exchange({name: {"steps": 0} for name in waiting}, step="delivery")

    def ask(self, names: Collection[str]) -> Mapping[str, Arrays]:
        """Ask nodes for their models as they are."""
        if not names:
            return {}
        self.tally = self.tally.plus(queries=len(names))
        request = {"steps": 0, "send": "always"}
        step = f"query-{self.tally.queries}"
        replies = self._exchange(dict.fromkeys(names, request), step=step)
        return {n: r.arrays for n, r in replies.items() if r.arrays is not None}

    def outcome(self) -> RoundOutcome:
        """Return what the round has changed."""
        tally, before = self.tally, self.before
        batches = tally.batches - before.batches
        metrics: dict[str, float] = {
            "models_up": tally.models_up - before.models_up,
            "models_down": tally.models_down - before.models_down,
            "synchronised": sum(n for r, n in tally.synchronisations if r == self.server_round),
        }
        if batches:
            metrics |= {
                "cumulative_loss": tally.cumulative_loss,
                "in_place_loss": (tally.cumulative_loss - before.cumulative_loss) / batches,
                "in_place_accuracy": (tally.correct - before.correct) / batches,
            }
        if self.ledger.delta:
            metrics["delta"] = self.ledger.delta
        return RoundOutcome(
            arrays=self.arrays,
            train_metrics=metrics,
            memory=self.ledger.to_memory(),
            details=tally.to_details() | self.outvoted.to_details(self.strategy.rule),
        )

    # --- messages -------------------------------------------------------------------------------

    def _settle(self, synchronisation: Synchronisation) -> None:
        self.ledger = self.ledger.after(synchronisation)
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
        strategy, ledger = self.strategy, self.ledger
        messages = strategy.messages(
            self.server_round,
            [self.ids[name] for name in requests],
            TRAIN,
            None,
            self.config,
            step=step,
        )
        sent = 0
        for name, message in zip(requests, messages, strict=True):
            model = self._record(ledger.pending[name]) if name in ledger.pending else None
            reference = None
            if ledger.lacks_reference(name):
                reference = self._record(ledger.reference_version)
            sent += (model is not None) + (reference is not None)
            request = AveragingRequest(
                run=ledger.run,
                model=ledger.model_version(name),
                reference=ledger.reference_version,
                adopt=ledger.adopts(name),
                ignore=tuple(strategy.buffers),
                **requests[name],
            )
            ask_for_averaging(message.content, request, model, reference)
        self.tally = self.tally.plus(models_down=sent)
        collected = strategy.collect(messages)
        wanted = next(iter(requests.values()))
        unpack = partial(
            unpack_averaging_reply,
            expected=ledger.reference,
            measured=bool(wanted.get("measure")) or wanted.get("send") == "violated",
            must_send=bool(step.startswith("query")),
        )
        answers = strategy.accept(collected, unpack, at_least=at_least)
        if not step:
            ledger = self._learn_names(ledger)
        # Once a round is under way a node goes by the name that it has, whatever it tells now.
        names = {strategy._nodes.name(node): name for name, node in self.ids.items()}
        replies = {names[answer.node]: answer.value for answer in answers}
        there = [name for name, reply in replies.items() if not reply.needs_model]
        self.ledger = ledger.acknowledge(there)
        # Whoever answered what cannot be used begins anew; whoever did not answer need not.
        spoke = {
            names[strategy._nodes.name(m.metadata.src_node_id)]
            for m in collected
            if m.has_content()
        }
        strangers = spoke - set(replies)
        self.ledger = self.ledger.forget(strangers)
        # And it is out of this round, whatever it had reported before.
        self.replies = {n: r for n, r in self.replies.items() if n not in strangers}
        models = sum(reply.arrays is not None for reply in replies.values())
        self.tally = self.tally.plus(models_up=models)
        return replies

    def _learn_names(self, ledger: Ledger) -> Ledger:
        """Go by the names that replies have told, where a node had been known by its id only."""
        now = {name: self.strategy._nodes.name(node) for name, node in self.ids.items()}
        self.ids = {now[name]: node for name, node in self.ids.items()}
        return ledger.renamed({old: new for old, new in now.items() if old != new})

    def _record(self, version: int) -> ArrayRecord:
        if version not in self._records:
            ledger = self.ledger
            is_reference = version == ledger.reference_version
            model = ledger.reference if is_reference else ledger.models[version]
            self._records[version] = to_record(model)
        return self._records[version]
