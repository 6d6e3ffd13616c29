"""A study in the catalogue: a module with a function `run`, imported when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rich.console import Console

from simulations.command_line import UsageError
from simulations.reproduce.entry import Options


@dataclass(frozen=True)
class Study:
    """An experiment of our own.

    Parameters
    ----------
    name : str
        What to type.
    about : str
        What it shows, in a sentence.
    minutes : float
        What the full version takes on two cores, with its own data set.
    seeds : int
        How many seeds the full version has. More than one are passed to `run` as ``seeds=``.
    quick : tuple of str
        Overrides of the quick version, which has one seed.
    where : str
        The paper's table or figure that it belongs to, if any.
    module : str
        What holds ``run(overrides, output, console)``; by default the module of this name in
        `simulations.reproduce.studies`.
    quick_minutes : float, optional
        What the quick version takes with its own data set, on one processor; measured.
    """

    name: str
    about: str
    minutes: float
    seeds: int = 1
    quick: tuple[str, ...] = ()
    where: str = ""
    module: str = ""
    quick_minutes: float | None = None

    @property
    def in_processes(self) -> bool:
        """A study works in the process that it is called in."""
        return False

    @property
    def paper(self) -> str:
        """What studies are listed under."""
        return "Studies of our own"

    def check(self, options: Options) -> None:
        """Refuse what this study cannot do."""
        if options.jobs is not None:
            raise UsageError(f"{self.name} runs in one process: leave --jobs out")
        if options.seeds is not None and self.seeds == 1:
            raise UsageError(f"{self.name} has one seed: seed=3 chooses another, not --seeds")

    def run(self, options: Options, console: Console) -> int:
        """Run it; nothing of it can fail alone."""
        overrides = list(self.quick) if options.quick else []
        overrides += [f"dataset={options.dataset}"] if options.dataset else []
        overrides += [f"data_dir={options.data_dir}"] if options.data_dir else []
        keywords: dict[str, Any] = {}
        if self.seeds > 1:
            keywords["seeds"] = range(options.seeds or (1 if options.quick else self.seeds))
        # A study keeps what it has done: the quick version must not pass for the full one.
        folder = options.output / f"{self.name}{'-quick' if options.quick else ''}"
        folder.mkdir(parents=True, exist_ok=True)
        # Not before: the list of studies needs neither Flower nor Torch.
        module = import_module(self.module or f"{__package__}.{self.name}")
        module.run([*overrides, *options.overrides], folder, console, **keywords)
        return 0
