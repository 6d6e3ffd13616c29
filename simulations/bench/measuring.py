"""Run a part of the bench: its tables on the screen as they are done, and all of them returned."""

from __future__ import annotations

import io
from types import ModuleType

from rich.console import Console

from simulations.bench.bench_files import PartResult
from simulations.bench.cost_tables import CostTable
from simulations.report.tables import print_table

# As wide as the text of a page can well be.
_PAGE_WIDTH = 110


def measure_part(name: str, part: ModuleType, quick: bool, console: Console) -> PartResult:
    """Measure a part, showing what it gives.

    Parameters
    ----------
    name : str
        What it is called.
    part : module
        With a generator ``measure(quick)`` of `CostTable`, or with ``report(console, quick)``.
    quick : bool
        Whether smaller sizes will do.
    console : Console
        Where to show it.
    """
    if not hasattr(part, "measure"):
        copy = Console(file=io.StringIO(), width=_PAGE_WIDTH, force_terminal=False)
        part.report(Both(console, copy), quick)
        return PartResult(name, text=copy.file.getvalue().strip())  # type: ignore[attr-defined]
    tables: list[CostTable] = []
    source = iter(part.measure(quick))
    while True:
        with console.status(name):
            table = next(source, None)
        if table is None:
            return PartResult(name, tuple(tables))
        tables.append(table)
        print_table(table.text(), console, title=table.heading, caption=table.about)
        for line in table.lines():
            if line.role == "ours":
                console.print(f"{line.name} grows with exponent {line.slope:.2f}", style="dim")
        console.print()


class Both(Console):
    """A console that prints on another one as well."""

    def __init__(self, shown: Console, copy: Console) -> None:
        super().__init__(file=io.StringIO())
        self._shown, self._copy = shown, copy

    def print(self, *objects: object, **options: object) -> None:  # type: ignore[override]
        """Print on both."""
        self._shown.print(*objects, **options)  # type: ignore[arg-type]
        self._copy.print(*objects, **options)  # type: ignore[arg-type]
