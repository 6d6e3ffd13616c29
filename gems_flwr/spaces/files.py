"""Spaces as safetensors files, and as a folder with a file for each node.

No pickle anywhere: the metadata of a file hold one JSON text and a checksum, and reading runs the
same checks as building. In a folder a file is called as its node is; where that would be too long,
it ends in a digest, and the name itself stands in the file's header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gems_flwr.bounds import MAX_FILE_NAME_BYTES
from gems_flwr.core import disk
from gems_flwr.errors import SpaceError, shown
from gems_flwr.spaces.ball.ball import BallSpace  # noqa: F401 - it registers itself
from gems_flwr.spaces.cone.cone import ClassMomentCone  # noqa: F401 - likewise
from gems_flwr.spaces.convex import Space, space_from_arrays, take

FORMAT = "gems-space"
VERSION = 1
SUFFIX = ".space.safetensors"
# While it is written, a file has a dot before its name, and a process id and ".tmp" after it.
_BESIDE_BYTES = 20
_LONGEST_STEM = MAX_FILE_NAME_BYTES - len(SUFFIX) - _BESIDE_BYTES


def save_space(
    path: str | Path, space: Space, *, node: str | None = None, private: bool = False
) -> int:
    """Write a space to a safetensors file, replaced at once, and return its size in bytes.

    Parameters
    ----------
    path : path
        Where to.
    space : Space
        What to write.
    node : str, optional
        Whose it is, where the file's name does not say so.
    private : bool
        Whether only the owner may read the file.

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
    header[disk.CHECKSUM] = disk.checksum(contiguous, header)
    with disk.replacing(Path(path), private=private) as temporary:
        save_file(contiguous, str(temporary), metadata=header)
    return Path(path).stat().st_size


def load_space(path: str | Path) -> Space:
    """Read a space from a file that `save_space` wrote.

    A SpaceError that begins with the file's name if it is not one of ours, or malformed.
    """
    return _read(path)[0]


def _read(path: str | Path) -> tuple[Space, str | None]:
    """Return the space in a file, and whose it is, where the file says so."""
    name = Path(path).name
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = file.metadata() or {}
            for key, wanted in (("format", FORMAT), ("version", str(VERSION))):
                if header.get(key) != wanted:
                    raise SpaceError(key, wanted, shown(header.get(key)))
            meta = json.loads(take(header, "meta", "the file's header"))
            if not isinstance(meta, dict):
                raise SpaceError("meta", "a JSON object", shown(meta))
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            disk.verify_checksum(header, arrays)
            node = json.loads(header.get("node", "null"))
        return space_from_arrays(arrays, meta), node if isinstance(node, str) else None
    except SpaceError as error:
        raise SpaceError(f"{name}: {error.key}", error.expected, error.got) from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SpaceError(name, "a safetensors file with a space", error) from error


class SpaceFolder:
    """The spaces that a server has received, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, spaces: Mapping[str, Space]) -> None:
        """Write each node's space, replacing what the node had sent before."""
        # What single nodes sent is for the server alone.
        disk.make_folder(self.folder, private=True)
        for node, space in spaces.items():
            path = self._path(node)
            named = unquote(path.name.removesuffix(SUFFIX)) == node
            save_space(path, space, node=None if named else node, private=True)

    def clear(self, but: Collection[str] = ()) -> None:
        """Forget all spaces but those of some nodes."""
        stay = {self._path(node) for node in but}
        for path in set(self.folder.glob(f"*{SUFFIX}")) - stay:
            with disk.disk_faults(f"remove {path}"):
                path.unlink(missing_ok=True)

    def load(self) -> dict[str, Space]:
        """Return the spaces by node."""
        spaces = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            space, node = _read(path)
            spaces[node or unquote(path.name.removesuffix(SUFFIX))] = space
        return spaces

    def _path(self, node: str) -> Path:
        return self.folder / f"{file_stem(node)}{SUFFIX}"


def file_stem(node: str) -> str:
    """Return the stem of a node's file: at most 228 plain characters."""
    quoted = quote(node, safe="")
    if len(quoted) <= _LONGEST_STEM:
        return quoted
    digest = hashlib.blake2b(node.encode(), digest_size=16).hexdigest()
    return f"{quoted[: _LONGEST_STEM - len(digest) - 1]}~{digest}"
