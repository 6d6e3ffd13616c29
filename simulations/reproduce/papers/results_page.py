"""``docs/results.md``, written from the results files and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from simulations.command_line import UsageError
from simulations.report.figures import save
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.papers.claims import CLAIMS
from simulations.reproduce.papers.comparison import print_comparison, write_findings_csv
from simulations.reproduce.papers.findings import Findings
from simulations.reproduce.papers.page_overview import overview
from simulations.reproduce.papers.page_sections import claims_section, experiment_section
from simulations.reproduce.papers.spec import Reproduction

DOCS = Path(__file__).resolve().parents[3] / "docs"
# What full runs gave: large, and of no use to a reader of the documentation.
MEASURED = Path(__file__).with_name("measured")

_TITLE = """# The papers' tables and figures, beside ours

Which tables and figures come out again, which do not, and why. Every row has its command, which
gives the same numbers on a machine of your own; with `--quick` it takes minutes, and
`python -m simulations.reproduce all` runs whatever is missing. Written by
`python -m simulations.reproduce --page` from the files in `simulations/reproduce/papers/measured`;
not to be edited.

[What we found about the papers' claims](#what-we-found-about-the-papers-claims) ·
[every experiment, with all numbers](#every-experiment)
"""

_DETAILS = """## Every experiment

Mean ± sample standard deviation over seeds; \\* marks a difference of more than twice the joint
spread of the paper and ours; KB up are those of a node. *Whose* tells the paper's own methods,
ours, and rivals: merging methods and classifiers of others under identical conditions.
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


def kept_findings(folder: Path) -> dict[str, Findings]:
    """Return what full runs gave, by name: those of the catalogue first, in its order."""
    found = {path.stem: Findings.from_json(path.read_text()) for path in folder.glob("*.json")}
    order = [*(name for name in PAPERS if name in found), *sorted(set(found) - set(PAPERS))]
    return {name: found[name] for name in order}


def write_results() -> Path:
    """Write the page and its pictures, and a CSV file beside the findings that are there."""
    pictures = DOCS / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    kept = kept_findings(MEASURED)
    for name, found in kept.items():
        write_findings_csv(found, MEASURED / f"{name}.csv")
        if name in PAPERS:
            save(PAPERS[name].draw(found), pictures / f"{name}.png")
    for claim in CLAIMS:
        if claim.reads in kept:
            save(claim.draw(kept[claim.reads]), pictures / claim.picture)
    path = DOCS / "results.md"
    path.write_text(render(MEASURED))
    return path


def render(folder: Path) -> str:
    """Return the page as text."""
    kept = kept_findings(folder)
    parts = [_TITLE, overview(kept), claims_section(kept), _DETAILS]
    parts += [experiment_section(PAPERS[name], kept[name]) for name in kept if name in PAPERS]
    missing = [name for name in PAPERS if name not in kept]
    if missing:
        parts.append("## Not run in full\n\n" + "".join(f"- {_named(name)}\n" for name in missing))
    return "\n".join(parts)


def _named(name: str) -> str:
    each = PAPERS[name]
    return f"`{name}`: {each.paper}, {each.where}. {each.about}"
