"""A run's state on disk: after a crash nothing that was received is asked for again.

A folder holds

- ``checkpoint.safetensors``: arrays as safetensors, everything else as JSON in the same file's
  header. One file, written beside and renamed, so it is either the old state or the new one.
- ``inbox/``: replies of the round under way, each exactly as it came (Flower's own protobuf
  form), written before it is used and removed once the round's checkpoint is safe. On resume
  they pass the same validation as on the wire.

Nothing here unpickles.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gems_flwr.errors import CheckpointError

FORMAT = "gems-flwr-1"
_FILE = "checkpoint.safetensors"
_INBOX = "inbox"

Groups = Mapping[str, Mapping[str, NDArray]]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_arrays(path: Path, groups: Groups, meta: Mapping[str, Any]) -> None:
    """Write groups of arrays and a JSON value into one safetensors file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors wants contiguous arrays and would write a view's whole buffer.
    tensors = {
        f"{group}/{name}": np.ascontiguousarray(array).reshape(array.shape)
        for group, arrays in groups.items()
        for name, array in arrays.items()
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Insertion order is meaning (it is the model's own), so it is kept beside the tensors.
        header = {"format": FORMAT, "order": json.dumps(list(tensors)), "meta": json.dumps(meta)}
        save_file(tensors, temporary, metadata=header)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_arrays(path: Path) -> tuple[dict[str, dict[str, NDArray]], dict[str, Any]]:
    """Read what `save_arrays` wrote.

    Raises
    ------
    CheckpointError
        If the file is damaged, or not ours.
    """
    groups: dict[str, dict[str, NDArray]] = {}
    unreadable = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a {FORMAT} file")
            for key in json.loads(header["order"]):
                group, name = key.split("/", 1)
                groups.setdefault(group, {})[name] = file.get_tensor(key)
            meta = json.loads(header["meta"])
            if not isinstance(meta, dict):
                raise ValueError(f"its meta is {type(meta).__name__}, expected an object")
    except (*unreadable, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); remove it to start afresh"
        ) from error
    return groups, meta


class CheckpointFolder:
    """The checkpoint and the inbox of one run.

    Parameters
    ----------
    folder : Path
        Made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, groups: Groups, meta: Mapping[str, Any]) -> None:
        """Write the state of a finished round, then empty the inbox."""
        save_arrays(self.folder / _FILE, groups, meta)
        self.clear_inbox()

    def load(self) -> tuple[dict[str, dict[str, NDArray]], dict[str, Any]] | None:
        """Return the last saved state, or None where there is none yet."""
        path = self.folder / _FILE
        return load_arrays(path) if path.exists() else None

    def clear(self) -> None:
        """Forget everything: a new run begins in this folder."""
        (self.folder / _FILE).unlink(missing_ok=True)
        self.clear_inbox()

    def clear_inbox(self) -> None:
        """Forget the replies of the round that is done."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / _INBOX)

    def keep_reply(self, exchange: str, node: str, content: RecordDict) -> None:
        """Put a reply on disk before it is used.

        Parameters
        ----------
        exchange : str
            Which exchange of which round, e.g. ``"3-train"``.
        node : str
            The node's name; any text.
        content : RecordDict
            The reply as it came.
        """
        data = recorddict_to_proto(content).SerializeToString()
        write_atomically(self._reply_path(exchange, node), data)

    def kept_reply(self, exchange: str, node: str) -> RecordDict | None:
        """Return the reply that was kept, or None; a damaged one counts as none."""
        path = self._reply_path(exchange, node)
        try:
            return recorddict_from_proto(ProtoRecordDict.FromString(path.read_bytes()))
        except FileNotFoundError:
            return None
        except Exception:  # protobuf and Flower raise many kinds; the node is simply asked again
            path.unlink(missing_ok=True)
            return None

    def drop_reply(self, exchange: str, node: str) -> None:
        """Forget a reply that proved unusable, so that a resumed run asks the node again."""
        self._reply_path(exchange, node).unlink(missing_ok=True)

    def has_replies(self) -> bool:
        """Whether an interrupted round left replies behind."""
        return any((self.folder / _INBOX).glob("*"))

    def _reply_path(self, exchange: str, node: str) -> Path:
        # Names come from nodes: quoted they cannot leave the folder, cut they fit a file name,
        # and the digest keeps two long ones apart.
        digest = hashlib.blake2b(node.encode(), digest_size=4).hexdigest()
        name = f"{quote(exchange, safe='')}-{quote(node, safe='')[:60]}-{digest}.reply"
        return self.folder / _INBOX / name
