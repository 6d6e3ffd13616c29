"""The top of the results page: a row for every table and figure, paper by paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from simulations.report.tables import TextTable, markdown_table
from simulations.reproduce.papers.claims import PROGRAM
from simulations.reproduce.papers.findings import Findings, compare
from simulations.reproduce.papers.items import DOES_NOT_FIT, NO_RESULT, all_items
from simulations.reproduce.papers.verdicts import DIFFERS, NOT_RUN, REPRODUCED, Judgement, judge

HEADINGS = ("table, figure", "verdict", "why", "compared", "seeds", "minutes", "command")
_HOUR = 60.0

_RULE = """**The rule.** *Reproduced*: every number that was compared lies within twice the joint
spread of the paper and ours, and every claim that the text makes of a picture holds. *Differs*: at
least one does not; the sentence says why, and the details below explain each difference. *Does not
fit*: it cannot be run here. *No result*: a drawing, or settings. A number without a spread, in the
paper and in ours, may differ by half of its last digit only. Minutes are those of the whole
experiment, which several rows may share.
"""


def overview(kept: Mapping[str, Findings]) -> str:
    """Return the top of the page as Markdown.

    Parameters
    ----------
    kept : mapping
        Findings of full runs by the name of the reproduction.
    """
    judged = [judge(item, kept.get(item.reads)) for item in all_items()]
    parts = [_in_short(judged, kept), _RULE]
    for paper in dict.fromkeys(each.item.paper for each in judged):
        rows = [_row(each) for each in judged if each.item.paper == paper]
        table = "\n".join(markdown_table(TextTable.of(HEADINGS, rows)))
        parts.append(f'### {paper}\n\n<div class="verdicts">\n\n{table}\n\n</div>\n')
    return "\n".join(parts)


def _in_short(judged: Sequence[Judgement], kept: Mapping[str, Findings]) -> str:
    """Say how many of each verdict there are, how many numbers, and how long it took."""
    counts = Counter(each.verdict for each in judged)
    with_result = sum(counts.values()) - counts[NO_RESULT]
    verdicts = ", ".join(
        f"{counts[verdict]} × {verdict}"
        for verdict in (REPRODUCED, DIFFERS, DOES_NOT_FIT, NOT_RUN)
        if counts[verdict]
    )
    # Checks of our own that a claim reads are no tables of a paper.
    read = {each.item.reads for each in judged}
    lines = [
        line
        for name, found in kept.items()
        for line in compare(found)
        if name in read and line.difference is not None
    ]
    beyond = sum(line.notable for line in lines)
    return (
        f"**In short.** Of the {with_result} rows below that have results: {verdicts}. "
        f"{len(lines)} printed numbers were compared; {beyond} of them are more than twice the "
        f"joint spread away. {_took(kept)}\n"
    )


def _took(kept: Mapping[str, Findings]) -> str:
    minutes = sum(float(found.made.get("minutes", 0.0)) for found in kept.values())
    machines = ", ".join(sorted({str(found.made.get("machine")) for found in kept.values()}))
    return f"All of it took {minutes / _HOUR:.1f} hours on one machine ({machines})."


def _row(each: Judgement) -> tuple[str, ...]:
    item, found = each.item, each.found
    verdict = f"**{each.verdict}**" if each.verdict in (REPRODUCED, DIFFERS) else each.verdict
    seeds = str(len(found.seeds)) if found else "–"
    minutes = f"{found.made['minutes']:g}" if found else "–"
    command = f"`{PROGRAM} {item.reads}`" if item.reads else "–"
    where = f"[{item.where}](#{item.reads})" if found else item.where
    why = item.says[:1].upper() + item.says[1:] if item.says else "–"
    return (f"{where}: {item.shows}", verdict, why, _compared(each), seeds, minutes, command)


def _compared(each: Judgement) -> str:
    parts = []
    if each.compared:
        of = f" of {each.printed}" if each.printed > each.compared else ""
        word = "number" if each.printed == 1 else "numbers"
        parts.append(f"{each.compared}{of} {word}, {each.beyond} beyond")
    if each.claims:
        parts.append(f"{sum(each.claims.values())} of {len(each.claims)} claims hold")
    return "; ".join(parts) or "–"
