"""The common frame: what a paper's experiment or a study of our own consists of.

A `Study` has *cells*, runs of `simulations.run` of which quantities are read off, or a function
`measure` where what counts is no result of a run. From either come `Findings`
(`simulations.reproduce.findings`), and from these one table, one picture and one page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from simulations.command_line import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulations.reproduce.findings import Finding, Findings

OURS = "Studies of our own"
# The bundled data set, which can stand in for all others, and its public samples for 1000.
STAND_IN = "digits"
_DIGITS_PUBLIC = 200
# Data sets that are made of digits, whatever their base.
_ON_DIGITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("permuted", "tweets"), ("dataset=permuted",)),
    "parity": ("dataset=parity", f"dataset.public={_DIGITS_PUBLIC}"),
}


@dataclass(frozen=True)
class Scope:
    """How to run a study: what the command line has beside its name.

    Parameters
    ----------
    output : Path
        Where everything is written; studies share it.
    quick : bool
        The version of a few minutes and one seed, which keeps the experiment's shape.
    dataset : str, optional
        The data set to use instead of the study's own; for papers only digits.
    seeds : int, optional
        How many seeds, 0 and up, instead of the study's own number.
    jobs : int
        Processes side by side.
    data_dir : str, optional
        Where data sets are.
    overrides : tuple of str
        Further options, as those of ``python -m simulations.run``; for studies of our own.
    """

    output: Path = Path("runs", "reproduce")
    quick: bool = False
    dataset: str | None = None
    seeds: int | None = None
    jobs: int = 2
    data_dir: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def stand_in(self) -> bool:
        """Whether digits stand in for the paper's data."""
        return self.dataset == STAND_IN

    def data(self, name: str, *own: str) -> tuple[str, ...]:
        """Return the overrides that choose a paper's data set, or what stands in for it."""
        if not self.stand_in:
            return (f"dataset={name}", *own)
        base = ("dataset.base=digits",)
        return (*_ON_DIGITS[name], *base) if name in _ON_DIGITS else ("dataset=digits",)

    def public(self, samples: int) -> int:
        """Return how many public samples there are for that many of the paper's 1000."""
        return samples * _DIGITS_PUBLIC // 1000 if self.stand_in else samples

    def pick(self, full: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """Return the grid for this scope."""
        return quick if self.quick else full

    @property
    def common(self) -> list[str]:
        """What is added to every run."""
        folder = [f"data_dir={self.data_dir}"] if self.data_dir else []
        return [*folder, *self.overrides]


@dataclass(frozen=True)
class Cell:
    """One run, repeated for every seed, and where its numbers stand.

    Parameters
    ----------
    setting, method : str
        Row and column of the paper's table, such as ``MNIST, 5 nodes`` and ``Averaged``.
    overrides : tuple of str
        What `python -m simulations.run` gets beside the experiment.
    reads : tuple of str
        Names of `simulations.reproduce.measures`.
    x : float, optional
        Where the run stands on a figure's axis.
    seeds : int, optional
        The most seeds that a dear run is repeated for; by default all of the study's.
    """

    setting: str
    method: str
    overrides: tuple[str, ...]
    reads: tuple[str, ...] = ("accuracy",)
    x: float | None = None
    seeds: int | None = None


@dataclass(frozen=True)
class DoneRun:
    """A finished run: what it was for, and where its files are."""

    cell: Cell
    folder: Path


# Gets overrides, a seed, a folder to keep things in, and a console for progress.
Measure = Callable[[Sequence[str], int, Path, Console], "Iterable[Finding]"]


@dataclass(frozen=True)
class Study:
    """An entry of the catalogue.

    Parameters
    ----------
    name : str
        What to type.
    paper : str
        The paper, or `OURS`; entries of one are listed together.
    where, about : str
        Tables or figures; what is asked, in a sentence.
    seeds, minutes : int and float
        What the full version has, and takes on two cores.
    cells : callable, optional
        Gets the `Scope`, returns the runs.
    experiment, base : str and tuple of str
        The config in ``conf/experiment`` that runs begin with, and overrides of all of them.
    measure : callable, optional
        Instead of cells; returns findings of one seed.
    judge : callable, optional
        Looks at all finished runs of a seed together; returns findings of that seed.
    derive : callable, optional
        Adds findings that need several runs.
    draw : callable, optional
        Gets the findings, returns a figure.
    shown : tuple of str
        Quantities of the table on the screen and on the page; all by default.
    quick : tuple of str
        Overrides of the quick version.
    differs : str
        How it differs from the paper's setting.
    has_stand_in : bool
        Whether the bundled digits can take the place of its data.
    only_kept : tuple of str
        Methods that the library no longer has; what was kept of them stays.
    """

    name: str
    paper: str
    where: str
    about: str
    seeds: int
    minutes: float
    cells: Callable[[Scope], Sequence[Cell]] | None = None
    experiment: str = ""
    base: tuple[str, ...] = ()
    measure: Measure | None = None
    judge: Callable[[Sequence[DoneRun], Scope], list[Finding]] | None = None
    derive: Callable[[Findings], None] | None = None
    draw: Callable[[Findings], Figure] | None = None
    shown: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    differs: str = ""
    has_stand_in: bool = True
    only_kept: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether it is no paper's, so that its options may be changed."""
        return self.paper == OURS

    def file(self, scope: Scope) -> Path:
        """Return where the findings of this version are written."""
        words = (self.name, "quick" if scope.quick else "", scope.dataset or "")
        key = "-".join(filter(None, words))
        return scope.output / key / f"{key}.json"

    def seeds_of(self, scope: Scope) -> range:
        """Return the seeds that are asked for."""
        return range(scope.seeds or (1 if scope.quick else self.seeds))

    def cells_of(self, scope: Scope, seed: int) -> list[Cell]:
        """Return the runs of a seed: without the dear ones that have fewer seeds of their own."""
        assert self.cells is not None
        many = scope.seeds is not None
        return [c for c in self.cells(scope) if many or c.seeds is None or seed < c.seeds]

    def check(self, scope: Scope) -> None:
        """Refuse what would make it another experiment, before anything runs."""
        if self.is_ours:
            return
        complaint = ""
        if scope.dataset is not None and not self.has_stand_in:
            complaint = f"data that nothing can stand in for: leave --dataset {scope.dataset} out"
        elif scope.dataset not in (None, STAND_IN):
            complaint = f"the paper's data: --dataset must be {STAND_IN}, got '{scope.dataset}'"
        elif scope.overrides:
            complaint = f"the paper's settings, got '{scope.overrides[0]}'; its runs' folders have "
            complaint += "the commands, which can be changed"
        if complaint:
            raise UsageError(f"{self.name} has {complaint}")

    def overrides(self, cell: Cell, scope: Scope, seed: int) -> list[str]:
        """Return the overrides of one run; what a cell sets counts for more than the rest."""
        own = {each.split("=")[0].lstrip("+~") for each in cell.overrides}
        first = [f"experiment={self.experiment}"] if self.experiment else []
        first = [word for word in (*first, *self.base) if word.split("=")[0] not in own]
        shorter = [w for w in (self.quick if scope.quick else ()) if w.split("=")[0] not in own]
        if scope.stand_in and not self.is_ours:
            # The digits are so few that few epochs would teach nothing, and many take no time.
            shorter = [each for each in shorter if not each.startswith("train.")]
        return [*first, *cell.overrides, *shorter, *self.common(scope), f"seed={seed}"]

    def common(self, scope: Scope) -> list[str]:
        """Return what the command line adds to every run."""
        chosen = [f"dataset={scope.dataset}"] if scope.dataset and self.is_ours else []
        return [*chosen, *scope.common]


def options(values: Mapping[str, Any], prefix: str = "strategy") -> tuple[str, ...]:
    """Return a strategy's options as overrides; a key that begins with a slash is a group."""
    return tuple(
        f"{prefix}{key}={value}" if key.startswith("/") else f"{prefix}.{key}={value}"
        for key, value in values.items()
    )
