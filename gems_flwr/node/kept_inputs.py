"""Inputs of a node's output layer from one message to the next: computed once in a run.

They are in memory, for all nodes of a process together, and in a folder where the owner names one,
since messages may be answered by a process each. `LayerReader.read` compares the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from gems_flwr.core.disk import write_atomically
from gems_flwr.core.log import log_warning
from gems_flwr.errors import DiskError

Found = tuple[bytes, Tensor]  # digests of all batches, and the inputs

# What was used last at the end; with the version of the inputs, which a change in place raises.
_memory: dict[tuple[str, bytes], tuple[Found, int]] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class KeptInputs:
    """What is kept of one part of a node's data; at most so many bytes with all others."""

    owner: str
    most: int
    folder: str | Path | None

    def find(self, key: bytes) -> Found | None:
        """Return what was kept last, if it is still there and whole."""
        with _lock:
            found, version = _memory.pop((self.owner, key), (None, 0))
            if found and found[1]._version == version:
                _memory[self.owner, key] = found, version
                return found
        with contextlib.suppress(OSError):
            path = self._path(key)
            data = path.read_bytes() if path else b""
            if path and hashlib.blake2b(data[64:]).digest() == data[:64]:
                path.touch()
                ((digests, inputs),) = load(data[64:]).items()
                self._remember(key, found := (bytes.fromhex(digests), inputs))
                return found
        return None

    def keep(self, key: bytes, found: Found) -> None:
        """Keep inputs in place of those used least recently, unless they are too many."""
        if found[1].nbytes > self.most or found[1].is_inference():
            return
        self._remember(key, found)
        if (path := self._path(key)) is None:
            return
        body = save({found[0].hex(): found[1].contiguous()})
        try:
            write_atomically(path, hashlib.blake2b(body).digest() + body, private=True)
            # Those of a process that was killed have another ending.
            files = sorted((f.stat().st_mtime_ns, f) for f in path.parent.glob("*gems-inputs*"))
            while sum(file.stat().st_size for _, file in files) > self.most:
                files.pop(0)[1].unlink()
        except (DiskError, OSError) as error:
            log_warning("inputs_not_kept", reason=str(error))

    def _remember(self, key: bytes, found: Found) -> None:
        with _lock:
            _memory[self.owner, key] = found, found[1]._version
            while sum(kept.nbytes for (_, kept), _ in _memory.values()) > self.most:
                _memory.pop(next(iter(_memory)))

    def _path(self, key: bytes) -> Path | None:
        name = hashlib.blake2b(self.owner.encode(), key=key, digest_size=16).hexdigest()
        folder = None if self.folder is None else Path(self.folder).expanduser()
        return folder and folder / f"gems-inputs-{name}"
