"""What an entry of the catalogue has, and what the command line can ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console


@dataclass(frozen=True)
class Options:
    """How to run an entry: what the command line says beside its name.

    Parameters
    ----------
    output : Path
        Where everything is written; entries share it.
    quick : bool
        The version of a few minutes, which keeps the experiment's shape.
    dataset : str, optional
        The data set to use instead of the entry's own.
    seeds : int, optional
        How many seeds, 0 and up, instead of the entry's own number.
    jobs : int, optional
        Processes side by side; two by default.
    data_dir : str, optional
        Where data sets are.
    overrides : tuple of str
        Further options, as those of ``python -m simulations.run``.
    lockstep : bool
        Whether papers' nodes train together (``backend=lockstep``) where they can.
    """

    output: Path
    quick: bool = False
    dataset: str | None = None
    seeds: int | None = None
    jobs: int | None = None
    data_dir: str | None = None
    overrides: tuple[str, ...] = ()
    lockstep: bool = False


class Entry(Protocol):
    """An experiment of a paper, or a study."""

    @property
    def name(self) -> str:
        """What to type."""
        ...

    @property
    def about(self) -> str:
        """What it shows, in a sentence."""
        ...

    @property
    def paper(self) -> str:
        """The paper; entries of one are listed together."""
        ...

    @property
    def where(self) -> str:
        """The tables or figures; may be empty."""
        ...

    @property
    def seeds(self) -> int:
        """How many seeds the full version has."""
        ...

    @property
    def minutes(self) -> float:
        """What the full version takes with all seeds, on two cores."""
        ...

    @property
    def quick_minutes(self) -> float | None:
        """What the quick version takes with the real data on one processor; None if not known."""
        ...

    @property
    def in_processes(self) -> bool:
        """Whether its runs are shared out among processes, and its findings can be published."""
        ...

    def check(self, options: Options) -> None:
        """Refuse what this entry cannot do, before anything runs.

        Raises
        ------
        UsageError
            Names the option and what can be done instead.
        """
        ...

    def run(self, options: Options, console: Console) -> int:
        """Run it and show what it found; return how many runs failed."""
        ...
