"""A folder of spaces: one safetensors file per node, added to as nodes come in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

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
        """Write each node's space, replacing what the node had sent before."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for node, space in spaces.items():
            path = self.folder / f"{quote(node, safe='')}{SUFFIX}"
            beside = path.with_name(f".{path.name}.tmp")
            save_space(beside, space)
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
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        return {unquote(path.name.removesuffix(SUFFIX)): load_space(path) for path in paths}
