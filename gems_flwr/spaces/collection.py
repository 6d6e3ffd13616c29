"""A folder of spaces: one safetensors file per node, added to as nodes come in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from gems_flwr.disk import disk_faults, make_folder
from gems_flwr.spaces.files import Space, load_space, save_space

SUFFIX = ".space.safetensors"


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
            save_space(self._path(self.folder, node), space, private=True)

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
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        return {unquote(path.name.removesuffix(SUFFIX)): load_space(path) for path in paths}

    @staticmethod
    def _path(folder: Path, node: str) -> Path:
        return folder / f"{quote(node, safe='')}{SUFFIX}"
