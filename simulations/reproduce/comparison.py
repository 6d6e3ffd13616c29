"""The paper's numbers beside ours: one table for the screen, a page and the docs.

The rule: a number *agrees* if it lies within twice the joint spread of the paper and ours; without
a spread, within half of the paper's last digit. Otherwise it *differs*, and so does a target that
was never reached. Nothing is rounded up, and verdicts are computed, never written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console

from simulations.report.pages import caption, document, figure, note
from simulations.report.plotting import save
from simulations.report.tables import TextTable, html_table, print_table
from simulations.reproduce.findings import Finding, Findings, Published, published, sources
from simulations.reproduce.study import Scope, Study

AGREES, DIFFERS = "agrees", "differs"
# Beyond this many joint standard deviations a number differs.
_NOTABLE = 2.0
# Papers print two or three digits: what rounding alone can make of a difference, in last digits.
_ROUNDING = 0.5
HEADINGS = ("setting", "method", "quantity", "paper", "ours", "KB up", "difference", "verdict")


@dataclass(frozen=True)
class Line:
    """A finding beside the published number; those of quick runs are not judged."""

    finding: Finding
    published: Published | None
    is_judged: bool = True

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if self.published is None or not self.finding.values:
            return None
        return self.finding.mean - self.published.mean

    @property
    def verdict(self) -> str:
        """Whether ours agrees with the paper's; empty where there is nothing to compare."""
        if self.published is None or not self.finding.by_seed or not self.is_judged:
            return ""
        if self.difference is None:
            return DIFFERS
        spread = math.hypot(self.finding.sd or 0.0, self.published.sd or 0.0)
        allowed = max(_NOTABLE * spread, _ROUNDING * self.published.digit)
        return DIFFERS if abs(self.difference) > allowed else AGREES

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        found, places = self.finding, self._places
        kilobytes = sum(found.kilobytes) / len(found.kilobytes) if found.kilobytes else None
        return (
            *found.key,
            "" if self.published is None else _text(self.published.mean, self.published.sd, places),
            self._ours(),
            "" if not kilobytes else f"{kilobytes:,.0f}" if kilobytes >= 10 else f"{kilobytes:.1f}",
            "" if self.difference is None else f"{self.difference:+.{places}f}",
            self.verdict,
        )

    @property
    def _places(self) -> int:
        largest = self.finding.mean if self.finding.values else 0.0
        return 3 if abs(largest) < 10 else 1

    def _ours(self) -> str:
        found = self.finding
        if not found.values:
            return "not reached" if found.missing else "–"
        missing = f" ({found.missing} missing)" if found.missing else ""
        return _text(found.mean, found.sd, self._places) + missing


def _text(mean: float, sd: float | None, places: int) -> str:
    whole = abs(mean) >= 10 and mean == int(mean)
    number = f"{mean:.0f}" if whole else f"{mean:.{places}f}"
    return number if sd is None else f"{number} ± {sd:.{places}f}"


def compare(found: Findings) -> list[Line]:
    """Set every finding beside the published number, if there is one."""
    known = published(found.name)
    in_full = not (found.quick or found.stand_in)
    return [Line(each, known.get(each.key), in_full) for each in found.findings]


def comparison_table(
    found: Findings, shown: Sequence[str] = (), *, judged: bool = False
) -> TextTable:
    """Return findings beside the published numbers; columns without anything are left out.

    By default all of them; those of some quantities, or those that have a verdict.
    """
    lines = [line for line in compare(found) if not shown or line.finding.quantity in shown]
    rows = [line.cells() for line in lines if not judged or line.verdict]
    used = [i for i in range(len(HEADINGS)) if i < 2 or any(row[i] for row in rows)]
    if len({row[2] for row in rows}) == 1:
        used.remove(2)
    return TextTable.of(
        (HEADINGS[i] for i in used),
        ([row[i] for i in used] for row in rows),
        names=tuple(place for place, i in enumerate(used) if i in (0, 1, 2, 7)),
        group_by=0,
    )


def count(found: Findings) -> tuple[int, int]:
    """Return how many published numbers were compared, and how many of them agree."""
    verdicts = [line.verdict for line in compare(found) if line.verdict]
    return len(verdicts), verdicts.count(AGREES)


def title_of(found: Findings, study: Study) -> str:
    """Return what a table of findings is called."""
    names = dict.fromkeys(each.quantity for each in found.findings)
    marks = [study.name if study.is_ours else f"{study.paper}, {study.where}"]
    marks += ["quick"] if found.quick else []
    marks += ["another data set"] if found.stand_in else []
    return ", ".join(marks) + (f": {next(iter(names))}" if len(names) == 1 else "")


def print_comparison(found: Findings, study: Study, console: Console) -> None:
    """Print the comparison on the screen."""
    compared, agree = count(found)
    says = f"{agree} of {compared} published numbers agree (twice the joint spread). "
    print_table(
        comparison_table(found, study.shown),
        console,
        title=title_of(found, study),
        caption=f"{says if compared else ''}KB up: of a node",
    )


def about_lines(found: Findings, study: Study) -> list[str]:
    """Return how the findings came about, in sentences."""
    made, lines = found.made, [study.about]
    if study.differs:
        lines.append(f"Differs from the paper: {study.differs}")
    if found.stand_in and not study.is_ours:
        lines.append("The bundled digits stand in for the paper's data: numbers cannot agree.")
    if found.quick:
        lines.append("The quick version: shapes can be compared, numbers cannot.")
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    lines.append(
        f"Seeds {', '.join(map(str, found.seeds))}; commit {made['commit']}, {made['date']}; "
        f"{made['machine']}; Python {made['python']}, {versions}; {made['minutes']:g} minutes."
    )
    return lines + [f"Published: {source}." for source in sources(found.name)]


def write_comparison(found: Findings, study: Study, scope: Scope) -> Path:
    """Write JSON, picture and page; return the path of the page."""
    file = study.file(scope)
    file.write_bytes(found.to_bytes())
    title, parts = title_of(found, study), []
    if study.draw is not None:
        picture = file.with_suffix(".png")
        save(study.draw(found), picture)
        parts.append(f"<section>{figure(picture, title, width_rem=60)}</section>")
    body = [
        f"<h1>{escape(title)}</h1>",
        *map(caption, about_lines(found, study)),
        *parts,
        f"<section>{html_table(comparison_table(found, study.shown))}",
        caption("Mean ± sample standard deviation over seeds. KB up: of a node."),
        "</section>",
        note("Runs that failed", found.failures),
    ]
    page = file.with_suffix(".html")
    page.write_text(document(title, "\n".join(body)), encoding="utf-8")
    return page
