"""A run's folder: the checkpoint to go on from, kept replies, and `rounds.jsonl` for readers.

- ``checkpoint.safetensors``: arrays as safetensors, everything else as JSON in the same file's
  header. One file, written beside and renamed, so it is either the old state or the new one.
- ``inbox/``: replies of the round under way, each exactly as it came (Flower's own protobuf
  form), written before it is used and removed once the round's checkpoint is safe. On resume
  they pass the same checks as on the wire.
- ``rounds.jsonl``: one `RoundRecord` per line.

Files carry checksums, so that a flipped bit in a number is noticed. They are for the owner's eyes
only. Nothing here unpickles. If the disk fails, the state before and the replies of the round under
way stay, so that a resumed run plays it again from these.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gems_flwr.core.disk import (
    CHECKSUM,
    check_held,
    checksum,
    disk_faults,
    hold_folder,
    make_folder,
    replacing,
    verify_checksum,
    write_atomically,
)
from gems_flwr.core.log import log_warning
from gems_flwr.core.records import records_from_bytes, records_to_bytes
from gems_flwr.core.run import RoundRecord, ServerState
from gems_flwr.errors import CheckpointError, DiskError
from gems_flwr.typing import Arrays

FORMAT = "gems-flwr-1"
_FILE, _INBOX, _HISTORY = "checkpoint.safetensors", "inbox", "rounds.jsonl"
_DIGEST_BYTES = 16
# How the file of a node's reply ends that goes by ``#`` and its id; see `gems_flwr.core.nodes`.
_UNNAMED = re.compile(r"-%23\d+-[0-9a-f]{8}\.reply$")
# What reading a damaged file may raise.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)

Groups = Mapping[str, Mapping[str, NDArray]]


def save_arrays(path: Path, groups: Groups, meta: Mapping[str, Any]) -> None:
    """Write groups of arrays and a JSON value into one safetensors file, atomically."""
    # safetensors wants contiguous arrays and would write a view's whole buffer.
    tensors = {
        f"{group}/{name}": np.ascontiguousarray(array).reshape(array.shape)
        for group, arrays in groups.items()
        for name, array in arrays.items()
    }
    # Insertion order is meaning (it is the model's own), so it is kept beside the tensors.
    header = {"format": FORMAT, "order": json.dumps(list(tensors)), "meta": json.dumps(meta)}
    header[CHECKSUM] = checksum(tensors, header)
    with replacing(path, private=True) as temporary:
        save_file(tensors, temporary, metadata=header)


def load_arrays(path: Path) -> tuple[dict[str, dict[str, NDArray]], dict[str, Any]]:
    """Read what `save_arrays` wrote; a CheckpointError if it is damaged, or not ours."""
    tensors: dict[str, NDArray] = {}
    groups: dict[str, dict[str, NDArray]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a {FORMAT} file")
            for key in json.loads(header["order"]):
                group, name = key.split("/", 1)
                tensors[key] = groups.setdefault(group, {})[name] = file.get_tensor(key)
            verify_checksum(header, tensors)
            meta = json.loads(header["meta"])
            if not isinstance(meta, dict):
                raise ValueError(f"its meta is {type(meta).__name__}, expected an object")
    except (*_UNREADABLE, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); remove it to start afresh"
        ) from error
    return groups, meta


class CheckpointFolder:
    """The checkpoint and the inbox of one run, in a folder that is made when first written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, groups: Groups, meta: Mapping[str, Any]) -> None:
        """Write the state of a finished round, then empty the inbox.

        If it cannot be written (`DiskError`), the state before it and the inbox are unchanged.
        """
        save_arrays(self.folder / _FILE, groups, meta)
        # Replies of a round that is done are never looked for again: litter at worst.
        shutil.rmtree(self.folder / _INBOX, ignore_errors=True)

    def load(self) -> tuple[dict[str, dict[str, NDArray]], dict[str, Any]] | None:
        """Return the last saved state, or None where there is none yet."""
        path = self.folder / _FILE
        return load_arrays(path) if path.exists() else None

    def is_empty(self) -> bool:
        """Whether there is nothing to go on from: neither a state nor a reply."""
        return not (self.folder / _FILE).exists() and not self.has_replies()

    def clear(self) -> None:
        """Remove the checkpoint and the inbox: a new run begins in this folder."""
        path, inbox = self.folder / _FILE, self.folder / _INBOX
        with disk_faults(f"remove {path}"):
            path.unlink(missing_ok=True)
        with disk_faults(f"remove {inbox}"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(inbox)

    def keep_reply(self, exchange: str, node: str, content: RecordDict) -> None:
        """Put a reply on disk before it is used; on a full disk it stays in memory alone.

        `exchange` is of the server's making, such as ``"3-train"``; a node's name is any text.
        """
        data = records_to_bytes(content)
        try:
            make_folder(self.folder / _INBOX, private=True)
            write_atomically(self._reply_path(exchange, node), _digest(data) + data, private=True)
        except DiskError as error:
            log_warning("reply_not_kept", exchange=exchange, node=node, reason=error)

    def kept_reply(self, exchange: str, node: str) -> RecordDict | None:
        """Return the reply that was kept, or None; a damaged one counts as none."""
        try:
            kept = self._reply_path(exchange, node).read_bytes()
            digest, data = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
            if digest != _digest(data):
                raise ValueError("the checksum does not fit")
            return records_from_bytes(data)
        except FileNotFoundError:
            return None
        except Exception:  # protobuf and Flower raise many kinds; the node is simply asked again
            self.drop_reply(exchange, node)
            return None

    def drop_reply(self, exchange: str, node: str) -> None:
        """Remove a reply that proved unusable, so that a resumed run asks the node again."""
        # If it cannot be removed, it proves unusable again.
        with contextlib.suppress(OSError):
            self._reply_path(exchange, node).unlink(missing_ok=True)

    def has_replies(self) -> bool:
        """Whether an interrupted round left replies behind."""
        return any((self.folder / _INBOX).glob("*"))

    def has_named_replies(self) -> bool:
        """Whether any of them is of a node that went by a name, and not by its id alone."""
        return any(not _UNNAMED.search(path.name) for path in (self.folder / _INBOX).glob("*"))

    def _reply_path(self, exchange: str, node: str) -> Path:
        # Names come from nodes: quoted they cannot leave the folder, cut they fit a file name,
        # and the digest keeps two long ones apart.
        digest = hashlib.blake2b(node.encode(), digest_size=4).hexdigest()
        name = f"{quote(exchange, safe='')}-{quote(node, safe='')[:60]}-{digest}.reply"
        return self.folder / _INBOX / name


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@contextlib.contextmanager
def owned_folder(folder: str | Path) -> Iterator[None]:
    """Hold a `checkpoint_dir` while a run works in it; its errors say what is kept there."""
    with hold_folder(folder):
        try:
            yield
        except DiskError as error:
            kept = ""
            with contextlib.suppress(OSError):
                if not CheckpointFolder(Path(folder)).is_empty():
                    kept = f"; what was saved stays in {folder}, a resumed run goes on from it"
            raise CheckpointError(f"{error}{kept}") from error


class RoundLog:
    """Saves and loads the state of a run, which is known by strategy, seed, model and carriers."""

    def __init__(
        self,
        folder: str | Path,
        *,
        strategy: str,
        seed: int,
        model: Arrays,
        carriers: Sequence[str] = (),
    ) -> None:
        self.files = CheckpointFolder(Path(folder))
        # Of the history on disk: a checkpoint fits one history only.
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._identity: dict[str, Any] = {
            "strategy": strategy,
            "seed": seed,
            "model": {name: [str(a.dtype), list(a.shape)] for name, a in model.items()},
            "carriers": list(carriers),
        }

    def open(self, fresh: Callable[[], ServerState], *, resume: bool) -> ServerState:
        """Return the state to go on from, with a history on disk that fits it.

        That is what is saved, if the run is to `resume`, else removed, or a `fresh` state.
        """
        state = self.load() if resume else None
        # A resumed run keeps its inbox: replies to an unfinished first round are still good.
        if not resume:
            self.files.clear()
        if state is None:
            state = fresh()
        self.begin(state)
        return state

    def load(self) -> ServerState | None:
        """Return the last saved state, or None; it must be whole, and of this run."""
        saved = self.files.load()
        if saved is None:
            return None
        groups, meta = saved
        where = f"the checkpoint in {self.files.folder}"
        for key, ours in self._identity.items():
            if meta.get(key) != ours:
                raise CheckpointError(
                    f"{where} belongs to a run with {key} {meta.get(key)}, this run has {ours}; "
                    "choose another checkpoint_dir"
                )
        last_round, details = meta.get("round"), meta.get("details")
        if type(last_round) is not int or last_round < 0 or not isinstance(details, dict):
            raise CheckpointError(f"{where} has no round and details; remove it to start afresh")
        for group, arrays in groups.items():
            for name, array in arrays.items():
                # No reply could have brought it: the file was tampered with.
                if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
                    raise CheckpointError(
                        f"array '{name}' in {group} of {where} holds no finite numbers; remove it "
                        "to start afresh"
                    )
        history = self._read_history(last_round, meta.get(_HISTORY))
        return ServerState(groups.get("arrays", {}), history, groups.get("memory", {}), details)

    def begin(self, state: ServerState) -> None:
        """Write the history so far, whole: a resumed run must not repeat a line."""
        lines = b"".join(map(_line, state.history))
        write_atomically(self._history_path, lines)
        self._digest = hashlib.blake2b(lines, digest_size=_DIGEST_BYTES)

    def save(self, state: ServerState) -> None:
        """Append the last round to the history, then write the checkpoint.

        In this order: a crash in between leaves a line too many, which `load` drops, never one
        too few. If the disk fails (`DiskError`), the state before it and the inbox are unchanged.
        """
        check_held(self._history_path)
        line = _line(state.history[-1])
        with disk_faults(f"write {self._history_path}"), self._history_path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._digest.update(line)
        meta = {
            **self._identity,
            "round": state.round,
            "details": dict(state.details),
            _HISTORY: self._digest.hexdigest(),
        }
        self.files.save({"arrays": state.arrays, "memory": state.memory}, meta)

    @property
    def _history_path(self) -> Path:
        return self.files.folder / _HISTORY

    def _read_history(self, last_round: int, digest: object) -> tuple[RoundRecord, ...]:
        """Return rounds 0 to `last_round`, whose digest the checkpoint has; later ones are left."""
        try:
            lines = self._history_path.read_bytes().splitlines(keepends=True)[: last_round + 1]
            history = tuple(RoundRecord.from_json(json.loads(line)) for line in lines)
        except _UNREADABLE as error:
            raise CheckpointError(f"{self._history_path} cannot be read: {error}") from error
        if [record.round for record in history] != list(range(last_round + 1)):
            raise CheckpointError(
                f"{self._history_path} does not fit the checkpoint, which is after round "
                f"{last_round}; remove both to start afresh"
            )
        if digest != _digest(b"".join(lines)).hex():
            raise CheckpointError(
                f"{self._history_path} was changed since it was written (its checksum does not "
                "fit); remove it and the checkpoint to start afresh"
            )
        return history


def _line(record: RoundRecord) -> bytes:
    return json.dumps(record.to_json()).encode() + b"\n"
