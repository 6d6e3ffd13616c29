"""The page of the bench: every table with its ratios, how each cost grows, and on what machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from simulations.bench.bench_files import Change, PartResult, change_table, write_files
from simulations.bench.growth_plot import described, plot_growth
from simulations.report.pages import caption, document, figure, folded
from simulations.report.tables import html_table

_READING = (
    "Times are of this machine and this moment, ratios much less so. Obvious is what one would try "
    "first, limit what no way can do without (one pass over the data, one matrix product, "
    "serialisation). An exponent of 1 is a cost that doubles with the size, of 0 one that does not "
    "grow."
)


def write_page(
    folder: Path,
    parts: Sequence[PartResult],
    facts: Mapping[str, str],
    changed: Sequence[Change] = (),
) -> Path:
    """Write the page, its pictures and its figures into a folder; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("growth-*.png"):
        old.unlink()
    as_json, as_csv = write_files(folder, parts, facts)
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    others = ", ".join(path.name for path in (as_json, as_csv) if path.exists())
    body = [
        "<h1>What it costs</h1>",
        caption(f"{facts.get('date', '')} · {facts.get('command', '')}".strip(" ·")),
        f"<p>{escape(_READING)}</p>",
        folded("The machine", f"<dl>{listed}</dl>", False),
        caption(f"The same figures: {others}, beside this page."),
    ]
    if changed:
        table = html_table(change_table(changed))
        body.append(f"<section><h2>What changed</h2>{table}</section>")
    body += [_section(folder, part) for part in parts]
    page = folder / "index.html"
    page.write_text(document("What it costs", "\n".join(body)), encoding="utf-8")
    return page


def _section(folder: Path, part: PartResult) -> str:
    pieces, pictures = [f"<h2>{escape(part.name)}</h2>"], []
    if part.text:
        pieces.append(f'<div class="scroll"><pre>{escape(part.text)}</pre></div>')
    for number, table in enumerate(part.tables):
        pieces.append(f"<h3>{escape(table.heading)}</h3>")
        if table.about:
            pieces.append(caption(table.about))
        pieces.append(html_table(table.text()))
        picture = folder / f"growth-{part.name}-{number}.png"
        if plot_growth(table, picture):
            pictures.append(figure(picture, described(table)))
    if pictures:
        pieces.append(f'<div class="plots">{"".join(pictures)}</div>')
    return f"<section>{''.join(pieces)}</section>"
