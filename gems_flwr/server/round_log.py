"""What of a run is on disk: the checkpoint to go on from, and `rounds.jsonl` for readers.

If the disk fails, the state of the round that was just played goes to the system's temporary folder
instead, and the error says so.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from flwr.app import RecordDict

from gems_flwr.disk.faults import disk_faults
from gems_flwr.disk.files import write_atomically
from gems_flwr.disk.lock import check_held, hold_folder
from gems_flwr.errors import CheckpointError, DiskError, StateNotSavedError
from gems_flwr.model_card import FILE as CARD
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.server.log import log_warning
from gems_flwr.server.settings import LoopSettings
from gems_flwr.server.state import RoundRecord, ServerState
from gems_flwr.typing import Arrays

Loop = TypeVar("Loop", bound=LoopSettings)
P = ParamSpec("P")
R = TypeVar("R")
_HISTORY = "rounds.jsonl"
_PLAIN = "float32"


def owning_its_folder(
    start: Callable[Concatenate[Loop, P], R],
) -> Callable[Concatenate[Loop, P], R]:
    """Let a strategy's method hold the `checkpoint_dir`, if there is one, while it runs.

    It raises `FolderInUseError` if another run has it, and says what is kept if the disk fails.
    """

    @functools.wraps(start)
    def owner(self: Loop, /, *arguments: P.args, **options: P.kwargs) -> R:
        folder = self.checkpoint_dir
        if folder is None:
            return start(self, *arguments, **options)
        with hold_folder(folder):
            try:
                return start(self, *arguments, **options)
            except DiskError as error:
                raise CheckpointError(f"{error}{kept_in(Path(folder))}") from error

    return owner


class Inbox(CheckpointFolder):
    """A folder that keeps replies if it can: a full disk is no reason to lose the reply itself."""

    def keep_reply(self, exchange: str, node: str, content: RecordDict) -> None:
        """Put a reply on disk before it is used, or say that it is in memory alone."""
        try:
            super().keep_reply(exchange, node, content)
        except DiskError as error:
            log_warning("reply_not_kept", exchange=exchange, node=node, reason=error)


def kept_in(folder: Path) -> str:
    """Return where there is something to go on from, as the end of a message."""
    with contextlib.suppress(OSError):
        if not CheckpointFolder(folder).is_empty():
            return f"; what was saved before stays in {folder}, a resumed run goes on from it"
    return ""


class RoundLog:
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
    compress : str
        How models travel; what is kept of those that nodes have is of no use to another way.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        strategy: str,
        seed: int,
        model: Arrays,
        compress: str = _PLAIN,
    ) -> None:
        self.files = Inbox(Path(folder))
        # Of the history on disk: a checkpoint fits one history only.
        self._history = _digest(b"")
        self._lines: list[bytes] = []
        self._identity: dict[str, Any] = {
            "strategy": strategy,
            "seed": seed,
            "model": {name: [str(a.dtype), list(a.shape)] for name, a in model.items()},
        }
        # Said where it is something: files of runs without it are what they always were.
        self._compress = {} if compress == _PLAIN else {"compress": compress}

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
        DiskError
            If the folder cannot be written to.
        """
        state = self.load() if resume else None
        # A resumed run keeps its inbox: replies to an unfinished first round are still good.
        if not resume:
            self.forget()
        if state is None:
            state = fresh()
            self.begin(state)
        else:
            # Not the records: the checkpoint has the digest of these very lines.
            self._write_history(self._lines)
        return state

    def forget(self) -> None:
        """Remove what an earlier run left here."""
        self.files.clear()
        card = self.files.folder / CARD
        with disk_faults(f"remove {card}"):
            card.unlink(missing_ok=True)

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
        meta = {"compress": _PLAIN, **meta}
        for key, ours in {**self._identity, "compress": _PLAIN, **self._compress}.items():
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
        history = self._read_history(last_round, meta.get(_HISTORY))
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

        Raises
        ------
        StateNotSavedError
            If the disk does not take it. It carries the state and says what is kept where.
        """
        try:
            check_held(self._history_path)
            line = _line(state.history[-1])
            with disk_faults(f"write {self._history_path}"), self._history_path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            self._history.update(line)
            self._write_state(state)
        except DiskError as error:
            raise StateNotSavedError(
                f"the state after round {state.round} is not saved: {error}{self._rescue(state)}",
                state,
            ) from error

    def begin(self, state: ServerState) -> None:
        """Write the history so far, whole: a resumed run must not repeat a line."""
        self._write_history([_line(record) for record in state.history])

    def _write_state(self, state: ServerState) -> None:
        meta = {
            **self._identity,
            **self._compress,
            "round": state.round,
            "details": dict(state.details),
            _HISTORY: self._history.hexdigest(),
        }
        self.files.save({"arrays": state.arrays, "memory": state.memory}, meta)

    def _rescue(self, state: ServerState) -> str:
        """Put a state where there may be room for it; return what is kept where, and what to do."""
        refuge = copy.copy(self)
        try:
            with disk_faults("make a temporary folder"):
                refuge.files = Inbox(Path(tempfile.mkdtemp(prefix="gems-flwr-")))
        except DiskError:
            return kept_in(self.files.folder)
        try:
            refuge.begin(state)
            refuge._write_state(state)
        except DiskError:
            shutil.rmtree(refuge.files.folder, ignore_errors=True)
            return kept_in(self.files.folder)
        return (
            f"; it is in {refuge.files.folder} instead: move what is in there to "
            f"{self.files.folder}, and a resumed run goes on from it"
        )

    @property
    def _history_path(self) -> Path:
        return self.files.folder / _HISTORY

    def _write_history(self, lines: list[bytes]) -> None:
        write_atomically(self._history_path, b"".join(lines))
        self._history = _digest(b"".join(lines))

    def _read_history(self, last_round: int, digest: str | None) -> tuple[RoundRecord, ...]:
        """Return rounds 0 to `last_round`; what was written after the checkpoint is left out.

        `digest` is what the checkpoint says of these lines; None where it is from the time before
        there were checksums.
        """
        try:
            lines = self._history_path.read_bytes().splitlines()[: last_round + 1]
            history = tuple(RoundRecord.from_json(json.loads(line)) for line in lines)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self._history_path} cannot be read: {error}") from error
        if [record.round for record in history] != list(range(last_round + 1)):
            raise CheckpointError(
                f"{self._history_path} does not fit the checkpoint, which is after round "
                f"{last_round}; remove both to start afresh"
            )
        self._lines = [line + b"\n" for line in lines]
        if digest not in (None, _digest(b"".join(self._lines)).hexdigest()):
            raise CheckpointError(
                f"{self._history_path} was changed since it was written (its checksum does not "
                "fit); remove it and the checkpoint to start afresh"
            )
        return history


def read_rounds(folder: Path) -> tuple[RoundRecord, ...]:
    """Return what ``rounds.jsonl`` of a folder says; nothing if it cannot be read."""
    try:
        lines = (folder / _HISTORY).read_bytes().splitlines()
        return tuple(RoundRecord.from_json(json.loads(line)) for line in lines)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _digest(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def _line(record: RoundRecord) -> bytes:
    return json.dumps(record.to_json()).encode() + b"\n"


def _check_arrays(arrays: Arrays, where: str) -> None:
    """Refuse what no reply could have brought: the file is damaged, or was tampered with."""
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise CheckpointError(
                f"array '{name}' in {where} holds no finite numbers; remove it to start afresh"
            )
