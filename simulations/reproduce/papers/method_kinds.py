"""Whose method a row is: the paper's, ours, or a rival's under the same conditions."""

from __future__ import annotations

import re

from simulations.reproduce.papers.findings import published
from simulations.reproduce.papers.methods import ENSEMBLES, PEERS, REFERENCES, heads

PAPER, OURS, RIVAL = "paper", "ours", "rival"
_RIVALS = (*PEERS, *ENSEMBLES, *heads())
# What stands in the papers' figures, which print no numbers.
_IN_FIGURES = re.compile(
    r"^(b = |Δ = |FedAvg, C|periodic$|dynamic(, Δ.*)?$|nosync$|serial$|radii sampled$"
    r"|(GEMS|average|local|raw), rate|over )"
)


def method_kind(name: str, method: str) -> str:
    """Return whose method it is.

    Parameters
    ----------
    name : str
        The reproduction.
    method : str
        A row of its table. One that the paper prints numbers of is the paper's, whoever invented
        it.
    """
    if any(method == each for _, each, _ in published(name)) or method in REFERENCES:
        return PAPER
    if method.startswith(_RIVALS):
        return RIVAL
    return PAPER if _IN_FIGURES.match(method) else OURS
