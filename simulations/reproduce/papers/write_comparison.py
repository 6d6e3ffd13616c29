"""Run an experiment of a paper and write what a reader gets: JSON, CSV, picture, page, table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from simulations.command_line import program
from simulations.report.figures import save
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.entry import Options
from simulations.reproduce.estimates import estimate_here, in_words
from simulations.reproduce.papers import comparison
from simulations.reproduce.papers.runner import reproduce
from simulations.reproduce.papers.spec import Reproduction, Scope


def folder_name(reproduction: Reproduction, options: Options) -> str:
    """Return what the folder and the files of an experiment are called."""
    scope = Scope.of(options)
    quick, stand_in = "-quick" if scope.quick else "", "-digits" if scope.stand_in else ""
    return f"{reproduction.name}{quick}{stand_in}"


def run_and_write(reproduction: Reproduction, options: Options, console: Console) -> int:
    """Run one experiment and write its files; return how many runs failed."""
    name = folder_name(reproduction, options)
    folder = options.output / name
    # Whether there is a place for the results shows before hours of runs.
    folder.mkdir(parents=True, exist_ok=True)
    _announce(reproduction, options, console)
    found = reproduce(reproduction, options, console)
    (folder / f"{name}.json").write_text(found.to_json())
    comparison.write_findings_csv(found, folder / f"{name}.csv")
    save(reproduction.draw(found), folder / f"{name}.png")
    comparison.write_page(found, reproduction, folder / f"{name}.png", folder / f"{name}.html")
    comparison.print_comparison(found, reproduction, console)
    console.print(f"Report: {folder / f'{name}.html'}", soft_wrap=True)
    return len(found.failures)


def _announce(reproduction: Reproduction, options: Options, console: Console) -> None:
    seeds = len(reproduction.seeds_of(options))
    runs = sum(len(reproduction.cells_of(options, seed)) for seed in range(seeds))
    estimate = estimate_here(options.output, PAPERS.values())
    length = f"{in_words(estimate.minutes(reproduction, options))}: {estimate}"
    if options.dataset:
        length = "much shorter than with the paper's data"
    console.print(
        f"[bold]{reproduction.name}[/bold]: {reproduction.paper}, {reproduction.where}; "
        f"{runs} runs, {length}. Finished ones are not repeated."
    )


def commands(reproduction: Reproduction, options: Options) -> Iterator[str]:
    """Yield the runs of an experiment as commands of `simulations.run`, seeds as a multirun."""
    scope = Scope.of(options)
    for cell in reproduction.cells(scope):
        mine = [
            s for s in reproduction.seeds_of(options) if cell in reproduction.cells_of(options, s)
        ]
        seeds = ",".join(map(str, mine))
        words = reproduction.overrides(cell, scope, 0)[:-1]
        quoted = " ".join(f"'{w}'" if set(w) & set("[]{}(),' ") else w for w in words)
        yield f"{program('run')} -m {quoted} seed={seeds}"
