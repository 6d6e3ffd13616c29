"""``all``: run everything that is missing, the shortest first.

Missing is what is not finished in the output folder (`ledger`), whatever is kept with the
code. What fails is noted and the rest goes on; killed and started again, it goes on where it was,
because finished entries are left out and every entry goes on with its own finished runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from simulations.command_line import UsageError
from simulations.reproduce import ledger
from simulations.reproduce.entry import Entry, Options
from simulations.reproduce.estimates import estimate_here, in_digits, in_words

Run = Callable[[Entry, Options], int]


def run_missing(entries: Sequence[Entry], options: Options, console: Console, run: Run) -> int:
    """Run what is missing; return how many entries failed.

    Parameters
    ----------
    entries : sequence of Entry
        What there is.
    options : Options
        For all of them; what an entry cannot take is left out for it.
    console : Console
        Where to print.
    run : callable
        Runs one entry and returns how many of its runs failed.
    """
    missing = in_order(entries, options)
    print_status(entries, options, console)
    failed = 0
    for place, entry in enumerate(missing, start=1):
        minutes = estimate_here(options.output, entries).minutes(entry, options)
        console.print(
            f"[bold]{place} of {len(missing)}: {entry.name}[/bold], {in_words(minutes)}; all that "
            f"is left: {in_words(_left(missing[place - 1 :], entries, options))}."
        )
        failed += not _run_one(entry, fitting(entry, options), console, run)
    if missing:
        print_status(entries, options, console)
    return failed


def _run_one(entry: Entry, options: Options, console: Console, run: Run) -> bool:
    """Run an entry; return whether all went well."""
    try:
        return not ledger.watched(entry, options, lambda: run(entry, options))
    # Whatever it is, the others can still be run, and the table says what it was.
    except Exception as error:
        console.print(f"[red]{entry.name} failed:[/red] {escape(str(error))}", soft_wrap=True)
        return False


def in_order(entries: Sequence[Entry], options: Options) -> list[Entry]:
    """Return what is missing and can be run as asked for, the shortest first."""
    possible = [each for each in entries if not _refusal(each, options)]
    undone = [
        each
        for each in possible
        if ledger.state(each, fitting(each, options)) not in (ledger.DONE, ledger.RUNNING)
    ]
    estimate = estimate_here(options.output, entries)
    return sorted(undone, key=lambda each: estimate.minutes(each, options))


def fitting(entry: Entry, options: Options) -> Options:
    """Return the options without those that do not concern an entry."""
    several = entry.in_processes or entry.seeds > 1
    return dataclasses.replace(
        options,
        jobs=options.jobs if entry.in_processes else None,
        seeds=options.seeds if several else None,
    )


def _refusal(entry: Entry, options: Options) -> str:
    try:
        entry.check(fitting(entry, options))
    except UsageError as error:
        return str(error)
    return ""


def _left(missing: Sequence[Entry], entries: Sequence[Entry], options: Options) -> float:
    estimate = estimate_here(options.output, entries)
    return sum(estimate.minutes(each, options) for each in missing)


def print_status(entries: Sequence[Entry], options: Options, console: Console) -> None:
    """Print what is done, what runs and what is to come, and how long is left."""
    estimate = estimate_here(options.output, entries)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("minutes", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    left = 0.0
    order = {each.name: place for place, each in enumerate(in_order(entries, options))}
    for entry in sorted(entries, key=lambda each: order.get(each.name, -1)):
        own = fitting(entry, options)
        now, why = ledger.state(entry, own), ""
        minutes = estimate.minutes(entry, options)
        if refusal := _refusal(entry, options):
            now, why = "left out", refusal
        elif now == ledger.FAILED and (last := ledger.read(entry, own)):
            why = last.reason
        if now not in (ledger.DONE, "left out"):
            left += minutes
        table.add_row(entry.name, now, in_digits(minutes), escape(why))
    console.print(table, crop=False)
    console.print(
        f"Left: {in_words(left) if left else 'nothing'}. Minutes: {estimate}.",
        soft_wrap=True,
        markup=False,
    )
