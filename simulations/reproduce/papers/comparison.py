"""What a reader gets: a table on the screen, a CSV file, an HTML page; all from findings."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.table import Table

from simulations.report.run_page import document
from simulations.reproduce.papers.explanations import explain
from simulations.reproduce.papers.findings import (
    Finding,
    Findings,
    Line,
    Published,
    compare,
    sources,
)
from simulations.reproduce.papers.spec import Reproduction

HEADINGS = ("setting", "method", "quantity", "paper", "ours", "difference", "KB up per node")


def cells(line: Line) -> tuple[str, ...]:
    """Return a line of the table as text."""
    found = line.finding
    return (
        found.setting,
        found.method,
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


def rich_table(found: Findings, reproduction: Reproduction) -> Table:
    """Return the comparison as a table for the screen."""
    table = Table(
        title=f"{reproduction.paper}, {reproduction.where}{_marks(found)}",
        title_justify="left",
        caption="* more than twice the joint spread",
        caption_justify="left",
    )
    lines = compare(found)
    # Where all lines are of one quantity, the heading has it.
    quantities = {line.finding.quantity for line in lines}
    shown = [i for i, each in enumerate(HEADINGS) if each != "quantity" or len(quantities) > 1]
    for index in shown:
        heading = HEADINGS[index]
        if heading == "ours" and len(quantities) == 1:
            heading = f"ours, {quantities.pop()}"
        table.add_column(heading, justify="left" if index < 3 else "right")
    before = None
    for line in lines:
        setting = line.finding.setting
        if before not in (None, setting):
            table.add_section()
        texts = ("" if setting == before else setting, *cells(line)[1:])
        table.add_row(*(texts[index] for index in shown))
        before = setting
    return table


def _marks(found: Findings) -> str:
    marks = [", quick" if found.quick else "", ", digits as a stand-in" if found.stand_in else ""]
    return "".join(marks)


def write_csv(found: Findings, path: Path) -> None:
    """Write every number, with one column for each seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    seeds = [f"seed {seed}" for seed in found.seeds]
    writer.writerow([*HEADINGS[:3], "paper", "paper sd", "mean", "sd", "difference", *seeds])
    for line in compare(found):
        each, known = line.finding, line.published
        numbers = [
            known.mean if known else None,
            known.sd if known else None,
            each.mean if each.values else None,
            each.sd,
            line.difference,
            *each.by_seed,
        ]
        writer.writerow([each.setting, each.method, each.quantity, *map(_plain, numbers)])
    path.write_text(text.getvalue())


def _plain(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


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
    head = "".join(
        f'<th class="{"text" if i < 3 else ""}">{escape(each)}</th>'
        for i, each in enumerate(HEADINGS)
    )
    rows = "".join(f"<tr>{_html_cells(line)}</tr>" for line in compare(found))
    image = base64.b64encode(picture.read_bytes()).decode("ascii")
    notes = "".join(f"<li>{escape(note)}</li>" for note in explain(found))
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in about_lines(found, reproduction)),
        f'<section><figure><img style="max-width:60rem" alt="{escape(title)}" '
        f'src="data:image/png;base64,{image}"></figure></section>',
        f'<section><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>',
        '<p class="soft">Mean ± sample standard deviation over seeds; * differs by more than twice '
        "the joint spread.</p></section>",
        f"<section><h2>Differences</h2><ul>{notes}</ul></section>" if notes else "",
        _html_failures(found.failures),
    ]
    path.write_text(document(title, "\n".join(body)))


def _html_cells(line: Line) -> str:
    return "".join(
        f'<td class="{"text" if index < 3 else ""}">{escape(text)}</td>'
        for index, text in enumerate(cells(line))
    )


def _html_failures(failures: Sequence[str]) -> str:
    if not failures:
        return ""
    items = "".join(f"<li>{escape(each)}</li>" for each in failures)
    return f'<div class="note">Runs that failed<ul>{items}</ul></div>'
