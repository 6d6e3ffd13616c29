"""Run the papers' tables and figures, our own studies, or the demo again.

Without a name everything there is is listed: its name, how long it takes here,
and whether it was run in full. An experiment of a paper prints the published
numbers beside ours and writes a CSV file, a picture and an HTML page; a study
prints its table and writes its figure. What is finished is not repeated.
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

from simulations.command_line import (
    EXIT_FAILED,
    IS_BUNDLED,
    CommandParser,
    UsageError,
    count,
    program,
    run_command,
)
from simulations.reproduce import ledger
from simulations.reproduce.catalogue import CATALOGUE, PAPERS, STUDIES
from simulations.reproduce.entry import Entry, Options
from simulations.reproduce.listing import print_about, print_catalogue
from simulations.reproduce.papers.spec import Reproduction
from simulations.reproduce.run_missing import print_status, run_missing

PROGRAM = program("reproduce")
OUTPUT = Path("runs", "reproduce")
# Words that stand for several entries.
GROUPS: dict[str, Sequence[str]] = {"papers": tuple(PAPERS), "studies": tuple(STUDIES)}
# The word for whatever is missing in the output folder.
ALL = "all"
_EXAMPLES = f"""examples:
  {PROGRAM}
      what there is
  {PROGRAM} gems2019_convex --quick
      one of them in minutes
  {PROGRAM} gems2019_convex --show
      what the full run gave, without running
  {PROGRAM} all
      everything that is missing, the shortest first
  {PROGRAM} all --status
      what is done, what runs, what is to come
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
        help="what to run: names of the list; 'papers' or 'studies'; 'all' for everything that is "
        "not finished in the output folder; for studies also options as those of "
        f"{program('run')}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the version of at most five minutes, one seed"
    )
    parser.add_argument("--seeds", type=count, metavar="N", help="N seeds instead of its own")
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="another data set; for papers only digits, which are bundled and stand in for all",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where data sets are")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="DIR", help=f"where to write; {OUTPUT}"
    )
    parser.add_argument(
        "--jobs", type=count, metavar="N", help="processes side by side (papers); 2 by default"
    )
    parser.add_argument(
        "--lockstep",
        action="store_true",
        help="let the nodes of papers' runs train together: quicker with many small nodes, the "
        "same up to rounding; such runs are kept beside the others",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--show",
        action="store_true",
        help="print what full runs gave, kept with the code, instead of running (papers)",
    )
    instead.add_argument(
        "--commands", action="store_true", help="print the runs as commands instead (papers)"
    )
    instead.add_argument(
        "--about", action="store_true", help="say what each shows instead; without a name, of all"
    )
    instead.add_argument(
        "--status", action="store_true", help="with 'all': print how far it is, and run nothing"
    )
    instead.add_argument(
        "--publish", action="store_true", help="keep what a full run gives, and write the page"
    )
    parser.add_argument(
        "--page", action="store_true", help="write docs/results.md from what full runs gave"
    )
    return parser


def _act(asked: argparse.Namespace, overrides: Sequence[str], console: Console) -> int:
    options = Options(
        output=asked.output,
        quick=asked.quick,
        dataset=asked.dataset,
        seeds=asked.seeds,
        jobs=asked.jobs,
        data_dir=asked.data_dir,
        overrides=tuple(overrides),
        lockstep=asked.lockstep,
    )
    if asked.lockstep and (asked.publish or asked.commands):
        raise UsageError("--lockstep is no part of what is published: leave it out")
    names = [word for word in asked.words if "=" not in word]
    everything = ALL in names
    chosen = [] if everything else _chosen(names)
    if asked.about:
        print_about(chosen or [*CATALOGUE.values()], console)
        return 0
    if not chosen and not everything and not asked.page:
        if overrides:
            raise UsageError(f"'{overrides[0]}' is for a study: which one?")
        print_catalogue([*CATALOGUE.values()], options, console)
        console.print(f"Run one: {PROGRAM} NAME; --help lists the options.", soft_wrap=True)
        return 0
    if asked.status or everything:
        _check_all(asked, names, overrides)
    if asked.status:
        print_status([*CATALOGUE.values()], options, console)
        return 0
    if IS_BUNDLED and (asked.page or asked.publish):
        raise UsageError("--page and --publish write into the documentation: they need a checkout")
    for entry in chosen:
        entry.check(options)
    if everything:
        failed = run_missing(
            [*CATALOGUE.values()],
            options,
            console,
            lambda entry, own: _one(entry, own, asked, console, of_all=True),
        )
    else:
        failed = sum(_one(entry, options, asked, console) for entry in chosen)
    if asked.page or asked.publish:
        from simulations.reproduce.papers import results_page

        console.print(f"Written: {results_page.write_results()}", soft_wrap=True)
    return EXIT_FAILED if failed else 0


def _check_all(asked: argparse.Namespace, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse what cannot be asked of everything at once."""
    if ALL not in names:
        raise UsageError(f"--status says how far '{ALL}' is: {PROGRAM} {ALL} --status")
    if len(names) > 1 or overrides:
        others = [*names, *overrides]
        others.remove(ALL)
        raise UsageError(f"'{ALL}' stands alone: leave '{others[0]}' out")
    if asked.show or asked.commands:
        raise UsageError(f"'{ALL}' runs what is missing: leave --show and --commands out")
    if asked.publish and (asked.quick or asked.dataset):
        raise UsageError("only what full runs give is published: leave --quick and --dataset out")


def _one(
    entry: Entry,
    options: Options,
    asked: argparse.Namespace,
    console: Console,
    *,
    of_all: bool = False,
) -> int:
    """Do with an entry what is asked for; return how many runs failed."""
    if not (asked.show or asked.commands or asked.publish):
        if of_all or options.overrides:  # noted already, or something else than the entry
            return entry.run(options, console)
        return ledger.watched(entry, options, lambda: entry.run(options, console))
    if of_all and not isinstance(entry, Reproduction):
        return entry.run(options, console)  # nothing of a study is published
    if not isinstance(entry, Reproduction):
        raise UsageError(
            f"{entry.name} is a study: --show, --commands and --publish are for papers"
        )
    from simulations.reproduce.papers import results_page, write_comparison

    if asked.commands:
        for line in write_comparison.commands(entry, options):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        return 0
    if asked.show:
        results_page.show_kept(entry, console)
        return 0
    if options.quick or options.dataset:
        raise UsageError("only what full runs give is published: leave --quick and --dataset out")
    failed = entry.run(options, console)
    results_page.publish(entry.name, options.output)
    return failed


def _chosen(names: Sequence[str]) -> list[Entry]:
    wanted = [each for name in names for each in GROUPS.get(name, [name])]
    for name in wanted:
        if name not in CATALOGUE:
            near = difflib.get_close_matches(name, [*CATALOGUE, *GROUPS, ALL], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"there is no '{name}': {hint}{PROGRAM} lists what there is")
    return [CATALOGUE[name] for name in dict.fromkeys(wanted)]


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    from simulations.config import explain

    text = explain(error, overrides)
    # Hydra lists what there is line by line.
    return " ".join(text.split()) if isinstance(error, HydraException) else text


if __name__ == "__main__":
    sys.exit(main())
