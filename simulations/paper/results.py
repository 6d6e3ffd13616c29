"""``docs/results.md``, written from the results files and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from simulations.paper.catalogue import CATALOGUE
from simulations.paper.explanations import explain
from simulations.paper.findings import Findings, compare
from simulations.paper.show import HEADINGS, about_lines, cells, write_csv
from simulations.report.figures import save

_TITLE = """# The papers' tables and figures, beside ours

Written by `python -m simulations.paper results` from the files in `docs/results`; not to be edited.
Each section is one command, `python -m simulations.paper NAME`; `quick=true` takes minutes. Mean ±
sample standard deviation over seeds; \\* marks a difference of more than twice the joint spread of
the paper and ours, which is then explained. Methods that the paper does not have stand in the same
table: cones, ensembles and merging methods of others, under identical conditions.
"""


def publish(name: str, runs: Path, docs: Path) -> None:
    """Copy the findings of a full reproduction to where `write_results` reads them."""
    target = docs / "results"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(runs / name / f"{name}.json", target / f"{name}.json")


def write_results(docs: Path) -> Path:
    """Write the page, its pictures and its CSV files from the findings that are there."""
    folder = docs / "results"
    for path in sorted(folder.glob("*.json")):
        found = Findings.from_json(path.read_text())
        save(CATALOGUE[found.name].draw(found), path.with_suffix(".png"))
        write_csv(found, path.with_suffix(".csv"))
    path = docs / "results.md"
    path.write_text(render(folder))
    return path


def render(folder: Path) -> str:
    """Return the page as text."""
    known = [name for name in CATALOGUE if (folder / f"{name}.json").exists()]
    parts = [_TITLE, _overview(known, folder)]
    for name in known:
        parts.append(_section(name, Findings.from_json((folder / f"{name}.json").read_text())))
    missing = [name for name in CATALOGUE if name not in known]
    if missing:
        parts.append("## Not run in full\n\n" + "".join(f"- {_named(name)}\n" for name in missing))
    return "\n".join(parts)


def _named(name: str) -> str:
    each = CATALOGUE[name]
    return f"`{name}`: {each.paper}, {each.where}. {each.about}"


def _overview(names: Sequence[str], folder: Path) -> str:
    lines = [
        "| experiment | paper | numbers compared | beyond twice the spread |",
        "|---|---|---|---|",
    ]
    for name in names:
        found = Findings.from_json((folder / f"{name}.json").read_text())
        compared = [line for line in compare(found) if line.difference is not None]
        notable = sum(line.notable for line in compared)
        lines.append(
            f"| [`{name}`](#{name}) | {CATALOGUE[name].paper}, {CATALOGUE[name].where} "
            f"| {len(compared)} | {notable} |"
        )
    return "\n".join(lines) + "\n"


def _section(name: str, found: Findings) -> str:
    reproduction = CATALOGUE[name]
    lines = [f"## {name}", "", f"**{reproduction.paper}, {reproduction.where}.**"]
    lines += [" ".join(about_lines(found, reproduction)), ""]
    lines += [f"![{reproduction.where}](results/{name}.png)", ""]
    notes = explain(found)
    if notes:
        lines += ["Differences:", "", *(f"- {note}" for note in notes), ""]
    if found.failures:
        lines += ["Runs that failed:", "", *(f"- {each}" for each in found.failures), ""]
    lines += ["<details><summary>All numbers</summary>", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |"]
    lines += ["|" + "---|" * len(HEADINGS)]
    lines += [
        "| " + " | ".join(cells(line)).replace(" *", " \\*") + " |" for line in compare(found)
    ]
    return "\n".join([*lines, "", "</details>", ""])
