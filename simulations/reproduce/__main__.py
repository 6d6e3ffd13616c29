"""Run the papers' tables and figures, our own studies, or the demo again.

Without a name everything there is is listed: its name, how long it takes, and
whether it was run in full. Each prints one table, an experiment of a paper
with the published numbers beside ours, and writes a picture and an HTML page.
What is finished is not repeated.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from simulations.command_line import (
    EXIT_FAILED,
    IS_BUNDLED,
    CommandParser,
    UsageError,
    count,
    program,
    run_command,
)
from simulations.reproduce.catalogue import CATALOGUE, PAPERS, STUDIES, is_done, print_catalogue
from simulations.reproduce.findings import keep, kept
from simulations.reproduce.study import Scope, Study

PROGRAM = program("reproduce")
DEMO, ALL = "demo", "all"
# Words that stand for several entries.
GROUPS: dict[str, Sequence[str]] = {"papers": tuple(PAPERS), "studies": tuple(STUDIES)}
_EXAMPLES = f"""examples:
  {PROGRAM} demo                    # several ways, bundled digits, two minutes
  {PROGRAM} gems2019_convex --quick  # one of them in minutes
  {PROGRAM} gems2019_convex --show   # what the full run gave, without running
  {PROGRAM} all                     # what is missing in the output folder
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    asked = _parser().parse_intermixed_args(arguments)
    words = [word for word in asked.words if "=" in word]
    try:
        return run_command(
            lambda: _act(asked, words, Console()),
            (HydraException, OmegaConfBaseException),
            lambda error: _explain(error, words),
        )
    except KeyboardInterrupt:
        from simulations.run import leave

        leave(Console(stderr=True), "Interrupted; the same command goes on where it was.")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="NAME | KEY=VALUE",
        help="what to run: names of the list, or demo; 'papers' or 'studies'; 'all' for what is "
        "not finished in the output folder; for studies and the demo also options as those of "
        f"{program('run')}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the version of a few minutes, one seed"
    )
    parser.add_argument("--seeds", type=count, metavar="N", help="N seeds instead of its own")
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="another data set; for papers only digits, which are bundled and stand in for all",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where data sets are")
    output = Path("runs", "reproduce")
    parser.add_argument(
        "--output", type=Path, default=output, metavar="DIR", help=f"where to write; {output}"
    )
    parser.add_argument(
        "--jobs", type=count, default=2, metavar="N", help="processes side by side; 2 by default"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--show",
        action="store_true",
        help="print what full runs gave, kept with the code, instead of running",
    )
    instead.add_argument(
        "--keep",
        action="store_true",
        help="keep what a full run gives with the code, and write it into docs/results.md",
    )
    parser.add_argument(
        "--page", action="store_true", help="write the tables of docs/results.md from what is kept"
    )
    return parser


def _act(asked: argparse.Namespace, overrides: Sequence[str], console: Console) -> int:
    scope = Scope(
        output=asked.output,
        quick=asked.quick,
        dataset=asked.dataset,
        seeds=asked.seeds,
        jobs=asked.jobs,
        data_dir=asked.data_dir,
        overrides=tuple(overrides),
    )
    names = [word for word in asked.words if "=" not in word]
    if (asked.keep or asked.page) and IS_BUNDLED:
        raise UsageError("--keep and --page write into the code: they need a checkout")
    if asked.keep and (scope.quick or scope.dataset or overrides):
        raise UsageError("only what full runs give is kept: leave --quick and --dataset out")
    if names == [DEMO]:
        from simulations.reproduce.demo import run_demo

        run_demo(scope, console)
        return 0
    chosen = _chosen(names, scope)
    if not chosen and not asked.page and not names:
        if overrides:
            raise UsageError(f"'{overrides[0]}' is for a study: which one?")
        print_catalogue([*CATALOGUE.values()], scope, console)
        console.print(f"Run one: {PROGRAM} NAME; --help lists the options.", soft_wrap=True)
        return 0
    failed = sum(_one(study, scope, asked, console) for study in chosen)
    if asked.page or asked.keep:
        from simulations.reproduce.results import write_tables

        console.print(f"Written: {write_tables()}", soft_wrap=True)
    return EXIT_FAILED if failed else 0


def _chosen(names: Sequence[str], scope: Scope) -> list[Study]:
    if ALL in names:
        missing = [each for each in CATALOGUE.values() if not is_done(each, scope)]
        return sorted(missing, key=lambda each: each.minutes)
    wanted = [each for name in names for each in GROUPS.get(name, [name])]
    for name in wanted:
        if name not in CATALOGUE:
            near = difflib.get_close_matches(
                name, [*CATALOGUE, *GROUPS, ALL, DEMO], n=3, cutoff=0.5
            )
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"there is no '{name}': {hint}{PROGRAM} lists what there is")
    chosen = [CATALOGUE[name] for name in dict.fromkeys(wanted)]
    for study in chosen:
        study.check(scope)
    return chosen


def _one(study: Study, scope: Scope, asked: argparse.Namespace, console: Console) -> int:
    """Run a study or show what is kept of it; return how many of its runs failed."""
    # Not before: the list of studies needs neither Flower nor Torch.
    from simulations.reproduce.comparison import about_lines, print_comparison

    if asked.show:
        found = kept(study.name)
        if found is None:
            raise UsageError(f"nothing of {study.name} is kept: run it without --show")
        print_comparison(found, study, console)
        for line in about_lines(found, study):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        return 0
    try:
        return _run(study, scope, console, keep_it=asked.keep)
    except Exception as error:
        if ALL not in asked.words:
            raise
        # Whatever it is, the others can still be run.
        console.print(f"[red]{study.name} failed:[/red] {escape(str(error))}", soft_wrap=True)
        return 1


def _run(study: Study, scope: Scope, console: Console, *, keep_it: bool) -> int:
    from simulations.reproduce.comparison import print_comparison, write_comparison
    from simulations.reproduce.runner import run_study

    study.check(scope)
    # Whether there is a place for the results shows before hours of runs.
    study.file(scope).parent.mkdir(parents=True, exist_ok=True)
    seeds = len(study.seeds_of(scope))
    length = "" if scope.quick or scope.dataset else f"; {study.minutes:g} minutes on two cores"
    console.print(
        f"[bold]{study.name}[/bold]: {study.about} Seeds: {seeds}{length}. What is finished is "
        "not repeated.",
        soft_wrap=True,
    )
    found = run_study(study, scope, console)
    page = write_comparison(found, study, scope)
    print_comparison(found, study, console)
    console.print(f"Report: {page}", soft_wrap=True, highlight=False)
    if keep_it and not found.failures:
        keep(found, study.only_kept)
    return len(found.failures)


def _explain(error: Exception, words: Sequence[str]) -> str:
    from simulations.config import explain

    # Hydra lists what there is line by line.
    return " ".join(explain(error, words).split())


if __name__ == "__main__":
    sys.exit(main())
