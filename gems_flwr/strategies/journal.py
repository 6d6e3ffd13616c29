"""A run's diary: the checkpoint to go on from, and `rounds.jsonl` for everyone else to read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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

    def __init__(self, folder: str | Path, *, strategy: str, seed: int, model: Arrays) -> None:
        self.files = CheckpointFolder(Path(folder))
        self._identity: dict[str, Any] = {
            "strategy": strategy,
            "seed": seed,
            "model": {name: [str(a.dtype), list(a.shape)] for name, a in model.items()},
        }

    def open(self, fresh: Callable[[], ServerState], *, resume: bool) -> ServerState:
        """Return the state to go on from, with a history on disk that fits it.

        Parameters
        ----------
        fresh : callable
            Makes the state before the first round; called only if there is nothing to go on from.
        resume : bool
            Whether to go on from what is saved; otherwise it is removed.

        Raises
        ------
        CheckpointError
            If the checkpoint is damaged or belongs to another run.
        """
        state = self.load() if resume else None
        # A resumed run keeps its inbox: replies to an unfinished first round are still good.
        if not resume:
            self.forget()
        if state is None:
            state = fresh()
        self.begin(state)
        return state

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
        last_round, details = meta.get("round"), meta.get("details")
        if type(last_round) is not int or last_round < 0 or not isinstance(details, dict):
            raise CheckpointError(
                f"the checkpoint in {self.files.folder} has no round and details; remove it to "
                "start afresh"
            )
        for group, arrays in groups.items():
            _check_arrays(arrays, f"{group} of the checkpoint in {self.files.folder}")
        history = self._read_history(last_round)
        return ServerState(
            arrays=groups.get("arrays", {}),
            history=history,
            memory=groups.get("memory", {}),
            details=details,
        )

    def save(self, state: ServerState) -> None:
        """Append the last round to the history, then write the checkpoint.

        In this order: a crash in between leaves a line too many, which `load` drops, never one
        too few.
        """
        with self._history_path.open("ab") as file:
            file.write(_line(state.history[-1]))
            file.flush()
            os.fsync(file.fileno())
        meta = {**self._identity, "round": state.round, "details": dict(state.details)}
        self.files.save({"arrays": state.arrays, "memory": state.memory}, meta)

    def begin(self, state: ServerState) -> None:
        """Write the history so far, whole: a resumed run must not repeat a line."""
        lines = b"".join(_line(record) for record in state.history)
        write_atomically(self._history_path, lines)

    @property
    def _history_path(self) -> Path:
        return self.files.folder / "rounds.jsonl"

    def _read_history(self, last_round: int) -> tuple[RoundRecord, ...]:
        """Return rounds 0 to `last_round`; what was written after the checkpoint is left out."""
        try:
            lines = self._history_path.read_text().splitlines()[: last_round + 1]
            history = tuple(RoundRecord.from_json(json.loads(line)) for line in lines)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self._history_path} cannot be read: {error}") from error
        if [record.round for record in history] != list(range(last_round + 1)):
            raise CheckpointError(
                f"{self._history_path} does not fit the checkpoint, which is after round "
                f"{last_round}; remove both to start afresh"
            )
        return history


def _line(record: RoundRecord) -> bytes:
    return json.dumps(record.to_json()).encode() + b"\n"


def _check_arrays(arrays: Arrays, where: str) -> None:
    """Refuse what no reply could have brought: the file is damaged, or was tampered with."""
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise CheckpointError(
                f"array '{name}' in {where} holds no finite numbers; remove it to start afresh"
            )
