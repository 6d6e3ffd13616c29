"""What a part of the bench measures: rows of named numbers, and what each column is.

From one `CostTable` come the table on the screen, the table and the picture of the page, and the
file that a later run is compared with. A column has a role: what the row is about (``size``), what
this library takes (``ours``), what the obvious way takes (``obvious``), and what no way can do
without (``limit``), such as one pass over the data. Ratios are computed here, from columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from simulations.report.tables import TextTable

Role = Literal["size", "ours", "obvious", "limit", "ratio", "other"]
Value = float | int | str | None

# Roles that cost something, in the order in which they are drawn.
COSTS: tuple[Role, ...] = ("obvious", "ours", "limit")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Parameters
    ----------
    name : str
        The key in every row, and the heading, with the unit if that is not the table's.
    unit : str
        Such as ``ms`` or ``MB``; columns that are drawn together share it.
    role : {"size", "ours", "obvious", "limit", "ratio", "other"}
        See the module's docstring.
    of : pair of str, optional
        For a ratio: the names of the columns that are divided.
    """

    name: str
    unit: str = ""
    role: Role = "other"
    of: tuple[str, str] | None = None

    @property
    def heading(self) -> str:
        """Name and unit."""
        return f"{self.name} {self.unit}".strip()


def size(name: str, unit: str = "") -> Column:
    """Return a column that says what a row is about."""
    return Column(name, unit, "size")


def ours(name: str, unit: str = "ms") -> Column:
    """Return a column of what this library takes."""
    return Column(name, unit, "ours")


def obvious(name: str, unit: str = "ms") -> Column:
    """Return a column of what the obvious way takes."""
    return Column(name, unit, "obvious")


def limit(name: str, unit: str = "ms") -> Column:
    """Return a column of what no way can do without."""
    return Column(name, unit, "limit")


def ratio(name: str, above: str, below: str) -> Column:
    """Return a column that divides one by another."""
    return Column(name, "", "ratio", (above, below))


@dataclass(frozen=True)
class CostTable:
    """Measured rows.

    Parameters
    ----------
    title, about : str
        What was measured, and what must be known to read it.
    columns : sequence of Column
        In order.
    rows : sequence of mappings from str to number or text
        A value for each column but the ratios; None where nothing was measured.
    grows_with : str, optional
        The ``size`` column against which costs are drawn.
    grows_label : str
        What it is called there, if its name says too little.
    group : str, optional
        A ``size`` column of words: each of them has a line of its own.
    group_roles : mapping from str to Role
        Words of `group` that are the obvious way or the limit; the others are ours.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    about: str = ""
    grows_with: str | None = None
    grows_label: str = ""
    group: str | None = None
    group_roles: Mapping[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        measured = {column.name for column in self.columns if column.of is None}
        for row in self.rows:
            if set(row) != measured:
                raise ValueError(f"a row has {sorted(row)}, expected {sorted(measured)}")

    @property
    def unit(self) -> str:
        """The unit of the first cost, which most columns have: it stands in the heading."""
        return next((column.unit for column in self.columns if column.role in COSTS), "")

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def sizes(self) -> list[str]:
        """Names of the columns that say what a row is about."""
        return [column.name for column in self.columns if column.role == "size"]

    def value(self, row: Mapping[str, Value], column: Column) -> Value:
        """Return what stands in a cell."""
        if column.of is None:
            return row[column.name]
        above, below = (row[name] for name in column.of)
        if isinstance(above, int | float) and isinstance(below, int | float) and below:
            return above / below
        return None

    def text(self) -> TextTable:
        """Return the table as texts."""
        return TextTable.of(
            (c.name if c.unit == self.unit else c.heading for c in self.columns),
            ([shown(self.value(row, c), c) for c in self.columns] for row in self.rows),
            names=tuple(
                index
                for index, column in enumerate(self.columns)
                if any(isinstance(row.get(column.name), str) for row in self.rows)
            ),
        )

    def lines(self) -> list[Line]:
        """Return the lines of the picture, each with two points or more; none without a picture."""
        if self.grows_with is None:
            return []
        words = (
            [None] if self.group is None else list(dict.fromkeys(r[self.group] for r in self.rows))
        )
        found = []
        for column in self.columns:
            if column.role not in COSTS:
                continue
            for word in words:
                points = sorted(
                    (float(x), float(y))
                    for row in self.rows
                    if (self.group is None or row[self.group] == word)
                    and isinstance(x := row[self.grows_with], int | float)
                    and isinstance(y := row[column.name], int | float)
                    and x > 0
                    and y > 0
                )
                if len({x for x, _ in points}) > 1:
                    name = " ".join(str(w) for w in (word, column.name) if w is not None)
                    if self.group is not None and len(self._costs) == 1:
                        name = str(word)
                    role = self.group_roles.get(str(word), column.role)
                    found.append(Line(name, column.unit, role, tuple(points)))
        # Only one unit has an axis: that of the first.
        return [line for line in found if line.unit == found[0].unit]

    @property
    def _costs(self) -> list[Column]:
        return [column for column in self.columns if column.role in COSTS]


@dataclass(frozen=True)
class Line:
    """How a cost grows: points of size and cost, in order of size."""

    name: str
    unit: str
    role: Role
    points: tuple[tuple[float, float], ...]

    @property
    def slope(self) -> float:
        """The exponent: 1 is a cost that doubles with the size; least squares of the logarithms."""
        x, y = np.log(np.array(self.points)).T
        return float(np.polyfit(x, y, 1)[0])


def shown(value: Value, column: Column) -> str:
    """Return a value as text: three digits, or all of a whole number."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    sign = "×" if column.role == "ratio" else ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}{sign}"
    if value == 0:
        return f"0{sign}"
    decimals = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{min(decimals, 6)}f}{sign}"
