"""What we found about the papers' claims: each with one picture, from kept findings alone.

A claim is an entry of `CLAIMS`. The functions that judge and draw it stand in a module of the
paper, such as `tuning_claims`; they get findings that are kept and nothing else, so that the page
can be written without a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from simulations.reproduce.papers import average_claims, tuning_claims
from simulations.reproduce.papers.findings import Findings

PROGRAM = "python -m simulations.reproduce"


@dataclass(frozen=True)
class Claim:
    """Something that a paper claims, or that follows from it.

    Parameters
    ----------
    name : str
        Of its picture, ``claim-NAME.png``.
    paper : str
        Whose claim it is.
    statement : str
        The claim, in a sentence.
    reads : str
        Whose findings it is judged by: a file in ``papers/measured``.
    found : callable
        Gets the findings, returns what we found in a sentence or two.
    draw : callable
        Gets the findings, returns the picture.
    command : str
        What a second person types.
    """

    name: str
    paper: str
    statement: str
    reads: str
    found: Callable[[Findings], str]
    draw: Callable[[Findings], Figure]
    command: str

    @property
    def picture(self) -> str:
        """The file name of its picture."""
        return f"claim-{self.name}.png"


CLAIMS: Sequence[Claim] = (
    Claim(
        name="average",
        paper="GEMS 2019",
        statement="A model in the intersection of good-enough spaces is better than the average.",
        reads="gems2019_convex",
        found=average_claims.found,
        draw=average_claims.draw,
        command=f"{PROGRAM} gems2019_convex",
    ),
    Claim(
        name="tuning",
        paper="GEMS 2019",
        statement="Fine-tuned on 100 public samples, GEMS is far ahead of everything else.",
        reads="gems2019_tuning",
        found=tuning_claims.found,
        draw=tuning_claims.draw,
        command=f"{PROGRAM} gems2019_tuning",
    ),
)


def findings_of(claim: Claim, folder: Path) -> Findings | None:
    """Return the kept findings that a claim is judged by; None if it was not measured yet."""
    path = folder / f"{claim.reads}.json"
    return Findings.from_json(path.read_text()) if path.exists() else None
