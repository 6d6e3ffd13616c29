"""Local learners: what all protocols share whose models live on the nodes (Kamp et al. 2018).

A node goes on training its own model from round to round; the server decides when models are
averaged. Protocols differ in that decision alone: which models are asked for together with the
reports (`request`), and what is made of those that came (`synchronise`).

- A round is one call of the train handler, the paper's t. Messages go out every `period` rounds and
  ask the node to train that often. Averages travel with the next message.
- A node that fails is out of the round. One that has lost its state restarts from the reference, in
  the same round; one that sends what cannot be used (NaN, say), in the next.
- Integer arrays (counters of a batch norm) stay each node's own. Running means and variances are
  averaged with the model and kept out of distances.
- With `compress` models travel as differences to the reference; what rounding takes is added to
  later messages, on either side. Whoever lacks the reference gets models whole.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr import compression
from gems_flwr.averaging import Coordinator, Synchronisation, with_floats_of
from gems_flwr.carriers import pack_bytes
from gems_flwr.core.question import Question
from gems_flwr.core.records import ARRAYS, to_record
from gems_flwr.core.round import Carrier, Round
from gems_flwr.core.run import RoundOutcome, ServerState
from gems_flwr.errors import CheckpointError, OptionError
from gems_flwr.strategies.averaging import (
    AveragesModels,
    Outvoted,
    beside,
    checkpoint_faults,
    mean_reports,
)
from gems_flwr.strategies.learner_questions import (
    BATCHES,
    CORRECT_SHARE_SUM,
    LOSS_SUM,
    REFERENCE,
    Learn,
    LearnerQuestion,
    LearnerReply,
    SendModel,
    TakeModel,
)
from gems_flwr.strategies.members import join_models, split_models
from gems_flwr.typing import Arrays

_NOTES = "ledger"
_PARTS = ("codes", "scales", "exact")
# Numbers of the model and the reference of a node of which nothing is known.
_NOTHING = (-1, -1)
# Metrics of ours in a round's record; a handler's of the same name gets a prefix.
_OURS = ("cumulative_loss", "in_place_loss", "in_place_accuracy")
# What handlers report for the `Tally`, which adds it up instead of averaging it.
_SUMMED = (LOSS_SUM, CORRECT_SHARE_SUM, BATCHES)

Replies = dict[str, LearnerReply]
# Gets the names of nodes, returns the models of those that could be reached.
AskForModels = Callable[[Collection[str]], Mapping[str, Arrays]]


# --- what is kept of models and of a run, from round to round ---------------------------------


@dataclass(frozen=True)
class Parcel:
    """A model as a difference to the reference that it was made with, by that one's number."""

    base: int
    packed: compression.PackedModel


@dataclass
class LearnerState:
    """Who has which model, by numbers; the reference has that of its full synchronisation."""

    # Tells this run's messages from another's.
    run: str
    coordinator: Coordinator
    compress: compression.Form = "float32"
    # Up to which round the nodes have trained; the highest number given out; the reference's.
    round: int = 0
    version: int = 0
    reference_version: int = 0
    # By node: numbers of the model and of the reference that it has acknowledged.
    known: dict[str, tuple[int, int]] = field(default_factory=dict)
    # By node: number of the model that it has yet to be given; by number, these models, and those
    # of them that travel as differences.
    pending: dict[str, int] = field(default_factory=dict)
    models: dict[int, Arrays] = field(default_factory=dict)
    parcels: dict[int, Parcel] = field(default_factory=dict)
    # What rounding has taken from averages so far, for each node.
    left_over: Arrays = field(default_factory=dict)

    @classmethod
    def first(cls, run: str, model: Arrays, form: compression.Form) -> LearnerState:
        """Return the state before the first round."""
        if form == "float32":
            return cls(run, Coordinator(model))
        return cls(
            run,
            Coordinator(compression.halved(model)),
            form,
            left_over=compression.left_by_halving(model),
        )

    @property
    def reference(self) -> Arrays:
        """The reference model."""
        return self.coordinator.reference

    def restart(self, nodes: Collection[str]) -> None:
        """Let nodes start from the reference: newcomers, and those that lost their state."""
        if nodes:
            self.forget(nodes)
            self._hand_out(self.reference, nodes)

    def acknowledge(self, nodes: Collection[str]) -> None:
        """Note that nodes have what they were sent."""
        numbers = {
            node: self.pending.get(node, self.known.get(node, _NOTHING)[0]) for node in nodes
        }
        versions = {node: (number, self.reference_version) for node, number in numbers.items()}
        self.forget(nodes)
        self.known |= versions

    def forget(self, nodes: Collection[str]) -> None:
        """Treat nodes as newly joined: their models are not to be trusted."""
        for node in nodes:
            self.known.pop(node, None)
            self.pending.pop(node, None)
        self._prune()

    def settle(
        self, synchronisation: Synchronisation, weights: Mapping[str, float]
    ) -> Synchronisation:
        """Note an average for those who gave their models; return what they will make of it.

        `weights` are those of the nodes that take part in the round, by name.
        """
        if synchronisation.average is not None and self.compress != "float32":
            synchronisation = self._rounded(synchronisation, weights)
        if (average := synchronisation.average) is not None:
            full, reference = synchronisation.full, synchronisation.coordinator.reference
            self._hand_out(reference if full else average, synchronisation.receivers)
            self.reference_version = self.version if full else self.reference_version
        self.coordinator = synchronisation.coordinator
        self._prune()
        return synchronisation

    def _rounded(
        self, synchronisation: Synchronisation, weights: Mapping[str, float]
    ) -> Synchronisation:
        """Round an average; note how it travels, and what is left of it."""
        receivers, average = synchronisation.receivers, synchronisation.average
        assert average is not None
        under_way = self.parcels.get(self.reference_version)
        pending = {self.pending.get(name) for name in receivers}
        if synchronisation.full and under_way and pending == {self.reference_version}:
            # All were averaged in this very round: the mean of what they will get is just that.
            self.parcels[self.version + 1] = under_way
            return synchronisation.with_average(self.reference)
        if synchronisation.full:
            # With the reference's own integer arrays: those of a node are its own business.
            average = with_floats_of(self.reference, average)
        got, total = sum(weights.get(name, 0.0) for name in receivers), sum(weights.values())
        share = got / total if 0 < got < total else 1.0
        encoded = compression.encode_average(
            average, self.reference, self.compress, self.left_over, share
        )
        self.parcels[self.version + 1] = Parcel(self.reference_version, encoded.packed)
        self.left_over = encoded.left_over
        return synchronisation.with_average(encoded.decoded)

    def _hand_out(self, model: Arrays, nodes: Collection[str]) -> None:
        self.version += 1
        self.models[self.version] = model
        self.pending |= dict.fromkeys(nodes, self.version)

    def _prune(self) -> None:
        wanted = set(self.pending.values())
        self.models = {number: each for number, each in self.models.items() if number in wanted}
        self.parcels = {number: each for number, each in self.parcels.items() if number in wanted}

    def to_memory(self) -> dict[str, NDArray]:
        """Return the state as arrays, for a checkpoint."""
        names = ("run", "compress", "round", "version", "reference_version", "known", "pending")
        notes = {name: getattr(self, name) for name in names}
        notes["violations"] = self.coordinator.violations
        notes["references"] = [n for n, model in self.models.items() if model is self.reference]
        notes["bases"] = {number: parcel.base for number, parcel in self.parcels.items()}
        groups = {"reference": self.reference, "left": self.left_over}
        for number, model in self.models.items():
            if model is not self.reference:
                groups[f"model-{number}"] = model
        for number, parcel in self.parcels.items():
            # The layout of a difference is empty.
            parts = {part: getattr(parcel.packed, part) for part in _PARTS}
            groups[f"parcel-{number}"] = {k: np.frombuffer(p, np.uint8) for k, p in parts.items()}
        text = np.frombuffer(json.dumps(notes).encode(), np.uint8)
        return {_NOTES: text, **join_models(groups)}

    @classmethod
    def from_memory(
        cls, memory: Arrays, form: compression.Form | None = None
    ) -> LearnerState | None:
        """Return what `to_memory` wrote, None where there is nothing; a CheckpointError if it is
        of a run with another `form`, or cannot be read.
        """
        if _NOTES not in memory:
            return None
        groups = split_models({key: array for key, array in memory.items() if key != _NOTES})
        with checkpoint_faults("the learners' state"):
            reference = groups["reference"]
            models = {int(k[6:]): each for k, each in groups.items() if k.startswith("model-")}
            notes = json.loads(memory[_NOTES].tobytes())
            parcels = {}
            for number, base in notes.pop("bases").items():
                codes, scales, exact = (groups[f"parcel-{number}"][k].tobytes() for k in _PARTS)
                parcels[int(number)] = Parcel(base, compression.PackedModel(codes, scales, exact))
            notes["known"] = {node: tuple(pair) for node, pair in notes["known"].items()}
            state = cls(
                coordinator=Coordinator(reference, notes.pop("violations")),
                models=models | dict.fromkeys(notes.pop("references"), reference),
                parcels=parcels,
                left_over=groups.get("left", {}),
                **notes,
            )
        if form not in (None, state.compress):
            raise CheckpointError(
                f"the checkpoint is of a run with compress={state.compress}, this run has {form}"
            )
        return state


@dataclass
class Tally:
    """What has happened so far; goes into the run's details under these names."""

    # Prequential loss (before each update; the paper's in-place loss), summed over nodes and
    # batches; a batch counts its mean. How many batches that sum has, and shares of right answers,
    # summed likewise: None, and not among the details, where numbers are predicted.
    cumulative_loss: float = 0.0
    batches: float = 0
    correct: float | None = 0.0
    # Models sent by nodes, and to nodes (a reference that is sent beside a model counts).
    models_up: int = 0
    models_down: int = 0
    # Messages that asked a node for its model; local conditions that were violated.
    queries: int = 0
    violations: int = 0
    # Rounds in which models were averaged, and how many; those in which all were.
    synchronisations: tuple[tuple[int, int], ...] = ()
    full_synchronisations: tuple[int, ...] = ()
    # `cumulative_loss` of each node.
    node_loss: dict[str, float] = field(default_factory=dict)
    # Rounds, and nodes that had lost their model then and started from the reference.
    lost_states: tuple[tuple[int, str], ...] = ()

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Tally:
        """Return the tally that a run's details hold."""
        names = {each.name for each in dataclasses.fields(cls)}
        values = {key: value for key, value in details.items() if key in names}
        with checkpoint_faults("the details"):
            for key in ("synchronisations", "lost_states"):
                values[key] = tuple(map(tuple, values.get(key, ())))
            values["full_synchronisations"] = tuple(values.get("full_synchronisations", ()))
            values["node_loss"] = dict(values.get("node_loss", {}))
        if values.get("batches"):
            values.setdefault("correct", None)
        return cls(**values)

    def to_details(self) -> dict[str, Any]:
        """Return the tally as JSON can hold it."""
        values = {**vars(self), "node_loss": dict(self.node_loss)}
        return {k: v for k, v in values.items() if k != "correct" or v is not None}

    def add_losses(self, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Add what the nodes reported of their training, by node."""
        for node, values in metrics.items():
            if LOSS_SUM not in values:
                continue
            self.node_loss[node] = self.node_loss.get(node, 0.0) + values[LOSS_SUM]
            self.cumulative_loss += values[LOSS_SUM]
            self.batches += values.get(BATCHES, 1)
            right = values.get(CORRECT_SHARE_SUM)
            if self.correct is not None:
                self.correct = None if right is None else self.correct + right

    def in_place(self, before: Tally) -> dict[str, float]:
        """Return the means since an earlier tally, of at least one batch, as metrics."""
        batches = self.batches - before.batches or 1
        means = {
            "cumulative_loss": self.cumulative_loss,
            "in_place_loss": (self.cumulative_loss - before.cumulative_loss) / batches,
        }
        if self.correct is not None and before.correct is not None:
            means["in_place_accuracy"] = (self.correct - before.correct) / batches
        return means

    def add_synchronisation(self, server_round: int, synchronisation: Synchronisation) -> None:
        """Add an averaging of models."""
        if synchronisation.average is not None:
            self.synchronisations += ((server_round, len(synchronisation.receivers)),)
            self.full_synchronisations += (server_round,) * synchronisation.full


# --- the protocols ----------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class LocalLearners(AveragesModels):
    """Base of the protocols for models that live on the nodes.

    Parameters
    ----------
    weighted : bool, default False
        Whether a node counts by its samples of the round (Algorithm 2), or all the same.
    final_sync : bool, default True
        Whether the last round ends in a full synchronisation.
    **averaging
        See `AveragesModels`; all connected nodes train.
    """

    mod_needed: ClassVar[str] = "good_enough_mod()"
    # All nodes go on learning: no option here.
    fraction_train: ClassVar[float] = 1.0  # type: ignore[misc]
    # Each model is one of a node.
    sums_replies: ClassVar[bool] = False

    weighted: bool = False
    final_sync: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise OptionError(
                f"the number of rounds between checks must be >= 1, got {self.period}"
            )
        self._last_round = 0
        self._run_name = ""

    @property
    @abstractmethod
    def period(self) -> int:
        """How many rounds apart messages are, at least 1."""

    def request(self, server_round: int, nodes: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return, for nodes that train, what else they are asked: options of `Learn`."""
        return {name: {} for name in nodes}

    def synchronise(
        self, server_round: int, learners: LearnerState, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Average what is to be averaged, here nothing; `ask` gets further models."""
        return Synchronisation(learners.coordinator)

    def needs_names(self) -> bool:
        """The server keeps account of who has which model."""
        return True

    def carriers(self) -> Sequence[Carrier]:
        """Return none: learners have a difference of their own, that to the reference."""
        return ()

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Note which round is the last, and give the run a name."""
        if self.compress != "float32":
            compression.check_compressible(initial, self.compress)
        self._last_round = num_rounds
        # What nodes keep from another run does not count; a round played again is the same run.
        self._run_name = secrets.token_hex(4)

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Let the nodes train, and average models where that is due."""
        is_last = round.number == self._last_round
        if round.number % self.period and not is_last:
            return RoundOutcome(arrays=state.arrays, memory=state.memory, details=state.details)
        learners = LearnerState.from_memory(state.memory, self.compress)
        learners = learners or LearnerState.first(self._run_name, state.arrays, self.compress)
        current = LearnerRound(self, round, state, learners)
        current.train()
        if round.number % self.period == 0:
            current.synchronise()
        if is_last:
            self.close(current)
        return current.outcome()

    def close(self, current: LearnerRound) -> None:
        """End the last round."""
        if self.final_sync:
            current.synchronise_all()
            current.deliver()

    def weight(self, reply: LearnerReply) -> float:
        """Return a node's weight in means."""
        return reply.num_examples if self.weighted else 1.0


class LearnerRound:
    """One round of a `LocalLearners` protocol: state, tally and model as they change."""

    def __init__(
        self, strategy: LocalLearners, round: Round, state: ServerState, learners: LearnerState
    ) -> None:
        self.strategy, self.round, self.learners = strategy, round, learners
        self.arrays = state.arrays
        self.before, self.tally = (Tally.from_details(state.details) for _ in range(2))
        self.outvoted = Outvoted.from_details(state.details)
        self._names = round.sample()
        self.replies: Replies = {}
        self._records: dict[int, ArrayRecord | ConfigRecord] = {}

    def train(self) -> None:
        """Let all connected nodes train, deliver what is pending, and collect their reports."""
        number, nodes = self.round.number, self._names
        self.learners.restart([n for n in nodes if n not in self.learners.known])
        steps, least = number - self.learners.round, self.strategy.min_nodes
        options = {
            name: {"steps": steps, **asked}
            for name, asked in self.strategy.request(number, nodes).items()
        }
        replies, lost = self._ask(Learn, options, at_least=least)
        if lost:
            self.tally.lost_states += tuple((number, name) for name in lost)
            self.learners.restart(lost)
            replies |= self._ask(Learn, {name: options[name] for name in lost})[0]
        self.replies = {n: replies[n] for n in nodes if n in replies}
        self.learners.round = number
        self.tally.add_losses({n: r.metrics for n, r in self.replies.items()})

    def synchronise(self) -> None:
        """Let the protocol decide."""
        checked = [r for r in self.replies.values() if r.squared_distance is not None]
        self.tally.violations += sum(r.arrays is not None for r in checked)
        self._settle(
            self.strategy.synchronise(self.round.number, self.learners, self.replies, self.ask)
        )

    def synchronise_all(self) -> None:
        """Average the models of all nodes that take part in this round."""
        if models := self.all_models():
            weights = [self.strategy.weight(self.replies[name]) for name in models]
            rule, coordinator = self.strategy.rule, self.learners.coordinator
            self._settle(Synchronisation.of_models(rule, coordinator, models, weights, full=True))

    def all_models(self) -> dict[str, Arrays]:
        """Return the models that the nodes have now, averages that are under way included."""
        models = {name: r.arrays for name, r in self.replies.items() if r.arrays is not None}
        for name in self.replies.keys() & self.learners.pending.keys():
            models[name] = self.learners.models[self.learners.pending[name]]
        models |= self.ask([name for name in self.replies if name not in models])
        return {name: models[name] for name in self.replies if name in models}

    def deliver(self) -> None:
        """Send what is pending now, instead of with the next message."""
        pending = [name for name in self.replies if name in self.learners.pending]
        self._ask(TakeModel, {name: {} for name in pending})

    def ask(self, names: Collection[str]) -> Mapping[str, Arrays]:
        """Ask nodes for their models as they are."""
        if not names:
            return {}
        self.tally.queries += len(names)
        replies, _ = self._ask(SendModel, {name: {} for name in names})
        return {n: r.arrays for n, r in replies.items() if r.arrays is not None}

    def outcome(self) -> RoundOutcome:
        """Return what the round has changed."""
        tally, before = self.tally, self.before
        metrics: dict[str, float] = {
            "models_up": tally.models_up - before.models_up,
            "models_down": tally.models_down - before.models_down,
            "synchronised": sum(n for r, n in tally.synchronisations if r == self.round.number),
        }
        if tally.batches > before.batches:
            metrics |= tally.in_place(before)
        reported = mean_reports(self.replies.values(), without=_SUMMED)
        return RoundOutcome(
            arrays=self.arrays,
            train_metrics=beside(metrics, reported, _OURS),
            memory=self.learners.to_memory(),
            details={**tally.to_details(), **self.outvoted.to_details(self.strategy.rule)},
        )

    def _settle(self, synchronisation: Synchronisation) -> None:
        weights = {name: self.strategy.weight(reply) for name, reply in self.replies.items()}
        synchronisation = self.learners.settle(synchronisation, weights)
        self.tally.add_synchronisation(self.round.number, synchronisation)
        if (mean := synchronisation.mean) is not None:
            self.arrays = with_floats_of(self.arrays, mean.arrays)
            receivers = synchronisation.receivers
            self.outvoted.add(self.round.number, self.strategy.rule, mean, receivers)

    def _ask(
        self,
        kind: type[LearnerQuestion],
        options: Mapping[str, Mapping[str, Any]],
        *,
        at_least: int = 0,
    ) -> tuple[Replies, list[str]]:
        """Ask nodes, giving each what it lacks; return replies, and who needs a model."""
        if not options:
            return {}, []
        learners, spoke = self.learners, set[str]()
        questions: dict[str, LearnerQuestion] = {}
        parcels: dict[str, dict[str, ArrayRecord | ConfigRecord]] = {}
        for name, fields in options.items():
            model, known_reference = learners.known.get(name, _NOTHING)
            adopts, base, parcels[name] = False, 0, {}
            if (pending := learners.pending.get(name)) is not None:
                model, adopts = pending, learners.models[pending] is learners.reference
                parcel = learners.parcels.get(pending)
                if parcel is not None and parcel.base == known_reference:
                    base, parcels[name][ARRAYS] = parcel.base, pack_bytes(parcel.packed)
                else:
                    parcels[name][ARRAYS] = self._record(pending)
            if known_reference != learners.reference_version and not adopts:
                parcels[name][REFERENCE] = self._record(learners.reference_version)
            questions[name] = kind(
                run=learners.run,
                model=model,
                reference=learners.reference_version,
                adopt=adopts,
                compress=self.strategy.compress,
                base=base,
                expected=learners.reference,
                node=name,
                **fields,
            )
        self.tally.models_down += sum(map(len, parcels.values()))

        def read(question: Question[LearnerReply | None], content: RecordDict) -> Any:
            assert isinstance(question, LearnerQuestion)
            spoke.add(question.node)
            return question.read(content)

        replies = self.round.exchange(
            questions, read, beside=lambda name: parcels[name], at_least=at_least
        )
        there = {name: reply for name, reply in replies.items() if reply is not None}
        # Whoever answered what cannot be used restarts; whoever did not answer need not.
        newcomers = spoke - set(replies)
        learners.acknowledge(list(there))
        learners.forget(newcomers)
        # And it is out of this round, whatever it had reported before.
        self.replies = {n: r for n, r in self.replies.items() if n not in newcomers}
        self.tally.models_up += sum(reply.arrays is not None for reply in there.values())
        return there, [name for name, reply in replies.items() if reply is None]

    def _record(self, version: int) -> ArrayRecord | ConfigRecord:
        """Return a whole model as it travels, made once for all nodes that get it."""
        if version not in self._records:
            learners = self.learners
            is_reference = version == learners.reference_version
            model = learners.reference if is_reference else learners.models[version]
            plain = self.strategy.compress == "float32"
            self._records[version] = (
                to_record(model) if plain else pack_bytes(compression.encode_whole(model))
            )
        return self._records[version]
