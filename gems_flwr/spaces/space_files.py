"""Spaces as plain arrays, as safetensors files, and as a folder with a file for each node.

For nodes that are never online together: a node writes its space, a server reads any number
of them. No pickle anywhere: a file is a safetensors file whose metadata hold one JSON text and a
checksum, and reading runs the same checks as building. Files without a checksum are of the time
before there were any.

In a folder a file is called as its node is. Where a name would make too long a file name, the
file's begins like it and ends in a digest of it, and the name itself stands in the file's header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gems_flwr.bounds import MAX_FILE_NAME_BYTES
from gems_flwr.disk.faults import disk_faults
from gems_flwr.disk.files import CHECKSUM, checksum, replacing, verify_checksum
from gems_flwr.disk.lock import make_folder
from gems_flwr.errors import OptionError, SpaceError
from gems_flwr.spaces.ball import BallSet, BallSpace
from gems_flwr.spaces.checks import take
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.convex_set import ConvexSet
from gems_flwr.spaces.ellipsoid import EllipsoidSpace

Space = BallSpace | EllipsoidSpace | BallSet | ClassMomentCone | ConvexSet

FORMAT = "gems-space"
VERSION = 1


# By kind; see `register_space`.
_SPACES: dict[str, type[Any]] = {
    space.kind: space for space in (BallSpace, EllipsoidSpace, BallSet, ClassMomentCone)
}


def register_space(space: type[ConvexSet]) -> None:
    """Let replies and files hold another kind of space.

    Parameters
    ----------
    space : type
        A `ConvexSet`. Its `kind` is that of the request by which nodes are asked for it, a
        `gems_flwr.wire.space_requests.SpaceRequest`.

    Raises
    ------
    OptionError
        If another class has that kind.
    """
    known = _SPACES.setdefault(space.kind, space)
    if (known.__module__, known.__qualname__) != (space.__module__, space.__qualname__):
        raise OptionError(f"kind '{space.kind}' is that of {known.__module__}.{known.__qualname__}")


def space_to_arrays(space: Space) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return a space as a dict of arrays and a dict of JSON values."""
    return space.to_arrays()


def space_from_arrays(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Space:
    """Build the space that the arrays describe.

    Raises
    ------
    SpaceError
        If the kind is unknown or anything about the space is malformed.
    """
    kind = take(meta, "kind", "the space's meta")
    if not isinstance(kind, str) or kind not in _SPACES:
        raise SpaceError("kind", f"one of {list(_SPACES)}", repr(kind))
    space: Space = _SPACES[kind].from_arrays(arrays, meta)
    return space


def save_space(
    path: str | Path, space: Space, *, node: str | None = None, private: bool = False
) -> int:
    """Write a space to a safetensors file and return its size in bytes.

    Parameters
    ----------
    path : path
        Replaced at once: a reader sees the old file or the new one.
    space : Space
        What to write.
    node : str, optional
        Whose it is, where the file's name does not say so.
    private : bool
        Whether nobody but the owner may read the file.

    Raises
    ------
    DiskError
        If it cannot be written; what was there before is unchanged.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from gems_flwr import build_cone, load_space, save_space
    >>> cone = build_cone(torch.randn(200, 3), torch.arange(200) % 2, num_classes=2)
    >>> with TemporaryDirectory() as folder:
    ...     size = save_space(Path(folder, "north.safetensors"), cone)
    ...     load_space(Path(folder, "north.safetensors")).num_classes
    2
    """
    arrays, meta = space.to_arrays()
    contiguous = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    header = {"format": FORMAT, "version": str(VERSION), "meta": json.dumps(meta)}
    if node is not None:
        header["node"] = json.dumps(node)
    header[CHECKSUM] = checksum(contiguous, header)
    with replacing(Path(path), private=private) as temporary:
        save_file(contiguous, str(temporary), metadata=header)
    return Path(path).stat().st_size


def node_in_file(path: str | Path) -> str | None:
    """Return whose space a file holds, where it says so.

    Raises
    ------
    SpaceError
        If the file cannot be read.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            node = json.loads((file.metadata() or {}).get("node", "null"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SpaceError(Path(path).name, "a safetensors file with a space", error) from error
    return node if isinstance(node, str) else None


def load_space(path: str | Path) -> Space:
    """Read a space from a safetensors file.

    Raises
    ------
    SpaceError
        If the file is not one of ours or the space in it is malformed; the message
        begins with the file's name.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from gems_flwr import build_cone, load_space, save_space
    >>> cone = build_cone(torch.randn(200, 3), torch.arange(200) % 2, num_classes=2)
    >>> with TemporaryDirectory() as folder:
    ...     size = save_space(Path(folder, "north.safetensors"), cone)
    ...     load_space(Path(folder, "north.safetensors")).kind
    'cone'
    """
    name = Path(path).name
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise SpaceError("format", FORMAT, repr(header.get("format")))
            if header.get("version") != str(VERSION):
                raise SpaceError("version", str(VERSION), repr(header.get("version")))
            meta = json.loads(take(header, "meta", "the file's header"))
            if not isinstance(meta, dict):
                raise SpaceError("meta", "a JSON object", repr(meta)[:80])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            verify_checksum(header, arrays, {"format", "version", "meta", "node"})
        return space_from_arrays(arrays, meta)
    except SpaceError as error:
        raise SpaceError(f"{name}: {error.key}", error.expected, error.got) from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SpaceError(name, "a safetensors file with a space", error) from error


SUFFIX = ".space.safetensors"
# While it is written, a file has a dot before its name, and a process id and ".tmp" after it.
_BESIDE_BYTES = 20
_LONGEST_STEM = MAX_FILE_NAME_BYTES - len(SUFFIX) - _BESIDE_BYTES


class SpaceFolder:
    """The spaces that a server has received.

    Parameters
    ----------
    folder : Path, optional
        Where the files go; without it nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def save(self, spaces: Mapping[str, Space]) -> None:
        """Write each node's space, replacing what the node had sent before.

        Raises
        ------
        DiskError
            If one cannot be written.
        """
        if self.folder is None:
            return
        # What single nodes sent is nobody's business but the server's.
        make_folder(self.folder, private=True)
        for node, space in spaces.items():
            path = self._path(self.folder, node)
            named = unquote(path.name.removesuffix(SUFFIX)) == node
            save_space(path, space, node=None if named else node, private=True)

    def clear(self, but: Collection[str] = ()) -> None:
        """Forget all spaces but those of some nodes."""
        if self.folder is not None and self.folder.is_dir():
            stay = {self._path(self.folder, node) for node in but}
            for path in set(self.folder.glob(f"*{SUFFIX}")) - stay:
                with disk_faults(f"remove {path}"):
                    path.unlink()

    def remove(self, nodes: Iterable[str]) -> None:
        """Forget the spaces of some nodes.

        Raises
        ------
        DiskError
            If a file is there and cannot be removed.
        """
        if self.folder is not None:
            for path in [self._path(self.folder, node) for node in nodes]:
                with disk_faults(f"remove {path}"):
                    path.unlink(missing_ok=True)

    def load(self) -> dict[str, Space]:
        """Return the spaces by node.

        Raises
        ------
        SpaceError
            If a file is damaged; the message begins with its name.
        """
        if self.folder is None or not self.folder.is_dir():
            return {}
        spaces = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            space = load_space(path)
            spaces[node_in_file(path) or unquote(path.name.removesuffix(SUFFIX))] = space
        return spaces

    @staticmethod
    def _path(folder: Path, node: str) -> Path:
        return folder / f"{file_stem(node)}{SUFFIX}"


def file_stem(node: str) -> str:
    """Return what a node's file is called, but for its ending: at most 228 plain characters."""
    quoted = quote(node, safe="")
    if len(quoted) <= _LONGEST_STEM:
        return quoted
    digest = hashlib.blake2b(node.encode(), digest_size=16).hexdigest()
    return f"{quoted[: _LONGEST_STEM - len(digest) - 1]}~{digest}"
