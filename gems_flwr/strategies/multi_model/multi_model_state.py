"""The state of a `MultiModel` run: who has what, who was drawn, and old updates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.steps import flat
from gems_flwr.typing import Arrays
from gems_flwr.wire.multi_model_replies import Holdings

_NOTES = "notes"
_OLD = "old"
_CONTROL = "control"

T = TypeVar("T")


@dataclass
class MultiModelState:
    """What a run knows. It is loaded for one round and saved with the round's outcome.

    Parameters
    ----------
    run : str
        A name for the run, so that what nodes keep from another one does not count.
    holdings : dict
        By node: what it has said of itself.
    versions : dict
        By model: the round after which it was last changed.
    kept : dict
        By node and model: the version that the node still has.
    settled : dict
        By node and model: the round of its last reply that was used.
    sampled : dict
        By node and model: in how many rounds the pair was drawn.
    lost : list
        Pairs that were drawn, or should have been considered, and gave nothing: round, node,
        model, coefficient (d / p, or d if there was no draw) and reason.
    uniform_rounds : list
        Rounds without any importance, in which sampling was uniform.
    old : dict
        By model and node: its last known update, for rules that keep them.
    controls : dict
        By model: SCAFFOLD's c.
    """

    run: str
    holdings: dict[str, Holdings] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    kept: dict[str, dict[str, int]] = field(default_factory=dict)
    settled: dict[str, dict[str, int]] = field(default_factory=dict)
    sampled: dict[str, dict[str, int]] = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)
    uniform_rounds: list[int] = field(default_factory=list)
    old: dict[str, dict[str, NDArray]] = field(default_factory=dict)
    controls: dict[str, NDArray] = field(default_factory=dict)

    def examples(
        self, nodes: Iterable[str], models: Iterable[str], most: float | None = None
    ) -> NDArray[np.float64]:
        """Return n_is: examples that each node (rows) counts for in each model (columns).

        That is what the node has said, but at most `most`. What it has said stays in `holdings`,
        so a resumed run may have another limit.
        """
        rows, names = list(nodes), list(models)
        claimed = [[self.holdings[n].examples.get(m, 0) for m in names] for n in rows]
        counts = np.array(claimed, dtype=np.float64).reshape(len(rows), len(names))
        return counts if most is None else np.minimum(counts, most)

    def note_lost(
        self, server_round: int, node: str, model: str, coefficient: float, reason: str
    ) -> None:
        """Note a pair that should have contributed and did not."""
        self.lost.append(
            {
                "round": server_round,
                "node": node,
                "model": model,
                "coefficient": coefficient,
                "reason": reason,
            }
        )

    def control(self, model: str, like: Arrays) -> NDArray:
        """Return SCAFFOLD's c of a model; zero at first."""
        return self.controls[model] if model in self.controls else np.zeros_like(flat(like))

    def count(self, node: str, model: str) -> None:
        """Note that a pair was drawn."""
        counts = self.sampled.setdefault(node, {})
        counts[model] = counts.get(model, 0) + 1

    def renamed(self, names: Mapping[str, str]) -> MultiModelState:
        """Call nodes by other names; pairs that were lost were so under the old ones."""

        def moved(by_node: Mapping[str, T]) -> dict[str, T]:
            return {names.get(node, node): each for node, each in by_node.items()}

        return dataclasses.replace(
            self,
            holdings=moved(self.holdings),
            kept=moved(self.kept),
            settled=moved(self.settled),
            sampled=moved(self.sampled),
            old={model: moved(by_node) for model, by_node in self.old.items()},
        )

    # --- on disk ------------------------------------------------------------------------------

    def to_memory(self) -> dict[str, NDArray]:
        """Return everything as arrays, for a checkpoint."""
        notes = {
            "run": self.run,
            "holdings": {n: [dict(h.examples), h.capacity] for n, h in self.holdings.items()},
            "versions": self.versions,
            "kept": self.kept,
            "settled": self.settled,
            "sampled": self.sampled,
            "lost": self.lost,
            "uniform_rounds": self.uniform_rounds,
        }
        text = np.frombuffer(json.dumps(notes).encode(), dtype=np.uint8)
        old = {
            f"{_OLD}/{_quoted(model)}/{_quoted(node)}": vector
            for model, by_node in self.old.items()
            for node, vector in by_node.items()
        }
        controls = {f"{_CONTROL}/{_quoted(m)}": vector for m, vector in self.controls.items()}
        return {_NOTES: text, **old, **controls}

    @classmethod
    def from_memory(cls, memory: Arrays, run: str) -> MultiModelState:
        """Return the state that `to_memory` wrote; a new one, of this run, if there is none."""
        if _NOTES not in memory:
            return cls(run)
        notes = json.loads(memory[_NOTES].tobytes())
        holdings = notes.pop("holdings")
        state = cls(**notes, holdings={n: Holdings(*h) for n, h in holdings.items()})
        for key, vector in memory.items():
            kind, _, rest = key.partition("/")
            model, _, node = (unquote(part) for part in rest.partition("/"))
            if kind == _OLD:
                state.old.setdefault(model, {})[node] = vector
            elif kind == _CONTROL:
                state.controls[model] = vector
        return state

    def details(self, models: Iterable[str]) -> Mapping[str, Any]:
        """Return what a result tells about the run."""
        held = sum(v.nbytes for by_node in self.old.values() for v in by_node.values())
        return {
            "models": list(models),
            "sampled": {node: dict(counts) for node, counts in self.sampled.items()},
            "examples": {node: dict(h.examples) for node, h in self.holdings.items()},
            "capacities": {node: h.capacity for node, h in self.holdings.items()},
            "lost": list(self.lost),
            "uniform_rounds": list(self.uniform_rounds),
            "server_memory_bytes": held + sum(v.nbytes for v in self.controls.values()),
        }


def _quoted(text: str) -> str:
    return quote(text, safe="")
