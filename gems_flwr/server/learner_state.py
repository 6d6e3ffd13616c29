"""What a server knows of models that live on the nodes: two frozen values, saved with the run.

The `LearnerState` is needed to go on: who has which model and which reference, and what has yet to
be delivered. The `Tally` is what the run has come to, and part of its result.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.byte_budget import ByteLedger
from gems_flwr.averaging.means import with_floats_of
from gems_flwr.averaging.synchronisation import Coordinator, Synchronisation
from gems_flwr.compression.average_coding import encode_average
from gems_flwr.compression.difference_coding import Form, PackedModel
from gems_flwr.errors import CheckpointError
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import BATCHES, CORRECT_SHARE_SUM, LOSS_SUM

_NOTES = "ledger"
_UNKNOWN = -1


@dataclass(frozen=True)
class Parcel:
    """A model as a difference to the reference that it was made with, by that one's number."""

    base: int
    packed: PackedModel


@dataclass(frozen=True)
class LearnerState:
    """Who has which model.

    Every model that is handed out has a number; the reference has that of the full
    synchronisation that it came from.

    Parameters
    ----------
    run : str
        A name that tells this run's messages from another's.
    coordinator : Coordinator
        The reference and the violation counter.
    delta : float
        The threshold of the next check; 0 where it is constant.
    losses : tuple of float
        First and running mean of the prequential loss, where the threshold follows it.
    round : int
        Up to which round the nodes have trained.
    version : int
        The highest number given out.
    reference_version : int
        The reference's.
    known : mapping from str to pair of int
        By node: numbers of the model and of the reference that it has said to have.
    pending : mapping from str to int
        By node: number of the model that it has yet to be given.
    models : mapping from int to model
        The models that are pending.
    parcels : mapping from int to Parcel
        Those of them that travel as differences.
    left_over : mapping from str to ndarray
        What rounding has taken from averages so far, for each node.
    ledger : ByteLedger, optional
        What the run has cost, where a budget sets the threshold.
    """

    run: str
    coordinator: Coordinator
    delta: float = 0.0
    losses: tuple[float, ...] = ()
    round: int = 0
    version: int = 0
    reference_version: int = 0
    known: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pending: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[int, Arrays] = field(default_factory=dict)
    parcels: Mapping[int, Parcel] = field(default_factory=dict)
    left_over: Arrays = field(default_factory=dict)
    ledger: ByteLedger | None = None

    @property
    def reference(self) -> Arrays:
        """The reference model."""
        return self.coordinator.reference

    # --- what nodes are told --------------------------------------------------------------------

    def model_version(self, node: str) -> int:
        """Return the number of the model that a node must have when it trains."""
        return self.pending[node] if node in self.pending else self.known[node][0]

    def adopts(self, node: str) -> bool:
        """Whether the model that a node is given is the reference itself."""
        return node in self.pending and self.models[self.pending[node]] is self.reference

    def lacks_reference(self, node: str) -> bool:
        """Whether a node must be given the reference beside its model."""
        known = self.known.get(node, (_UNKNOWN, _UNKNOWN))[1]
        return known != self.reference_version and not self.adopts(node)

    def parcel(self, node: str) -> Parcel | None:
        """Return a node's pending model as a difference to the reference that it has, if it can."""
        parcel = self.parcels.get(self.pending.get(node, _UNKNOWN))
        known = self.known.get(node, (_UNKNOWN, _UNKNOWN))[1]
        return parcel if parcel is not None and parcel.base == known else None

    # --- changes --------------------------------------------------------------------------------

    def restart(self, nodes: Collection[str]) -> LearnerState:
        """Let nodes begin anew from the reference: newcomers, and those that lost their state."""
        if not nodes:
            return self
        version = self.version + 1
        known = {node: each for node, each in self.known.items() if node not in nodes}
        return self._pruned(
            version=version,
            known=known,
            pending={**self.pending, **dict.fromkeys(nodes, version)},
            models={**self.models, version: self.reference},
        )

    def acknowledge(self, nodes: Collection[str]) -> LearnerState:
        """Note that nodes have what they were sent."""
        versions = {node: (self.model_version(node), self.reference_version) for node in nodes}
        return self._pruned(
            known={**self.known, **versions},
            pending={node: v for node, v in self.pending.items() if node not in nodes},
        )

    def forget(self, nodes: Collection[str]) -> LearnerState:
        """Treat nodes as newly joined: their models are not to be trusted."""
        return self._pruned(
            known={node: each for node, each in self.known.items() if node not in nodes},
            pending={node: v for node, v in self.pending.items() if node not in nodes},
        )

    def renamed(self, names: Mapping[str, str]) -> LearnerState:
        """Call nodes by other names: one that was too slow to introduce itself has a name now."""
        return dataclasses.replace(
            self,
            known={names.get(node, node): each for node, each in self.known.items()},
            pending={names.get(node, node): v for node, v in self.pending.items()},
        )

    def packed(
        self, synchronisation: Synchronisation, form: Form, weights: Mapping[str, float]
    ) -> tuple[LearnerState, Synchronisation]:
        """Round an average to what nodes will make of it; note how it travels, and what is left.

        Parameters
        ----------
        synchronisation : Synchronisation
            What came of a round.
        form : {"float16", "int8", "int4", "int2"}
            How models travel.
        weights : mapping from str to float
            What the nodes that take part in the round count, by name.
        """
        receivers = synchronisation.receivers
        if synchronisation.average is None:
            return self, synchronisation
        under_way = self.parcels.get(self.reference_version)
        pending = {self.pending.get(name) for name in receivers}
        if synchronisation.full and under_way and pending == {self.reference_version}:
            # All were averaged in this very round: the mean of what they will get is just that.
            state = dataclasses.replace(self, parcels={**self.parcels, self.version + 1: under_way})
            return state, synchronisation.with_average(self.reference)
        average = synchronisation.average
        if synchronisation.full:
            # With the reference's own integer arrays: those of a node are nobody else's business.
            average = with_floats_of(self.reference, average)
        got = sum(weights.get(name, 0.0) for name in receivers)
        share = got / sum(weights.values()) if 0 < got < sum(weights.values()) else 1.0
        encoded = encode_average(average, self.reference, form, self.left_over, share)
        parcel = Parcel(self.reference_version, encoded.packed)
        state = dataclasses.replace(
            self,
            parcels={**self.parcels, self.version + 1: parcel},
            left_over=encoded.left_over,
        )
        return state, synchronisation.with_average(encoded.decoded)

    def after(self, synchronisation: Synchronisation) -> LearnerState:
        """Note an average, to be delivered with the next messages to those who gave theirs."""
        if synchronisation.average is None:
            return dataclasses.replace(self, coordinator=synchronisation.coordinator)
        version = self.version + 1
        full = synchronisation.full
        average = synchronisation.coordinator.reference if full else synchronisation.average
        return self._pruned(
            coordinator=synchronisation.coordinator,
            version=version,
            reference_version=version if full else self.reference_version,
            pending={**self.pending, **dict.fromkeys(synchronisation.receivers, version)},
            models={**self.models, version: average},
        )

    def _pruned(self, **changes: Any) -> LearnerState:
        changed = dataclasses.replace(self, **changes)
        wanted = set(changed.pending.values())
        models = {number: model for number, model in changed.models.items() if number in wanted}
        parcels = {number: each for number, each in changed.parcels.items() if number in wanted}
        return dataclasses.replace(changed, models=models, parcels=parcels)

    # --- on disk --------------------------------------------------------------------------------

    def to_memory(self) -> dict[str, NDArray]:
        """Return the state as arrays, which is what a checkpoint takes."""
        notes = {
            "run": self.run,
            "violations": self.coordinator.violations,
            "delta": self.delta,
            "losses": self.losses,
            "round": self.round,
            "version": self.version,
            "reference_version": self.reference_version,
            "known": self.known,
            "pending": self.pending,
            "references": [n for n, model in self.models.items() if model is self.reference],
        }
        if self.ledger is not None:
            notes["ledger"] = dataclasses.asdict(self.ledger)
        arrays = {_NOTES: np.frombuffer(json.dumps(notes).encode(), np.uint8)}
        arrays |= {f"reference/{name}": array for name, array in self.reference.items()}
        for number, model in self.models.items():
            if model is not self.reference:
                arrays |= {f"model/{number}/{name}": array for name, array in model.items()}
        arrays |= {f"left/{name}": array for name, array in self.left_over.items()}
        for number, parcel in self.parcels.items():
            parts = dataclasses.asdict(parcel.packed)
            del parts["layout"]  # of a difference it is empty
            arrays |= {
                f"parcel/{number}/{parcel.base}/{name}": np.frombuffer(part, np.uint8)
                for name, part in parts.items()
            }
        return arrays

    @classmethod
    def from_memory(cls, memory: Arrays) -> LearnerState | None:
        """Return what `to_memory` wrote; None where there is nothing."""
        if _NOTES not in memory:
            return None
        try:
            return cls._from_notes(memory)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the learners' state in the checkpoint cannot be read ({error}); start afresh"
            ) from error

    @classmethod
    def _from_notes(cls, memory: Arrays) -> LearnerState:
        notes = json.loads(memory[_NOTES].tobytes())
        reference: dict[str, NDArray] = {}
        models: dict[int, Arrays] = {}
        left_over: dict[str, NDArray] = {}
        parcels: dict[int, Parcel] = {}
        for key, array in memory.items():
            kind, _, rest = key.partition("/")
            if kind == "reference":
                reference[rest] = array
            elif kind == "left":
                left_over[rest] = array
            elif kind == "parcel":
                number, base, part = rest.split("/")
                before = parcels[int(number)].packed if int(number) in parcels else PackedModel()
                packed = dataclasses.replace(before, **{part: array.tobytes()})  # type: ignore[arg-type]
                parcels[int(number)] = Parcel(int(base), packed)
            elif kind == "model":
                number, _, name = rest.partition("/")
                models[int(number)] = {**models.get(int(number), {}), name: array}
        models |= dict.fromkeys(notes.pop("references"), reference)
        notes["known"] = {node: tuple(pair) for node, pair in notes["known"].items()}
        notes["losses"] = tuple(notes["losses"])
        if "ledger" in notes:
            notes["ledger"] = ByteLedger(**notes["ledger"])
        coordinator = Coordinator(reference, notes.pop("violations"))
        return cls(
            coordinator=coordinator, models=models, parcels=parcels, left_over=left_over, **notes
        )


@dataclass(frozen=True)
class Tally:
    """What has happened so far; goes into the run's details under these names.

    Parameters
    ----------
    cumulative_loss : float
        Prequential loss (before each update; the paper's in-place loss), summed over nodes and
        batches; a batch counts its mean.
    batches : int
        How many batches that sum has.
    correct : float, optional
        Shares of right answers before each update, summed likewise; None, and not among the
        details, where nodes report losses without them because numbers are predicted.
    models_up, models_down : int
        Models sent by nodes, and to nodes (a reference that is sent beside a model counts).
    queries : int
        Messages that asked a node for its model.
    violations : int
        Local conditions that were violated.
    synchronisations : tuple of (round, nodes)
        When models were averaged, and how many.
    full_synchronisations : tuple of int
        Rounds in which all nodes took part.
    node_loss : mapping from str to float
        `cumulative_loss` of each node.
    lost_states : tuple of (round, node)
        Nodes that had lost their model and began anew from the reference.
    """

    cumulative_loss: float = 0.0
    batches: float = 0
    correct: float | None = 0.0
    models_up: int = 0
    models_down: int = 0
    queries: int = 0
    violations: int = 0
    synchronisations: tuple[tuple[int, int], ...] = ()
    full_synchronisations: tuple[int, ...] = ()
    node_loss: Mapping[str, float] = field(default_factory=dict)
    lost_states: tuple[tuple[int, str], ...] = ()

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Tally:
        """Return the tally that a run's details hold."""
        names = {each.name for each in dataclasses.fields(cls)}
        values = {key: value for key, value in details.items() if key in names}
        try:
            for key in ("synchronisations", "lost_states"):
                values[key] = tuple(tuple(pair) for pair in values.get(key, ()))
            values["full_synchronisations"] = tuple(values.get("full_synchronisations", ()))
        except TypeError as error:
            raise CheckpointError(
                f"the details in the checkpoint cannot be read ({error}); start afresh"
            ) from error
        if values.get("batches"):
            values.setdefault("correct", None)
        return cls(**values)

    def to_details(self) -> dict[str, Any]:
        """Return the tally as JSON can hold it."""
        names = [each.name for each in dataclasses.fields(self)]
        return {n: getattr(self, n) for n in names if n != "correct" or self.correct is not None}

    def plus(self, **counts: int) -> Tally:
        """Return the tally with some counters raised."""
        return dataclasses.replace(
            self, **{name: getattr(self, name) + count for name, count in counts.items()}
        )

    def renamed(self, names: Mapping[str, str]) -> Tally:
        """Call nodes by other names from now on; what has happened happened under the old ones."""
        node_loss = {names.get(node, node): loss for node, loss in self.node_loss.items()}
        return dataclasses.replace(self, node_loss=node_loss)

    def with_losses(self, metrics: Mapping[str, Mapping[str, float]]) -> Tally:
        """Add what the nodes reported of their training, by node."""
        node_loss = dict(self.node_loss)
        loss, batches, correct = self.cumulative_loss, self.batches, self.correct
        for node, values in metrics.items():
            if LOSS_SUM not in values:
                continue
            node_loss[node] = node_loss.get(node, 0.0) + values[LOSS_SUM]
            loss += values[LOSS_SUM]
            batches += values.get(BATCHES, 1)
            right = values.get(CORRECT_SHARE_SUM)
            correct = None if correct is None or right is None else correct + right
        return dataclasses.replace(
            self, cumulative_loss=loss, batches=batches, correct=correct, node_loss=node_loss
        )

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

    def with_synchronisation(self, server_round: int, synchronisation: Synchronisation) -> Tally:
        """Add an averaging of models."""
        if synchronisation.average is None:
            return self
        event = (server_round, len(synchronisation.receivers))
        full = (server_round,) if synchronisation.full else ()
        return dataclasses.replace(
            self,
            synchronisations=(*self.synchronisations, event),
            full_synchronisations=(*self.full_synchronisations, *full),
        )
