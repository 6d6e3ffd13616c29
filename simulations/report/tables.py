"""Tables of text, shown anywhere: terminal, CSV file, Markdown, HTML.

Whoever has something to show makes its rows once, as a `TextTable`; how it looks is decided here.
A shortened number is a wrong number: what does not fit is folded, or runs over, and is never cut.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Words up to this long are whole when a name is folded.
_LONGEST_WORD = 12


@dataclass(frozen=True)
class Row:
    """Texts in the order of the headings; a reference frames the comparison and stands back."""

    cells: tuple[str, ...]
    is_reference: bool = False


@dataclass(frozen=True)
class TextTable:
    """Rows under headings.

    Parameters
    ----------
    headings : tuple of str
        One per column.
    rows : tuple of Row
        Texts, not escaped.
    names : tuple of int
        Columns that are words: to the left, and folded where room is scarce.
    group_by : int, optional
        A column of names whose repetitions are left out on the screen, with a line between groups.
    """

    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    names: tuple[int, ...] = (0,)
    group_by: int | None = None

    @classmethod
    def of(
        cls,
        headings: Iterable[str],
        rows: Iterable[Iterable[str]],
        names: tuple[int, ...] = (0,),
        group_by: int | None = None,
    ) -> "TextTable":
        """Return a table of plain rows."""
        return cls(tuple(headings), tuple(Row(tuple(row)) for row in rows), names, group_by)

    @property
    def widths(self) -> list[int]:
        """Characters that each column wants."""
        columns = zip(self.headings, *(row.cells for row in self.rows), strict=True)
        return [max(map(len, column)) for column in columns]

    def grouped(self) -> Iterator[tuple[Row, list[str], bool]]:
        """Yield rows and their texts, a group's name in its first row only, which is marked."""
        before = None
        for row in self.rows:
            cells, is_new = list(row.cells), False
            if self.group_by is not None:
                is_new = cells[self.group_by] != before
                before = cells[self.group_by]
                cells[self.group_by] = before if is_new else ""
            yield row, cells, is_new


def print_table(
    table: TextTable,
    console: Console,
    *,
    title: str = "",
    caption: str = "",
    widths: Sequence[int] | None = None,
) -> None:
    """Print a table; columns give way step by step, numbers never.

    With `widths` several tables are aligned; by default each has its own.
    """
    wanted = list(widths or table.widths)
    count = len(wanted)
    # Rich would rather drop a last column than shrink a fixed one, so give way step by step:
    # first the space between columns, then the names, which may fold.
    padding = 1 if sum(wanted) + 3 * (count - 1) <= console.width else 0
    if sum(wanted) + count - 1 > console.width:
        for index in table.names:
            names = (table.headings[index], *(row.cells[index] for row in table.rows))
            word = max(len(word) for name in names for word in name.split())
            wanted[index] = max(len(table.headings[index]), min(word, _LONGEST_WORD))
    # Below that, a line that runs over is better than a column that is cut off.
    least = sum(wanted) + count - 1
    shown = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, padding),
        width=least if least > console.width else None,
    )
    for index, heading in enumerate(table.headings):
        is_name = index in table.names
        shown.add_column(
            heading,
            justify="left" if is_name else "right",
            min_width=wanted[index],
            no_wrap=not is_name,
            overflow="fold",
        )
    for row, cells, is_new in table.grouped():
        if is_new and shown.row_count:
            shown.add_section()
        shown.add_row(*map(Text, cells), style="dim" if row.is_reference else "")
    console.print(shown, crop=False)
    if caption:
        console.print(Text(caption, style="dim"))


def markdown_table(table: TextTable) -> list[str]:
    """Return the lines of a table in Markdown, numbers to the right."""
    marks = ("---" if index in table.names else "--:" for index in range(len(table.headings)))
    rows = (table.headings, marks, *(cells for _, cells, _ in table.grouped()))
    return [f"|{'|'.join(row)}|" for row in rows]


def html_table(table: TextTable, wide: Sequence[int] = ()) -> str:
    """Return a table in HTML; columns of `wide` hold sentences, which are folded."""

    def cell(index: int, text: str, kind: str = "td") -> str:
        kinds = ["text"] * (index in table.names) + ["reason"] * (index in wide)
        attribute = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{kind}{attribute}>{escape(text)}</{kind}>"

    head = "".join(cell(index, text, "th") for index, text in enumerate(table.headings))
    rows = [
        ('<tr class="reference">' if row.is_reference else "<tr>")
        + f"{''.join(cell(index, text) for index, text in enumerate(row.cells))}</tr>"
        for row in table.rows
    ]
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table></div>"
    )


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows, at least one, that share their keys; None becomes an empty field."""
    records = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
