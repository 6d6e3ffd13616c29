"""Everything that can be run again, by name, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from simulations.report.tables import TextTable, print_table
from simulations.reproduce.findings import MEASURED, Findings
from simulations.reproduce.papers import (
    driving2018,
    dynamic2018,
    fedavg2016,
    gems2018,
    gems2019,
    multi_model2025,
)
from simulations.reproduce.studies import frontier, hostile, leaks
from simulations.reproduce.study import Scope, Study

_PAPERS = (gems2019, gems2018, dynamic2018, driving2018, fedavg2016, multi_model2025)
_STUDIES = (frontier, hostile, leaks)
PAPERS: dict[str, Study] = {each.name: each for module in _PAPERS for each in module.STUDIES}
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in _STUDIES}
CATALOGUE: dict[str, Study] = {**PAPERS, **STUDIES}

DONE, IN_FULL, TO_COME = "done", "in full", "to come"


def is_done(study: Study, scope: Scope) -> bool:
    """Return whether findings of as many seeds as asked for are there, without a failure."""
    try:
        found = Findings.from_bytes(study.file(scope).read_bytes())
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return not found.failures and len(found.seeds) >= len(study.seeds_of(scope))


def state_of(study: Study, scope: Scope) -> str:
    """Return whether a study is done here, kept with the code, or to come."""
    if is_done(study, scope):
        return DONE
    return IN_FULL if (MEASURED / f"{study.name}.json.gz").exists() else TO_COME


def print_catalogue(studies: Sequence[Study], scope: Scope, console: Console) -> None:
    """Print what there is, paper by paper, columns aligned over all of them."""
    headings = ("name", "where", "seeds", "minutes", "state")
    tables: dict[str, list[tuple[str, ...]]] = {}
    for each in studies:
        numbers = (str(each.seeds), f"{each.minutes:g}")
        row = (each.name, each.where, *numbers, state_of(each, scope))
        tables.setdefault(each.paper, []).append(row)
    every = TextTable.of(headings, [row for rows in tables.values() for row in rows])
    for paper, rows in tables.items():
        table = TextTable.of(headings, rows, names=(0, 1, 4))
        print_table(table, console, title=paper, widths=every.widths)
        console.print()
    console.print(
        f"minutes: in full, on two cores; --quick takes a few. state: {IN_FULL} – kept with the "
        f"code, --show prints it; {DONE} – finished in {scope.output}.",
        markup=False,
        highlight=False,
    )
