"""A folder of spaces: one safetensors file per node, added to as nodes come in.

A file is called as its node is. Where a name would make too long a file name, the file's begins
like it and ends in a digest of it, and the name itself stands in the file's header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from gems_flwr.bounds import MAX_FILE_NAME_BYTES
from gems_flwr.disk import disk_faults, make_folder
from gems_flwr.spaces.files import Space, load_space, node_in_file, save_space

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
