"""Tables of text, shown anywhere: terminal, CSV file, Markdown, HTML.

Whoever has something to show makes its rows once, as a `TextTable`; how it looks is decided here.
A shortened number is a wrong number: what does not fit is folded, or runs over, and is never cut.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
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
    # Share of a bar behind a cell in the page, 0 to 1, by column.
    bars: Mapping[int, float] | None = None


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

    def without(self, columns: Sequence[int]) -> "TextTable":
        """Return the table without some columns, none of which it is grouped by."""
        kept = [i for i in range(len(self.headings)) if i not in columns]
        return TextTable(
            tuple(self.headings[i] for i in kept),
            tuple(Row(tuple(row.cells[i] for i in kept), row.is_reference) for row in self.rows),
            tuple(kept.index(i) for i in self.names if i in kept),
            None if self.group_by is None else kept.index(self.group_by),
        )

    @property
    def widths(self) -> list[int]:
        """Characters that each column wants."""
        columns = zip(self.headings, *(row.cells for row in self.rows), strict=True)
        return [max(map(len, column)) for column in columns]


def print_table(
    table: TextTable,
    console: Console,
    *,
    title: str = "",
    caption: str = "",
    widths: Sequence[int] | None = None,
) -> None:
    """Print a table; columns give way step by step, numbers never.

    Parameters
    ----------
    table : TextTable
        What to print.
    console : Console
        Where to print.
    title, caption : str
        A line above and below.
    widths : sequence of int, optional
        What each column wants, where several tables are aligned; by default their own.
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
    before = None
    for row in table.rows:
        texts = list(row.cells)
        if table.group_by is not None:
            group = texts[table.group_by]
            if before not in (None, group):
                shown.add_section()
            if group == before:
                texts[table.group_by] = ""
            before = group
        shown.add_row(*map(Text, texts), style="dim" if row.is_reference else "")
    console.print(shown, crop=False)
    if caption:
        console.print(Text(caption, style="dim"))


def markdown_table(table: TextTable) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(table.headings) + " |", "|" + "---|" * len(table.headings)]
    # A star that stands alone is a mark, not emphasis.
    rows = [" | ".join(row.cells) for row in table.rows]
    return lines + [f"| {row} |".replace(" * ", " \\* ") for row in rows]


def html_table(table: TextTable, wide: Sequence[int] = ()) -> str:
    """Return a table in HTML; columns of `wide` hold sentences, which are folded."""
    names = set(table.names)
    head = "".join(
        f'<th scope="col" class="text">{escape(text)}</th>'
        if index in names
        else f'<th scope="col">{escape(text)}</th>'
        for index, text in enumerate(table.headings)
    )
    body = "\n".join(_html_row(row, names, set(wide)) for row in table.rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _html_row(row: Row, names: set[int], wide: set[int]) -> str:
    cells = []
    for index, text in enumerate(row.cells):
        if row.bars and index in row.bars:
            share = f'style="--share:{row.bars[index]:.4f}"'
            cells.append(f'<td class="accuracy" {share}>{escape(text)}</td>')
            continue
        kinds = ["text"] if index in names else []
        kinds += ["reason"] if index in wide else []
        attribute = f' class="{" ".join(kinds)}"' if kinds else ""
        cells.append(f"<td{attribute}>{escape(text)}</td>")
    start = '<tr class="reference">' if row.is_reference else "<tr>"
    return f"{start}{''.join(cells)}</tr>"


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows that share their keys; None becomes an empty field.

    Parameters
    ----------
    path : Path
        The file; overwritten.
    rows : iterable of mappings
        At least one; the keys of the first are the headings.
    """
    records = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
