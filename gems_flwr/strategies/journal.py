"""A run's diary: the checkpoint to go on from, and `rounds.jsonl` for everyone else to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gems_flwr.averaging import Arrays
from gems_flwr.errors import CheckpointError
from gems_flwr.runtime.checkpoint import CheckpointFolder, write_atomically
from gems_flwr.strategies.records import RoundRecord, ServerState


class Journal:
    """Saves and loads the state of one run.

    Parameters
    ----------
    folder : path
        Where the files go.
    strategy : str
        Name of the strategy; with `seed` and `model` it tells this run from another.
    seed : int
        The run's seed.
    model : mapping from str to ndarray
        The initial model, for its names and shapes.
    """

    def __init__(
        self, folder: str | Path, *, strategy: str, seed: int, model: Arrays
    ) -> None:
        self.files = CheckpointFolder(Path(folder))
        self._identity: dict[str, Any] = {
            "strategy": strategy,
            "seed": seed,
            "model": {name: [str(a.dtype), list(a.shape)] for name, a in model.items()},
        }

    def forget(self) -> None:
        """Remove what an earlier run left here."""
        self.files.clear()

    def load(self) -> ServerState | None:
        """Return the last saved state, or None where there is none.

        Raises
        ------
        CheckpointError
            If the checkpoint is damaged or belongs to another run.
        """
        saved = self.files.load()
        if saved is None:
            return None
        groups, meta = saved
        for key, ours in self._identity.items():
            if meta.get(key) != ours:
                raise CheckpointError(
                    f"the checkpoint in {self.files.folder} belongs to a run with {key} "
                    f"{meta.get(key)}, this run has {ours}; choose another checkpoint_dir"
                )
        history = tuple(RoundRecord.from_json(record) for record in meta["history"])
        return ServerState(
            arrays=groups.get("arrays", {}),
            history=history,
            memory=groups.get("memory", {}),
            details=meta["details"],
        )

    def save(self, state: ServerState) -> None:
        """Write the checkpoint of a finished round, and the history."""
        meta = {
            **self._identity,
            "history": [record.to_json() for record in state.history],
            "details": dict(state.details),
        }
        self.files.save({"arrays": state.arrays, "memory": state.memory}, meta)
        self.write_history(state)

    def write_history(self, state: ServerState) -> None:
        """Write `rounds.jsonl`, whole: a resumed run must not repeat a line."""
        lines = [json.dumps(record.to_json()) + "\n" for record in state.history]
        write_atomically(self.files.folder / "rounds.jsonl", "".join(lines).encode())
