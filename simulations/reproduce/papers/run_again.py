"""Run some methods of a published experiment again, and keep the rest of its findings.

    python -m simulations.reproduce.papers.run_again gems2019_convex --only '^GEMS ellipsoid'

``--settings`` limits it to some rows. When the code of one method changed, hours of others would
give the same digits again. What is run
takes the place of the kept findings of the same setting, method and quantity; what is derived from
several methods is derived anew; ``made.again`` says what was run when, and with which commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from simulations.command_line import UsageError, count, run_command
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.entry import Options
from simulations.reproduce.papers.comparison import print_comparison, write_findings_csv
from simulations.reproduce.papers.findings import Findings
from simulations.reproduce.papers.results_page import MEASURED
from simulations.reproduce.papers.runner import reproduce
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(PAPERS))
    parser.add_argument("--only", required=True, metavar="REGEX", help="which methods")
    parser.add_argument("--settings", default="", metavar="REGEX", help="in which settings")
    parser.add_argument("--seeds", type=count, metavar="N", help="fewer than were kept")
    parser.add_argument("--output", type=Path, default=Path("runs", "reproduce"), metavar="DIR")
    parser.add_argument("--jobs", type=count, metavar="N", help="processes side by side")
    parser.add_argument("--publish", action="store_true", help="write what the page is made from")
    asked = parser.parse_args(arguments)
    options = Options(output=asked.output, jobs=asked.jobs)
    return run_command(lambda: _act(asked, options, Console()))


def _act(asked: argparse.Namespace, options: Options, console: Console) -> int:
    path = MEASURED / f"{asked.name}.json"
    if not path.exists():
        raise UsageError(f"nothing of {asked.name} is kept: run the whole")
    whole, kept = PAPERS[asked.name], Findings.from_json(path.read_text())
    part = only(whole, asked.only, asked.settings)
    options = dataclasses.replace(options, seeds=asked.seeds or len(kept.seeds))
    found = reproduce(part, options, console)
    joined = join(whole, kept, found, {"only": asked.only, "settings": asked.settings})
    print_comparison(joined, whole, console)
    if asked.publish and not found.failures:
        path.write_text(joined.to_json())
        write_findings_csv(joined, path.with_suffix(".csv"))
    return len(found.failures)


def only(whole: Reproduction, methods: str, settings: str = "") -> Reproduction:
    """Return the experiment with those of its methods and settings alone whose names match."""

    def cells(scope: Scope) -> list[Cell]:
        return [
            each
            for each in whole.cells(scope)
            if re.search(methods, each.method) and re.search(settings, each.setting)
        ]

    if not cells(Scope()):
        raise UsageError(f"no runs of {whole.name} match '{methods}' and '{settings}'")
    if whole.judge is not None:
        raise UsageError(f"{whole.name} judges its runs together: run the whole")
    return dataclasses.replace(whole, cells=cells, derive=None)


def join(
    whole: Reproduction, kept: Findings, found: Findings, which: Mapping[str, str]
) -> Findings:
    """Return the kept findings with the new ones in the places of their former selves.

    Parameters
    ----------
    whole : Reproduction
        The experiment.
    kept, found : Findings
        Those of all its runs, and those of the runs that were made again.
    which : mapping
        What was asked for, to be kept beside the findings.
    """
    if found.seeds != kept.seeds[: len(found.seeds)]:
        raise UsageError(f"kept are seeds {kept.seeds}, new are {found.seeds}: run the whole")
    new = {(each.setting, each.method, each.quantity): each for each in found.findings}
    known = {(each.setting, each.method) for each in whole.cells(Scope())}
    # What was derived is not among the runs.
    old = [each for each in kept.findings if (each.setting, each.method) in known]
    places = {(each.setting, each.method, each.quantity) for each in old}
    if missing := [key for key in new if key not in places]:
        raise UsageError(f"not among what is kept: {missing[0]}: run the whole")
    findings = [new.get((each.setting, each.method, each.quantity), each) for each in old]
    again = {**which, "seeds": len(found.seeds)} | {
        key: found.made[key] for key in ("commit", "date", "minutes")
    }
    made = kept.made | {"again": [*kept.made.get("again", []), again]}
    joined = dataclasses.replace(kept, findings=findings, made=made)
    if whole.derive is not None:
        whole.derive(joined)
    return joined


if __name__ == "__main__":
    raise SystemExit(main())
