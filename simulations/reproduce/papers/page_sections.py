"""What stands below the overview: the claims, and one folded section for each experiment."""

from __future__ import annotations

from collections.abc import Mapping

from simulations.report.tables import markdown_table
from simulations.reproduce.papers.claims import CLAIMS, PROGRAM
from simulations.reproduce.papers.comparison import about_lines, comparison_table
from simulations.reproduce.papers.explanations import explain
from simulations.reproduce.papers.findings import Findings
from simulations.reproduce.papers.items import all_items
from simulations.reproduce.papers.spec import Reproduction
from simulations.reproduce.papers.verdicts import judge


def claims_section(kept: Mapping[str, Findings]) -> str:
    """Return what we found about the papers' claims; what was not measured yet is named."""
    lines = ["## What we found about the papers' claims", ""]
    missing = [claim for claim in CLAIMS if claim.reads not in kept]
    for claim in CLAIMS:
        if claim in missing:
            continue
        lines += [f"### {claim.paper}: {claim.statement}", ""]
        lines += [claim.found(kept[claim.reads]), ""]
        lines += [f"![{claim.statement}](results/{claim.picture})", ""]
        lines += [f"    {claim.command}", ""]
    if missing:
        lines += ["Not measured in full yet:", ""]
        lines += [f"- {each.paper}: {each.statement} `{each.command}`" for each in missing]
        lines.append("")
    return "\n".join(lines)


def experiment_section(reproduction: Reproduction, found: Findings) -> str:
    """Return an experiment: its name to link to, and the rest folded."""
    name = reproduction.name
    lines = [f"### {name}", "", f"**{reproduction.paper}, {reproduction.where}.**"]
    lines += [f"{reproduction.about} `{PROGRAM} {name}`", ""]
    lines += ["<details><summary>Picture, differences, all numbers</summary>", ""]
    lines += [f"![{reproduction.where}](results/{name}.png)", ""]
    lines += [" ".join(about_lines(found, reproduction)[1:]), ""]
    if claims := _claims_of_text(name, found):
        lines += ["What the text says of the pictures:", "", *claims, ""]
    if notes := explain(found):
        lines += ["Differences:", "", *(f"- {note}" for note in notes), ""]
    if found.failures:
        lines += ["Runs that failed:", "", *(f"- {each}" for each in found.failures), ""]
    lines += ["<details><summary>All numbers</summary>", ""]
    lines += markdown_table(comparison_table(found))
    return "\n".join([*lines, "", "</details>", "", "</details>", ""])


def _claims_of_text(name: str, found: Findings) -> list[str]:
    return [
        f"- {'holds' if holds else '**does not hold**'}: {says} ({item.where})."
        for item in all_items()
        if item.reads == name
        for says, holds in (judge(item, found).claims or {}).items()
    ]
