"""A folder of spaces: one safetensors file per node, added to as nodes come in.

A file is called as its node is. Where a name would make too long a file name, the file's begins
like it and ends in a digest of it, and the name itself stands in the file's header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from gems_flwr.bounds import MAX_FILE_NAME_BYTES
from gems_flwr.spaces.files import Space, load_space, node_in_file, save_space

SUFFIX = ".space.safetensors"
# While it is written, a file has these around its name.
_BESIDE = (".", ".tmp")
_LONGEST_STEM = MAX_FILE_NAME_BYTES - len(SUFFIX) - sum(map(len, _BESIDE))


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
        """Write each node's space, replacing what the node had sent before."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for node, space in spaces.items():
            stem = file_stem(node)
            path = self.folder / f"{stem}{SUFFIX}"
            beside = path.with_name(f"{_BESIDE[0]}{path.name}{_BESIDE[1]}")
            save_space(beside, space, node=node if unquote(stem) != node else None)
            beside.replace(path)

    def clear(self) -> None:
        """Forget all spaces."""
        if self.folder is not None and self.folder.is_dir():
            for path in self.folder.glob(f"*{SUFFIX}"):
                path.unlink()

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


def file_stem(node: str) -> str:
    """Return what a node's file is called, but for its ending: at most 228 plain characters."""
    quoted = quote(node, safe="")
    if len(quoted) <= _LONGEST_STEM:
        return quoted
    digest = hashlib.blake2b(node.encode(), digest_size=16).hexdigest()
    return f"{quoted[: _LONGEST_STEM - len(digest) - 1]}~{digest}"
