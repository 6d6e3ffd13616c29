"""The total of a sum over nodes, as a file: what a server keeps that never saw a single summand.

The numbers are those of the rings (`gems_flwr.secure.fixed_point`), not the reals that they stand
for: whole numbers add and subtract without rounding, so a total without a node is, to the last bit,
the total of the others. Beside them stand the layout, who is in it, and what the sections mean.

The file is a safetensors file with one array, one JSON text and a checksum, for the owner's eyes
only. Whoever has two totals that differ by one node has what that node added.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gems_flwr.disk.files import (
    CHECKSUM,
    checksum,
    contents_digest,
    replacing,
    verify_checksum,
)
from gems_flwr.errors import OptionError, SecureSumError, SpaceError
from gems_flwr.secure.fixed_point import Layout, Section, Words

FORMAT = "gems-total"
VERSION = "1"
_HEADER = {"format", "version", "meta"}


@dataclasses.dataclass(frozen=True, eq=False)
class KeptTotal:
    """A sum over nodes in the rings of its layout.

    Parameters
    ----------
    layout : Layout
        Of every summand.
    words : uint64 array of shape (layout.size,)
        The sum, reduced to the rings.
    nodes : tuple of str
        Who is in it, by name; at most as many as the layout has room for.
    about : mapping
        What the sections mean, as plain JSON values.

    Raises
    ------
    SpaceError
        If the words do not fit the layout.
    SecureSumError
        If nobody is in it, somebody twice, or more than there is room for.
    """

    layout: Layout
    words: Words
    nodes: tuple[str, ...]
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        check_words(self.layout, self.words)
        if not 0 < len(set(self.nodes)) == len(self.nodes) <= self.layout.nodes:
            raise SecureSumError(
                f"a total is of 1 to {self.layout.nodes} different nodes, got {len(self.nodes)}"
            )

    @property
    def note(self) -> TotalNote:
        """What a node has to know of the total to leave it: everything but the numbers."""
        texts = {"meta": _meta_text(self)}
        return TotalNote(self.layout, contents_digest({"words": self.words}, texts), self.nodes)


@dataclasses.dataclass(frozen=True)
class TotalNote:
    """A total without its numbers, for nodes that leave it.

    Parameters
    ----------
    layout : Layout
        How a summand is written.
    digest : str
        sha256 of the total.
    nodes : tuple of str
        Who is in it.
    """

    layout: Layout
    digest: str
    nodes: tuple[str, ...]

    def to_json(self) -> str:
        """Return the note as text."""
        values = {"layout": layout_values(self.layout), "digest": self.digest}
        return json.dumps({**values, "nodes": list(self.nodes)})

    @classmethod
    def from_json(cls, text: str) -> TotalNote:
        """Return the note that `to_json` wrote.

        Raises
        ------
        SecureSumError
            If it is none.
        """
        try:
            values = json.loads(text)
            layout = layout_of(values["layout"])
            return cls(layout, str(values["digest"]), tuple(map(str, values["nodes"])))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SecureSumError(f"the note of a total cannot be read: {error}") from error


def check_words(layout: Layout, words: Words) -> None:
    """Refuse numbers that are not elements of a layout's rings.

    Raises
    ------
    SpaceError
        Says what came.
    """
    array = np.asarray(words)
    if array.dtype != np.uint64 or array.shape != (layout.size,):
        came = f"{array.dtype} of shape {array.shape}"
        raise SpaceError("words", f"{layout.size} numbers of 64 bits", came)
    if not np.array_equal(layout.reduced(array), array):
        raise SpaceError("words", "elements of the rings", "larger numbers")


def layout_values(layout: Layout) -> dict[str, Any]:
    """Return a layout as plain JSON values."""
    return {
        "nodes": layout.nodes,
        "sections": [dataclasses.asdict(section) for section in layout.sections],
    }


def layout_of(values: Mapping[str, Any]) -> Layout:
    """Return the layout that `layout_values` described."""
    return Layout([Section(**section) for section in values["sections"]], values["nodes"])


def save_total(path: str | Path, total: KeptTotal) -> None:
    """Write a total; the file is replaced at once.

    Raises
    ------
    DiskError
        If it cannot be written; what was there before is unchanged.
    """
    header = {"format": FORMAT, "version": VERSION, "meta": _meta_text(total)}
    save_words(path, total.words, header)


def load_total(path: str | Path) -> KeptTotal:
    """Read a total.

    Raises
    ------
    SecureSumError
        If the file is damaged, or holds something else.
    """
    words, meta = load_words(path, FORMAT, VERSION)
    try:
        layout = layout_of(meta["layout"])
        return KeptTotal(layout, words, tuple(map(str, meta["nodes"])), dict(meta["about"]))
    except (ValueError, KeyError, TypeError, OptionError) as error:
        raise SecureSumError(f"{path} holds no total: {error}") from error


def is_total(path: str | Path) -> bool:
    """Return whether a file says of itself that it holds a total."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError, ValueError):
        return False


def save_words(path: str | Path, words: Words, header: dict[str, str]) -> None:
    """Write numbers of rings and the texts that say what they are."""
    arrays = {"words": np.ascontiguousarray(words)}
    header = {**header, CHECKSUM: checksum(arrays, header)}
    with replacing(Path(path), private=True) as temporary:
        save_file(arrays, temporary, metadata=header)


def load_words(
    path: str | Path, form: str, version: str
) -> tuple[NDArray[np.uint64], dict[str, Any]]:
    """Return the numbers in a file, and what it says of them.

    Raises
    ------
    SecureSumError
        If the file is damaged, or of another kind.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = file.metadata() or {}
            if (header.get("format"), header.get("version")) != (form, version):
                raise ValueError(f"expected {form} {version}")
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            verify_checksum(header, arrays, _HEADER)
            meta = json.loads(header["meta"])
            if not isinstance(meta, dict) or set(arrays) != {"words"}:
                raise ValueError("it has other contents")
    except (SafetensorError, OSError, ValueError, KeyError, RecursionError) as error:
        raise SecureSumError(f"{path} cannot be read: {error}") from error
    return arrays["words"], meta


def _meta_text(total: KeptTotal) -> str:
    values = {"layout": layout_values(total.layout), "nodes": list(total.nodes)}
    return json.dumps({**values, "about": dict(total.about)}, sort_keys=True)
