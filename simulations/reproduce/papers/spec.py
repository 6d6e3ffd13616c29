"""What a reproduction consists of: runs, what is read off them, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console

from simulations.command_line import UsageError
from simulations.reproduce.entry import Options

if TYPE_CHECKING:
    from simulations.reproduce.papers.findings import Finding, Findings

EXPERIMENTS = Path(__file__).resolve().parents[3] / "conf" / "experiment"
# The bundled data set, which can stand in for all others.
STAND_IN = "digits"

# Data sets that need no files, for those that do.
STAND_INS = {
    "mnist": "digits",
    "fashion_mnist": "digits",
    "cifar10_features": "digits",
    "ham10000_features": "digits",
    "mnist_permuted": "digits_permuted",
    "mnist_parity": "digits_parity",
    "tweets_by_terms": "digits_permuted",
}
_DIGITS_PUBLIC = 200


@dataclass(frozen=True)
class Scope:
    """How much of an experiment is run.

    Parameters
    ----------
    quick : bool
        The version of a few minutes, which keeps the experiment's shape.
    stand_in : bool
        Whether the bundled digits take the place of data that need files.
    """

    quick: bool = False
    stand_in: bool = False

    @classmethod
    def of(cls, options: Options) -> Scope:
        """Return what the command line asks for."""
        return cls(quick=options.quick, stand_in=options.dataset == STAND_IN)

    def dataset(self, name: str) -> str:
        """Return the config of the data set that is used for a paper's."""
        return STAND_INS.get(name, name) if self.stand_in else name

    def public(self, samples: int) -> int:
        """Return how many public samples there are for that many of the paper's 1000."""
        return samples * _DIGITS_PUBLIC // 1000 if self.stand_in else samples

    def pick(self, full: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """Return the grid for this scope."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Cell:
    """One run, repeated for every seed, and where its numbers stand.

    Parameters
    ----------
    setting : str
        What the run is about, such as ``MNIST, 5 nodes``: the row of the paper's table.
    method : str
        The method: the column of the paper's table, or the curve of its figure.
    overrides : tuple of str
        What `python -m simulations.run` gets beside the experiment.
    reads : tuple of str
        Names of `run_measures`, the first one being the most important.
    x : float, optional
        Where the run stands on a figure's axis.
    group : str, optional
        Runs of one group share their nodes' training and are run one after the other; by default
        those of one setting.
    timeline : bool
        Whether loss and bytes of every round are kept, of the first seed.
    seeds : int, optional
        The most seeds that a dear run is repeated for; by default all of the reproduction's.
    """

    setting: str
    method: str
    overrides: tuple[str, ...]
    reads: tuple[str, ...] = ("accuracy",)
    x: float | None = None
    group: str | None = None
    timeline: bool = False
    seeds: int | None = None


@dataclass(frozen=True)
class DoneRun:
    """A finished run: what it was for, and where its files are."""

    cell: Cell
    folder: Path


@dataclass(frozen=True)
class Reproduction:
    """One experiment of a paper: an entry of the catalogue.

    Parameters
    ----------
    name : str
        Of this reproduction, and of its config in ``conf/experiment`` if it has one; cells may
        name another.
    paper, where, about : str
        The paper, its tables or figures, and what is asked in a sentence.
    cells : callable
        Gets the `Scope`, returns the runs.
    draw : callable
        Gets the findings, returns a figure.
    seeds : int
        How many the full version has, as the paper if it says so.
    minutes : float
        What the full version takes with all seeds, on two cores.
    quick : tuple of str
        Overrides of the quick version.
    derive : callable, optional
        Adds findings that need several runs.
    scaled : str
        How it differs from the paper's setting.
    judge : callable, optional
        Looks at all finished runs of a seed together, where what counts is not in their results:
        gets the runs, the `Scope` and the number of processes, returns findings of one seed.
    has_stand_in : bool
        Whether the bundled digits can take the place of its data.
    quick_minutes : float, optional
        What the quick version takes with the real data, in minutes of one processor: measured, or
        told from a part of its runs.
    remembers : bool
        Whether runs of a setting begin with the same training of the nodes, which is then kept.
        Of a hundred rounds of FedAvg it would fill a disk and be of no use.
    """

    name: str
    paper: str
    where: str
    about: str
    cells: Callable[[Scope], Sequence[Cell]]
    draw: Callable[[Findings], Figure]
    seeds: int
    minutes: float
    quick: tuple[str, ...]
    derive: Callable[[Findings], None] | None = None
    scaled: str = ""
    judge: Callable[[Sequence[DoneRun], Scope, int], list[Finding]] | None = None
    has_stand_in: bool = True
    quick_minutes: float | None = None
    remembers: bool = True

    @property
    def in_processes(self) -> bool:
        """Whether its runs are shared out among processes, and its findings can be published."""
        return True

    def seeds_of(self, options: Options) -> range:
        """Return the seeds that are asked for."""
        return range(options.seeds or (1 if options.quick else self.seeds))

    def cells_of(self, options: Options, seed: int) -> list[Cell]:
        """Return the runs of a seed: without the dear ones that have fewer seeds of their own."""
        cells = self.cells(Scope.of(options))
        asked = options.seeds is not None
        return [each for each in cells if asked or each.seeds is None or seed < each.seeds]

    def check(self, options: Options) -> None:
        """Refuse what would make it another experiment."""
        if options.dataset is not None and not self.has_stand_in:
            raise UsageError(
                f"{self.name} has data that nothing can stand in for: leave --dataset out, got "
                f"'{options.dataset}'"
            )
        if options.dataset not in (None, STAND_IN):
            raise UsageError(
                f"{self.name} has the paper's data: --dataset must be {STAND_IN}, which stands in "
                f"for all, got '{options.dataset}'"
            )
        if options.overrides:
            raise UsageError(
                f"{self.name} has the paper's settings, got '{options.overrides[0]}': --commands "
                "prints its runs as commands that can be changed"
            )

    def run(self, options: Options, console: Console) -> int:
        """Run it, print the comparison and write its files; return how many runs failed."""
        # Not before: the list of experiments needs neither Flower nor Torch.
        from simulations.reproduce.papers.write_comparison import run_and_write

        return run_and_write(self, options, console)

    def overrides(self, cell: Cell, scope: Scope, seed: int) -> list[str]:
        """Return the overrides of one run."""
        shorter = list(self.quick) if scope.quick else []
        said = {each.split("=")[0].lstrip("+~") for each in cell.overrides}
        # What a cell says for itself is part of the experiment's shape.
        shorter = [each for each in shorter if each.split("=")[0] not in said]
        if scope.stand_in:
            # The digits are so few that few epochs would teach nothing, and many take no time.
            shorter = [each for each in shorter if not each.startswith("train.")]
        has_own = (EXPERIMENTS / f"{self.name}.yaml").exists() and "experiment" not in said
        own = [f"experiment={self.name}"] if has_own else []
        return [*own, *cell.overrides, *shorter, f"seed={seed}"]


def options(values: Mapping[str, Any], prefix: str = "strategy") -> tuple[str, ...]:
    """Return a strategy's options as overrides; a key that begins with a slash is a group."""
    return tuple(
        f"{prefix}{key}={value}" if key.startswith("/") else f"{prefix}.{key}={value}"
        for key, value in values.items()
    )
