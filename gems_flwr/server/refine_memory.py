"""What refinement keeps from round to round, as the arrays that a checkpoint has room for.

The class moments themselves are among them: a run that is resumed in the middle must step as the
unbroken one would have, to the last bit, and of sums nothing but the total is on disk anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import CheckpointError
from gems_flwr.intersect.refinement import DAMPING, Evaluation
from gems_flwr.moments.moment_sums import Standard
from gems_flwr.server.state import ServerState
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.space_files import space_from_arrays, space_to_arrays
from gems_flwr.typing import Arrays

_PREFIX = "refine"
_NOTES = f"{_PREFIX}-notes"
_LENGTHS = ("center", "scale", "squares")


@dataclasses.dataclass(frozen=True, eq=False)
class RefineMemory:
    """The state of a refinement between two rounds.

    Parameters
    ----------
    cones : mapping from str to ClassMomentCone
        Moments that count, by node; one for all nodes where they are only added up.
    members : tuple of str
        The nodes that take part.
    history : tuple of Evaluation
        What was seen of the loss so far.
    damping : float
        Of the next step.
    standard : Standard, optional
        How long inputs are in all, where nothing but totals is looked at.
    """

    cones: Mapping[str, ClassMomentCone]
    members: tuple[str, ...]
    history: tuple[Evaluation, ...] = ()
    damping: float = DAMPING
    standard: Standard | None = None

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all of it as arrays."""
        arrays: dict[str, NDArray[Any]] = {}
        notes: dict[str, Any] = {"members": list(self.members), "damping": self.damping}
        notes["cones"], notes["seen"] = [], []
        for number, (node, cone) in enumerate(self.cones.items()):
            parts, meta = space_to_arrays(cone)
            notes["cones"].append({"node": node, "meta": meta, "arrays": list(parts)})
            arrays |= {f"{_PREFIX}-cone-{number}-{key}": part for key, part in parts.items()}
        for number, seen in enumerate(self.history):
            notes["seen"].append({"loss": seen.loss, "nodes": list(seen.nodes)})
            for key in ("layer", "gradient", "errors"):
                arrays[f"{_PREFIX}-seen-{number}-{key}"] = getattr(seen, key)
        if (lengths := self.standard) is not None:
            notes["standard"] = lengths.count
            for key in _LENGTHS:
                arrays[f"{_PREFIX}-standard-{key}"] = getattr(lengths, key)
        text = np.frombuffer(json.dumps(notes).encode(), dtype=np.uint8)
        return {_NOTES: text, **arrays}

    @classmethod
    def of(cls, memory: Arrays) -> RefineMemory:
        """Read what `to_arrays` returned.

        Raises
        ------
        CheckpointError
            If it is not there: the run was begun without refinement.
        """
        if _NOTES not in memory:
            raise CheckpointError("the run was begun without refine: start it afresh")
        notes = json.loads(bytes(memory[_NOTES]))
        cones: dict[str, ClassMomentCone] = {}
        for number, kept in enumerate(notes["cones"]):
            parts = {key: memory[f"{_PREFIX}-cone-{number}-{key}"] for key in kept["arrays"]}
            cone = space_from_arrays(parts, kept["meta"])
            assert isinstance(cone, ClassMomentCone)
            cones[kept["node"]] = cone
        history = tuple(
            Evaluation(
                memory[f"{_PREFIX}-seen-{number}-layer"],
                seen["loss"],
                memory[f"{_PREFIX}-seen-{number}-gradient"],
                memory[f"{_PREFIX}-seen-{number}-errors"],
                tuple(seen["nodes"]),
            )
            for number, seen in enumerate(notes["seen"])
        )
        standard = None
        if "standard" in notes:
            center, scale, squares = (memory[f"{_PREFIX}-standard-{key}"] for key in _LENGTHS)
            standard = Standard(center, scale, notes["standard"], squares)
        return cls(cones, tuple(notes["members"]), history, notes["damping"], standard)

    def without_members(self, gone: Collection[str]) -> RefineMemory:
        """Let some nodes take no part any more, whatever their moments are in."""
        members = tuple(member for member in self.members if member not in gone)
        return dataclasses.replace(self, members=members)

    def renamed(self, names: Mapping[str, str]) -> RefineMemory:
        """Call nodes by other names."""

        def new(nodes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names.get(node, node) for node in nodes)

        return dataclasses.replace(
            self,
            cones={names.get(node, node): cone for node, cone in self.cones.items()},
            members=new(self.members),
            history=tuple(dataclasses.replace(s, nodes=new(s.nodes)) for s in self.history),
        )


def renamed_state(state: ServerState, names: Mapping[str, str]) -> ServerState:
    """Return a state that calls nodes by other names in what refinement keeps, if it does."""
    if _NOTES not in state.memory:
        return state
    kept = RefineMemory.of(state.memory).renamed(names).to_arrays()
    return dataclasses.replace(state, memory={**state.memory, **kept})


def has_refinement(memory: Arrays) -> bool:
    """Return whether a memory holds what refinement keeps."""
    return _NOTES in memory


def others(memory: Arrays) -> dict[str, NDArray[Any]]:
    """Return what a memory holds besides."""
    return {key: array for key, array in memory.items() if not key.startswith(f"{_PREFIX}-")}
