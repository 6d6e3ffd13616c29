"""What there is, one line each: to be read and copied at 80 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from simulations.reproduce import ledger
from simulations.reproduce.entry import Entry, Options
from simulations.reproduce.estimates import MEASURED, estimate_here, in_digits

# What stands in the column "state".
HERE, IN_FULL, NOT_YET = "done", "in full", "not yet"
_SHORT = (
    (r"\b(Tables?)\b", "T."),
    (r"\b(Figures?)\b", "Fig."),
    (r"\bSection\b", "Sec."),
    (r" and ", ", "),
    (r" to ", "–"),
)


def print_catalogue(entries: Sequence[Entry], options: Options, console: Console) -> None:
    """Print what there is, paper by paper; names are whole at any width."""
    estimate = estimate_here(options.output, entries)
    # Aligned over all papers, as one table would be.
    longest = max(len(each.name) for each in entries)
    places = max(len(short(each.where)) for each in entries)
    for paper in dict.fromkeys(each.paper for each in entries):
        table = Table(
            title=paper,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=0,
            pad_edge=False,
            show_edge=False,
        )
        table.add_column("name", no_wrap=True, min_width=longest)
        table.add_column("where", min_width=min(places, 30))
        for heading in ("minutes", "quick"):
            table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
        table.add_column("state", no_wrap=True, min_width=len(IN_FULL))
        for each in entries:
            if each.paper == paper:
                quick = each.quick_minutes
                table.add_row(
                    each.name,
                    short(each.where),
                    in_digits(estimate.minutes(each, options)),
                    "–" if quick is None else in_digits(estimate.factor * quick),
                    _state(each, options),
                )
        # A name is there to be copied: better that a line runs over than that it is cut.
        console.print(table, crop=False)
        console.print()
    console.print(
        f"minutes: {estimate}; quick: on one processor. state: in full – kept with the code, "
        f"--show prints it; done – finished in {options.output}. --about says what each shows.",
        markup=False,
        highlight=False,
    )


def print_about(entries: Sequence[Entry], console: Console) -> None:
    """Print what each entry shows, in its own sentence."""
    for each in entries:
        console.print(f"[bold]{each.name}[/bold]", soft_wrap=True)
        where = f"{each.paper}, {each.where}" if each.where else each.paper
        seeds = "1 seed" if each.seeds == 1 else f"{each.seeds} seeds"
        console.print(f"  {where}; {seeds}. {each.about}", markup=False, highlight=False)


def short(where: str) -> str:
    """Return tables and figures in few letters: ``Fig. 5.1, A.1``."""
    where = where.partition(":")[0]
    for pattern, letters in _SHORT:
        where = re.sub(pattern, letters, where)
    return where


def _state(entry: Entry, options: Options) -> str:
    if ledger.state(entry, options) == ledger.DONE:
        return HERE
    if not entry.in_processes:
        return "–"
    return IN_FULL if (MEASURED / f"{entry.name}.json").exists() else NOT_YET
