"""The tables of ``docs/results.md``: written between marks, the words around them by hand.

A mark is a line ``<!-- table: NAME -->``; what follows until ``<!-- end -->`` is the table of what
is kept of that study and has a published number, or of all findings of some quantities:
``<!-- table: NAME | quantity; quantity -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

from simulations.report.tables import markdown_table
from simulations.reproduce.comparison import comparison_table, count
from simulations.reproduce.findings import kept

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results.md"
_MARK = re.compile(r"(<!-- table: (\w+)(?: \| ([^>]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def write_tables(page: Path = PAGE) -> Path:
    """Write the tables into the page; return its path."""
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    return page


def with_tables(text: str) -> str:
    """Return a page with its tables as the kept findings have them."""
    return _MARK.sub(lambda m: m[1] + table(m[2], m[3] or "") + m[4], text)


def table(name: str, quantities: str = "") -> str:
    """Return a study's table in Markdown, with the date and the commit of its runs."""
    found = kept(name)
    if found is None:
        return "Nothing is kept of this experiment.\n"
    wanted = [each.strip() for each in quantities.split(";") if each.strip()]
    rows = markdown_table(comparison_table(found, wanted, judged=not wanted))
    compared, agree = count(found)
    made = found.made
    says = f"{agree} of {compared} numbers agree; " if compared else ""
    about = (
        f"{says}{len(found.seeds)} {'seed' if len(found.seeds) == 1 else 'seeds'}, "
        f"{made['minutes']:g} minutes, {made['date']}, `{made['commit']}`."
    )
    return "\n".join(["", *rows, "", about, ""])
