"""Reproduced, differs, does not fit: one verdict for every table and figure, from findings alone.

The rule: *reproduced* if every number that was compared lies within twice the joint spread of the
paper and ours and every claim of the text holds; *differs* if one does not. Nothing is rounded up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from simulations.reproduce.papers.findings import Findings, Line, compare, published
from simulations.reproduce.papers.items import Item
from simulations.reproduce.papers.text_claims import CLAIMS_OF_TEXT

REPRODUCED, DIFFERS, NOT_RUN = "reproduced", "differs", "not run"


@dataclass(frozen=True)
class Judgement:
    """What became of a table or figure.

    Parameters
    ----------
    item : Item
        The table or figure.
    verdict : str
        One of the words above, or the one that the item has.
    printed : int
        How many numbers the paper prints in it.
    compared, beyond : int
        How many of them were measured, and how many are more than twice the joint spread apart, or
        a target that was never reached.
    claims : dict
        Sentences of the text, and whether they hold.
    found : Findings, optional
        What was measured.
    """

    item: Item
    verdict: str
    printed: int = 0
    compared: int = 0
    beyond: int = 0
    claims: Mapping[str, bool] | None = None
    found: Findings | None = None


def judge(item: Item, found: Findings | None) -> Judgement:
    """Return the verdict on a table or figure.

    Parameters
    ----------
    item : Item
        What is judged.
    found : Findings, optional
        Those of the reproduction that it reads; None if there are none.
    """
    if item.verdict:
        return Judgement(item, item.verdict)
    numbers = sum(bool(re.search(item.settings, key[0])) for key in published(item.reads))
    if found is None:
        return Judgement(item, NOT_RUN, numbers)
    lines = [each for each in compare(found) if re.search(item.settings, each.finding.setting)]
    missed = sum(_missed(line, found) for line in lines)
    compared = [line for line in lines if line.difference is not None]
    beyond = sum(line.notable for line in compared) + missed
    answers = {each.says: each.holds(found) for each in CLAIMS_OF_TEXT.get(item.name, ())}
    claims = {says: holds for says, holds in answers.items() if holds is not None}
    if not compared and not missed and not claims:
        verdict = NOT_RUN
    else:
        verdict = DIFFERS if beyond or not all(claims.values()) else REPRODUCED
    return Judgement(item, verdict, numbers, len(compared) + missed, beyond, claims, found)


def _missed(line: Line, found: Findings) -> bool:
    """Whether runs ended without reaching what the paper's did, rather than failed."""
    each = line.finding
    if line.published is None or each.values or not each.by_seed:
        return False
    return not any(
        text.startswith(f"{each.setting}, {each.method}, seed") for text in found.failures
    )
