"""What we found about the papers' claims: each with one picture, from kept findings alone.

A claim is an entry of `CLAIMS`. The functions that judge and draw it stand in a module of the
paper, such as `gems2019_claims`; they get findings that are kept and nothing else, so that the page
can be written without a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from simulations.reproduce.papers import (
    average_claims,
    curve_figures,
    dynamic_claims,
    gems2018_claims,
    gems2019_claims,
    multi_model_claims,
    protocol_figures,
    slides_claims,
)
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


def _command(name: str) -> str:
    return f"{PROGRAM} {name}"


CLAIMS: Sequence[Claim] = (
    Claim(
        name="average",
        paper="GEMS 2019",
        statement="A model in the intersection of good-enough spaces is better than the average.",
        reads="gems2019_convex",
        found=average_claims.found,
        draw=average_claims.draw,
        command=_command("gems2019_convex"),
    ),
    *(
        Claim(
            name=f"gems2019-{each.name}",
            paper="GEMS 2019",
            statement=f"{each.title}.",
            reads=each.experiment,
            found=each.found,
            draw=each.draw,
            command=_command(each.experiment),
        )
        for each in gems2019_claims.CLAIMS
    ),
    Claim(
        name="stitched",
        paper="GEMS 2018",
        statement="Two networks can be merged neuron by neuron in one round.",
        reads=gems2018_claims.NAME,
        found=gems2018_claims.found,
        draw=gems2018_claims.draw,
        command=_command(gems2018_claims.NAME),
    ),
    Claim(
        name="stationary",
        paper="Dynamic averaging 2018",
        statement="Dynamic averaging needs half of periodic averaging's communication.",
        reads="dynamic_protocols",
        found=dynamic_claims.stationary_found,
        draw=dynamic_claims.stationary_picture,
        command=_command("dynamic_protocols"),
    ),
    Claim(
        name="drift",
        paper="Dynamic averaging 2018",
        statement="Under drift it needs up to an order of magnitude less.",
        reads="dynamic_drift",
        found=dynamic_claims.drift_found,
        draw=dynamic_claims.drift_picture,
        command=_command("dynamic_drift"),
    ),
    Claim(
        name="quiet",
        paper="Dynamic averaging 2018",
        statement="What is saved is saved between drifts.",
        reads="dynamic_quiet",
        found=dynamic_claims.quiet_found,
        draw=protocol_figures.shares_by_interval,
        command=_command("dynamic_quiet"),
    ),
    Claim(
        name="scale",
        paper="Dynamic averaging 2018",
        statement="Its advantage grows with the number of learners.",
        reads="dynamic_scale",
        found=dynamic_claims.scale_found,
        draw=dynamic_claims.scale_picture,
        command=_command("dynamic_scale"),
    ),
    Claim(
        name="initialisation",
        paper="Dynamic averaging 2018",
        statement="Learners may begin with different weights, as long as these are not far apart.",
        reads="dynamic_initialisation",
        found=dynamic_claims.initialisation_found,
        draw=curve_figures.initialisation_curves,
        command=_command("dynamic_initialisation"),
    ),
    Claim(
        name="fedavg",
        paper="Slides 2025",
        statement="FedAvg needs few rounds, and fewer with more clients in each.",
        reads="slides_fedavg",
        found=slides_claims.fedavg_found,
        draw=slides_claims.fedavg_draw,
        command=_command("slides_fedavg"),
    ),
    Claim(
        name="multi-model",
        paper="Slides 2025",
        statement="Sampling by importance, with stale updates, comes close to full participation.",
        reads="slides_multi_model",
        found=multi_model_claims.found,
        draw=multi_model_claims.draw,
        command=_command("slides_multi_model"),
    ),
)


def findings_of(claim: Claim, folder: Path) -> Findings | None:
    """Return the kept findings that a claim is judged by; None if it was not measured yet."""
    path = folder / f"{claim.reads}.json"
    return Findings.from_json(path.read_text()) if path.exists() else None
