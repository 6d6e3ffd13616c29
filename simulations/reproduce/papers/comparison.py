"""The paper's numbers beside ours: as a table, a CSV file and an HTML page, all from findings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import Console

from simulations.report.pages import bullets, caption, document, figure, note
from simulations.report.tables import TextTable, html_table, print_table, write_csv
from simulations.reproduce.papers.explanations import explain
from simulations.reproduce.papers.findings import (
    Finding,
    Findings,
    Line,
    Published,
    compare,
    sources,
)
from simulations.reproduce.papers.method_kinds import method_kind
from simulations.reproduce.papers.spec import Reproduction

HEADINGS = ("setting", "method", "whose", "quantity", "paper", "ours", "difference", "KB up")


def cells(line: Line, name: str) -> tuple[str, ...]:
    """Return a line of the table of the reproduction with this name, as text."""
    found = line.finding
    return (
        found.setting,
        found.method,
        method_kind(name, found.method),
        found.quantity,
        _published(line.published, found),
        _ours(found),
        _difference(line),
        _kilobytes(found),
    )


def _decimals(found: Finding) -> int:
    return 3 if not found.values or abs(found.mean) < 10 else 1


def _published(known: Published | None, found: Finding) -> str:
    if known is None:
        return ""
    places = _decimals(found)
    sd = "" if known.sd is None else f" ± {known.sd:.{places}f}"
    if not found.values or abs(known.mean) >= 10:
        return f"{known.mean:g}{sd}"
    return f"{known.mean:.{places}f}{sd}"


def _ours(found: Finding) -> str:
    if not found.values:
        return "not reached" if found.missing else "–"
    places = _decimals(found)
    sd = "" if found.sd is None else f" ± {found.sd:.{places}f}"
    note = f" ({found.missing} missing)" if found.missing else ""
    return f"{found.mean:.{places}f}{sd}{note}"


def _difference(line: Line) -> str:
    if line.difference is None:
        return ""
    mark = " *" if line.notable else ""
    return f"{line.difference:+.{_decimals(line.finding)}f}{mark}"


def _kilobytes(found: Finding) -> str:
    if not found.kilobytes:
        return ""
    mean = sum(found.kilobytes) / len(found.kilobytes)
    return f"{mean:,.0f}" if mean >= 10 else f"{mean:.1f}"


def comparison_table(found: Findings) -> TextTable:
    """Return every finding beside the published number."""
    rows = [cells(line, found.name) for line in compare(found)]
    return TextTable.of(HEADINGS, rows, names=(0, 1, 2, 3), group_by=0)


def print_comparison(found: Findings, reproduction: Reproduction, console: Console) -> None:
    """Print the comparison on the screen."""
    table = comparison_table(found)
    # Where all lines are of one quantity, the title has it.
    quantities = {each.quantity for each in found.findings}
    title = f"{reproduction.paper}, {reproduction.where}{_marks(found)}"
    if len(quantities) == 1:
        table = table.without([HEADINGS.index("quantity")])
        title = f"{title}: {quantities.pop()}"
    caption = "* more than twice the joint spread; KB up: of a node"
    print_table(table, console, title=title, caption=caption)


def _marks(found: Findings) -> str:
    marks = [", quick" if found.quick else "", ", digits as a stand-in" if found.stand_in else ""]
    return "".join(marks)


def write_findings_csv(found: Findings, path: Path) -> None:
    """Write every number, with one column for each seed."""
    write_csv(path, (_record(line, found.seeds) for line in compare(found)))


def _record(line: Line, seeds: Sequence[int]) -> dict[str, object]:
    each, known = line.finding, line.published
    numbers: dict[str, float | None] = {
        "paper": known.mean if known else None,
        "paper sd": known.sd if known else None,
        "mean": each.mean if each.values else None,
        "sd": each.sd,
        "difference": line.difference,
    }
    # A finding that is derived from several runs may have fewer values than there are seeds.
    values = [*each.by_seed, *[None] * (len(seeds) - len(each.by_seed))]
    numbers |= {f"seed {seed}": value for seed, value in zip(seeds, values, strict=True)}
    texts = {name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()}
    return {"setting": each.setting, "method": each.method, "quantity": each.quantity, **texts}


def about_lines(found: Findings, reproduction: Reproduction) -> list[str]:
    """Return how the findings came about, in sentences."""
    made = found.made
    seeds = ", ".join(map(str, found.seeds))
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    lines = [reproduction.about]
    if reproduction.scaled:
        lines.append(f"Differs from the paper: {reproduction.scaled}")
    if found.stand_in:
        lines.append("The bundled digits stand in for the paper's data: numbers cannot agree.")
    if found.quick:
        lines.append("The quick version: shapes can be compared, numbers cannot.")
    lines.append(
        f"Seeds {seeds}; commit {made['commit']}, {made['date']}; {made['machine']}; "
        f"Python {made['python']}, {versions}; {made['minutes']:g} minutes."
    )
    lines += [f"Published: {source}." for source in sources(found.name)]
    return lines


def write_page(found: Findings, reproduction: Reproduction, picture: Path, path: Path) -> None:
    """Write one HTML file with table, picture and explanations."""
    title = f"{reproduction.paper}, {reproduction.where}{_marks(found)}"
    notes = explain(found)
    body = [
        f"<h1>{escape(title)}</h1>",
        *map(caption, about_lines(found, reproduction)),
        f"<section>{figure(picture, title, width_rem=60)}</section>",
        f"<section>{html_table(comparison_table(found))}",
        caption(
            "Mean ± sample standard deviation over seeds; * differs by more than twice the joint "
            "spread. KB up: of a node."
        ),
        "</section>",
        f"<section><h2>Differences</h2>{bullets(notes)}</section>" if notes else "",
        note("Runs that failed", found.failures),
    ]
    path.write_text(document(title, "\n".join(body)))
