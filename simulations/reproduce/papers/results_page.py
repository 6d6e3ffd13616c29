"""``docs/results.md``, written from the results files and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from simulations.command_line import UsageError
from simulations.report.figures import save
from simulations.report.tables import TextTable, markdown_table
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.papers.comparison import (
    about_lines,
    comparison_table,
    print_comparison,
    write_findings_csv,
)
from simulations.reproduce.papers.explanations import explain
from simulations.reproduce.papers.findings import Findings, compare
from simulations.reproduce.papers.spec import Reproduction

DOCS = Path(__file__).resolve().parents[3] / "docs"
# What full runs gave: large, and of no use to a reader of the documentation.
MEASURED = Path(__file__).with_name("measured")

_TITLE = """# The papers' tables and figures, beside ours

Written by `python -m simulations.reproduce --page` from the files in
`simulations/reproduce/papers/measured`; not to be edited. Each section is one command,
`python -m simulations.reproduce NAME`; `--quick` takes minutes. Mean ± sample standard deviation
over seeds; \\* marks a difference of more than twice the joint spread of the paper and ours, which
is then explained. Methods that the paper does not have stand in the same table: cones, ensembles
and merging methods of others, under identical conditions.
"""


def publish(name: str, output: Path) -> None:
    """Keep the findings of a full reproduction where `write_results` reads them."""
    MEASURED.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(output / name / f"{name}.json", MEASURED / f"{name}.json")


def show_kept(reproduction: Reproduction, console: Console) -> None:
    """Print the comparison of the findings that are kept.

    Raises
    ------
    UsageError
        If the experiment has not been run in full.
    """
    path = MEASURED / f"{reproduction.name}.json"
    if not path.exists():
        raise UsageError(f"{reproduction.name} has not been run in full: there is nothing to show")
    print_comparison(Findings.from_json(path.read_text()), reproduction, console)


def write_results() -> Path:
    """Write the page and its pictures, and a CSV file beside the findings that are there."""
    pictures = DOCS / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    for path in sorted(MEASURED.glob("*.json")):
        found = Findings.from_json(path.read_text())
        save(PAPERS[found.name].draw(found), pictures / f"{path.stem}.png")
        write_findings_csv(found, path.with_suffix(".csv"))
    path = DOCS / "results.md"
    path.write_text(render(MEASURED))
    return path


def render(folder: Path) -> str:
    """Return the page as text."""
    known = [name for name in PAPERS if (folder / f"{name}.json").exists()]
    parts = [_TITLE, _overview(known, folder)]
    for name in known:
        parts.append(_section(name, Findings.from_json((folder / f"{name}.json").read_text())))
    missing = [name for name in PAPERS if name not in known]
    if missing:
        parts.append("## Not run in full\n\n" + "".join(f"- {_named(name)}\n" for name in missing))
    return "\n".join(parts)


def _named(name: str) -> str:
    each = PAPERS[name]
    return f"`{name}`: {each.paper}, {each.where}. {each.about}"


def _overview(names: Sequence[str], folder: Path) -> str:
    rows = []
    for name in names:
        found = Findings.from_json((folder / f"{name}.json").read_text())
        compared = [line for line in compare(found) if line.difference is not None]
        notable = sum(line.notable for line in compared)
        paper = f"{PAPERS[name].paper}, {PAPERS[name].where}"
        rows.append((f"[`{name}`](#{name})", paper, str(len(compared)), str(notable)))
    headings = ("experiment", "paper", "numbers compared", "beyond twice the spread")
    return "\n".join(markdown_table(TextTable.of(headings, rows))) + "\n"


def _section(name: str, found: Findings) -> str:
    reproduction = PAPERS[name]
    lines = [f"## {name}", "", f"**{reproduction.paper}, {reproduction.where}.**"]
    lines += [" ".join(about_lines(found, reproduction)), ""]
    lines += [f"![{reproduction.where}](results/{name}.png)", ""]
    notes = explain(found)
    if notes:
        lines += ["Differences:", "", *(f"- {note}" for note in notes), ""]
    if found.failures:
        lines += ["Runs that failed:", "", *(f"- {each}" for each in found.failures), ""]
    lines += ["<details><summary>All numbers</summary>", ""]
    lines += markdown_table(comparison_table(found))
    return "\n".join([*lines, "", "</details>", ""])
