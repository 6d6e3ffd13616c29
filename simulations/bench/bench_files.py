"""The figures of a run of the bench as files, and what changed between two of them.

``bench.json`` holds everything; ``bench.csv`` has one number a line, for a spreadsheet. A figure is
known by its part, table, row (the columns that say what the row is about) and column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulations.bench.cost_tables import COSTS, Column, CostTable, shown
from simulations.command_line import UsageError
from simulations.report.tables import TextTable, write_csv


@dataclass(frozen=True)
class PartResult:
    """What one part gave: its tables, or the text that it printed where it has none."""

    name: str
    tables: tuple[CostTable, ...] = ()
    text: str = ""


def write_files(
    folder: Path, parts: Sequence[PartResult], facts: Mapping[str, str]
) -> tuple[Path, Path]:
    """Write the figures; return the paths of JSON and CSV."""
    told = {
        "facts": dict(facts),
        "parts": [
            {"name": part.name, "text": part.text, "tables": [asdict(t) for t in part.tables]}
            for part in parts
        ],
    }
    as_json, as_csv = folder / "bench.json", folder / "bench.csv"
    as_json.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    cells = [
        {
            "part": part.name,
            "table": table.title,
            "row": row_name(table, row),
            "column": column.name,
            "role": column.role,
            "unit": column.unit,
            "value": table.value(row, column),
        }
        for part in parts
        for table in part.tables
        for row in table.rows
        for column in table.columns
        if column.role != "size"
    ]
    if cells:
        write_csv(as_csv, cells)
    else:
        as_csv.unlink(missing_ok=True)
    return as_json, as_csv


def read_parts(path: Path) -> list[PartResult]:
    """Return what `write_files` wrote.

    Raises
    ------
    UsageError
        If the file is not there, or none of ours.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return [
            PartResult(part["name"], tuple(map(_table, part["tables"])), part["text"])
            for part in told["parts"]
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UsageError(f"{path} is no bench.json that this command wrote: {error}") from error


def _table(told: Mapping[str, Any]) -> CostTable:
    columns = tuple(
        Column(**{**column, "of": tuple(column["of"]) if column["of"] else None})
        for column in told["columns"]
    )
    return CostTable(**{**told, "columns": columns, "rows": tuple(told["rows"])})


def row_name(table: CostTable, row: Mapping[str, Any]) -> str:
    """Return what a row is about."""
    return ", ".join(f"{name} {_text(row[name])}".strip() for name in table.sizes)


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Change:
    """A cost in two runs; the limits are those of the same rows, where the table has any."""

    part: str
    table: str
    row: str
    column: Column
    before: float
    now: float
    limit_before: float | None
    limit_now: float | None

    @property
    def against_limit(self) -> float | None:
        """How the ratio to the limit changed: what is left if the machine was slower or busier."""
        if not self.limit_before or not self.limit_now:
            return None
        return (self.now / self.limit_now) / (self.before / self.limit_before)


def changes(before: Sequence[PartResult], now: Sequence[PartResult]) -> list[Change]:
    """Return every cost of ours that both runs have measured."""
    old = {key: cell for part in before for key, cell in _costs(part)}
    found = []
    for part in now:
        for key, (column, value, floor) in _costs(part):
            if key in old and value and old[key][1]:
                found.append(Change(*key[:3], column, old[key][1], value, old[key][2], floor))
    return found


def _costs(
    part: PartResult,
) -> Iterator[tuple[tuple[str, str, str, str], tuple[Column, float, float | None]]]:
    for table in part.tables:
        for row in table.rows:
            limits = [row[c.name] for c in table.columns if c.role == "limit"]
            floor = next((float(x) for x in limits if isinstance(x, int | float) and x), None)
            for column in table.columns:
                value = row.get(column.name)
                if (
                    column.role in COSTS
                    and column.role != "limit"
                    and isinstance(value, int | float)
                ):
                    key = (part.name, table.title, row_name(table, row), column.name)
                    yield key, (column, float(value), floor)


def change_table(found: Sequence[Change]) -> TextTable:
    """Return changes as a table: before, now, and how many times as much."""
    times = Column("", role="ratio")
    return TextTable.of(
        ("part", "row", "what", "before", "now", "now / before", "by limit"),
        (
            (
                change.part,
                change.row,
                change.column.heading,
                shown(change.before, change.column),
                shown(change.now, change.column),
                shown(change.now / change.before, times),
                shown(change.against_limit, times),
            )
            for change in found
        ),
        names=(0, 1, 2),
        group_by=0,
    )
