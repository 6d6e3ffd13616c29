"""Every table and figure of the sources, and where its numbers are: `items.yaml`, read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ITEMS = Path(__file__).with_name("items.yaml")
# What can be said of something that is not measured.
NO_RESULT, DOES_NOT_FIT = "no result", "does not fit"


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper; `items.yaml` says what the fields mean."""

    paper: str
    where: str
    shows: str
    reads: str = ""
    settings: str = ""
    verdict: str = ""
    says: str = ""

    def __post_init__(self) -> None:
        """Refuse a row that says twice, or not at all, how it is judged."""
        if self.reads and self.verdict:
            raise ValueError(f"{self.name}: what is measured has no verdict by hand")
        if not self.reads and self.verdict not in (NO_RESULT, DOES_NOT_FIT):
            raise ValueError(
                f"{self.name}: needs the reproduction that it reads, or one of '{NO_RESULT}' and "
                f"'{DOES_NOT_FIT}', got '{self.verdict}'"
            )

    @property
    def name(self) -> str:
        """Paper and place, such as ``GEMS 2019, Table 1``."""
        return f"{self.paper}, {self.where}"


@cache
def all_items() -> Sequence[Item]:
    """Return the rows in the order of the file."""
    content: Any = OmegaConf.to_container(OmegaConf.load(ITEMS))
    return tuple(Item(paper, **row) for paper, rows in content.items() for row in rows)
