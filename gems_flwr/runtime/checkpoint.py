"""A run's state on disk: after a crash nothing that was received is asked for again.

A folder holds

- ``checkpoint.safetensors``: arrays as safetensors, everything else as JSON in the same file's
  header. One file, written beside and renamed, so it is either the old state or the new one.
- ``inbox/``: replies of the round under way, each exactly as it came (Flower's own protobuf
  form), written before it is used and removed once the round's checkpoint is safe. On resume
  they pass the same validation as on the wire.

Both carry a checksum, so that a flipped bit in a number is noticed; files of the time before there
were checksums are read without. Both are for the owner's eyes only. Nothing here unpickles.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gems_flwr.disk.faults import disk_faults
from gems_flwr.disk.files import CHECKSUM, checksum, replacing, verify_checksum, write_atomically
from gems_flwr.disk.lock import make_folder
from gems_flwr.errors import CheckpointError
from gems_flwr.runtime.flower_internals import records_from_bytes, records_to_bytes

FORMAT = "gems-flwr-1"
_FILE = "checkpoint.safetensors"
_INBOX = "inbox"
# What a kept reply begins with, followed by its digest. Protobuf has no field 0, so no reply of the
# time before begins so, nor does this with one bit flipped read as one.
_REPLY_MARK = b"\0\0gems-reply\n"
_DIGEST_BYTES = 16
# How the file of a node's reply ends that goes by ``#`` and its id; see `server.nodes`.
_UNNAMED = re.compile(r"-%23\d+-[0-9a-f]{8}\.reply$")

Groups = Mapping[str, Mapping[str, NDArray]]


def save_arrays(path: Path, groups: Groups, meta: Mapping[str, Any]) -> None:
    """Write groups of arrays and a JSON value into one safetensors file, atomically.

    Raises
    ------
    DiskError
        If it cannot be written; what was there before is unchanged.
    """
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
    """Read what `save_arrays` wrote.

    Raises
    ------
    CheckpointError
        If the file is damaged, or not ours.
    """
    tensors: dict[str, NDArray] = {}
    groups: dict[str, dict[str, NDArray]] = {}
    unreadable = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a {FORMAT} file")
            for key in json.loads(header["order"]):
                group, name = key.split("/", 1)
                tensors[key] = groups.setdefault(group, {})[name] = file.get_tensor(key)
            verify_checksum(header, tensors, {"format", "order", "meta"})
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
        """Write the state of a finished round, then empty the inbox.

        Raises
        ------
        DiskError
            If the state cannot be written; the state before it and the inbox are unchanged.
        """
        save_arrays(self.folder / _FILE, groups, meta)
        # Replies of a round that is done are never looked for again: litter at worst.
        shutil.rmtree(self.folder / _INBOX, ignore_errors=True)

    def replace_state(self, groups: Groups, meta: Mapping[str, Any]) -> None:
        """Write another state of the same round; the inbox stays.

        Raises
        ------
        DiskError
            If it cannot be written; the state before it is unchanged.
        """
        save_arrays(self.folder / _FILE, groups, meta)

    def load(self) -> tuple[dict[str, dict[str, NDArray]], dict[str, Any]] | None:
        """Return the last saved state, or None where there is none yet."""
        path = self.folder / _FILE
        return load_arrays(path) if path.exists() else None

    def is_empty(self) -> bool:
        """Whether there is nothing to go on from: neither a state nor a reply."""
        return not (self.folder / _FILE).exists() and not self.has_replies()

    def clear(self) -> None:
        """Forget everything: a new run begins in this folder.

        Raises
        ------
        DiskError
            If something cannot be removed.
        """
        path, inbox = self.folder / _FILE, self.folder / _INBOX
        with disk_faults(f"remove {path}"):
            path.unlink(missing_ok=True)
        with disk_faults(f"remove {inbox}"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(inbox)

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

        Raises
        ------
        DiskError
            If it cannot be written.
        """
        data = records_to_bytes(content)
        make_folder(self.folder / _INBOX, private=True)
        path = self._reply_path(exchange, node)
        write_atomically(path, _REPLY_MARK + _digest(data) + data, private=True)

    def kept_reply(self, exchange: str, node: str) -> RecordDict | None:
        """Return the reply that was kept, or None; a damaged one counts as none."""
        path = self._reply_path(exchange, node)
        try:
            data = _checked(path.read_bytes())
            return records_from_bytes(data)
        except FileNotFoundError:
            return None
        except Exception:  # protobuf and Flower raise many kinds; the node is simply asked again
            self.drop_reply(exchange, node)
            return None

    def drop_reply(self, exchange: str, node: str) -> None:
        """Forget a reply that proved unusable, so that a resumed run asks the node again."""
        # If it cannot be removed, it proves unusable again.
        with contextlib.suppress(OSError):
            self._reply_path(exchange, node).unlink(missing_ok=True)

    def drop_replies_of(self, node: str, *, but: str | None) -> None:
        """Forget all that a node has sent, but its reply to one exchange.

        Raises
        ------
        DiskError
            If something cannot be removed.
        """
        stays = None if but is None else self._reply_path(but, node)
        for path in (self.folder / _INBOX).glob(f"*-{_of_node(node)}"):
            if path != stays:
                with disk_faults(f"remove {path}"):
                    path.unlink()

    def has_replies(self) -> bool:
        """Whether an interrupted round left replies behind."""
        return any((self.folder / _INBOX).glob("*"))

    def has_named_replies(self) -> bool:
        """Whether any of them is of a node that went by a name, and not by its id alone."""
        return any(not _UNNAMED.search(path.name) for path in (self.folder / _INBOX).glob("*"))

    def _reply_path(self, exchange: str, node: str) -> Path:
        return self.folder / _INBOX / f"{quote(exchange, safe='')}-{_of_node(node)}"


def _of_node(node: str) -> str:
    """Return what the file of a node's reply ends in."""
    # Names come from nodes: quoted they cannot leave the folder, cut they fit a file name,
    # and the digest keeps two long ones apart.
    digest = hashlib.blake2b(node.encode(), digest_size=4).hexdigest()
    return f"{quote(node, safe='')[:60]}-{digest}.reply"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _checked(kept: bytes) -> bytes:
    """Return what a kept reply holds; one without a checksum is from the time before."""
    if not kept:
        raise ValueError("the file is empty")
    if not kept.startswith(_REPLY_MARK):
        return kept
    start = len(_REPLY_MARK) + _DIGEST_BYTES
    data = kept[start:]
    if kept[len(_REPLY_MARK) : start] != _digest(data):
        raise ValueError("the checksum does not fit")
    return data
