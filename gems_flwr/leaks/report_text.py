"""What an inspection found, as tables and sentences of at most 80 columns for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from gems_flwr.leaks.auc import share_text
from gems_flwr.leaks.inspection import ClassFinding, Inspection
from gems_flwr.leaks.what_if import Outcome
from gems_flwr.spaces.cone import ClassMomentCone

WIDTH = 80


def verdict(finding: ClassFinding) -> str:
    """Return in plain words what a class gives away and whether to send it."""
    exposure = finding.exposure
    start = f"class {finding.label}: {exposure.total} samples of {exposure.features} features"
    if finding.reason is not None:
        return f"{start}, {finding.reason}: do not send"
    ending = "think twice" if finding.level == "told of" else "no alarm"
    if finding.membership is not None:
        auc = finding.membership.auc
        tells = f"members are told with an AUC of {share_text(auc.value)} ± {share_text(auc.error)}"
        return f"{start}, {tells}: {ending}"
    if finding.is_private:
        bound = share_text(exposure.mean_auc)
        return f"{start}, no attacker gets beyond an AUC of {bound}: no alarm"
    by = f"by its mean one who knows the class tells members with {share_text(exposure.mean_auc)}"
    return f"{start}, {by}: {ending}"


def summary(found: Inspection) -> str:
    """Return one line on a whole inspection."""
    gone, worst = found.given_away, found.worst
    text = f"{len(gone)} of {len(found.classes)} classes given away"
    if gone:
        return text
    tried = worst.membership
    told = f"by formula {share_text(worst.exposure.mean_auc)}"
    if tried is not None:
        told = f"{share_text(tried.auc.value)} ± {share_text(tried.auc.error)}, {told}"
    return f"{text}; most is told of class {worst.label} (AUC {told})"


def _no_alarm(found: Inspection) -> str:
    """Return one sentence on all classes of which there is little to say."""
    fine = [each for each in found.classes if each.level == "fine"]
    if not fine:
        return ""
    if len(fine) == 1:
        return verdict(fine[0])
    names = ", ".join(str(each.label) for each in fine)
    tried = [each.membership.auc for each in fine if each.membership is not None]
    if not tried:
        return f"classes {names}: no alarm"
    most = max(tried, key=lambda auc: auc.value)
    auc = f"{share_text(most.value)} ± {share_text(most.error)}"
    told = f"members are told with an AUC of {auc} at most"
    where = "" if len(tried) == len(fine) else ", where it was tried"
    return f"classes {names}: {told}{where}: no alarm"


def as_text(
    file: Path,
    cone: ClassMomentCone,
    found: Inspection,
    outcomes: Sequence[Outcome],
    rows: Sequence[float] | None,
    is_held_out: bool,
) -> list[str]:
    """Return the lines that the command prints."""
    lines = [f"{file}: {cone.kind}, {cone.size_bytes:,} bytes, {cone.num_features} features"]
    if found.recipe is not None:
        how = "makes these very bytes of the data" if found.is_reproduced else "by its form"
        lines.append(f"made by {found.recipe} ({how})")
    if cone.privacy is not None:
        lines.append(
            f"noise was promised for epsilon {cone.privacy[0]:g}, delta {cone.privacy[1]:g}; "
            "no file can prove it"
        )
    if cone.withheld:
        lines.append(f"withheld classes: {', '.join(map(str, cone.withheld))}")
    lines += ["", *_table(_HEAD, [_row(each) for each in found.classes]), ""]
    lines += wrapped(_legend(cone, found, is_held_out))
    lines.append("")
    for each in found.classes:
        if each.level != "fine":
            lines += wrapped(verdict(each), indent="  ")
    lines += wrapped(_no_alarm(found), indent="  ")
    if outcomes:
        worst = found.worst.label
        lines += ["", f"What other options would change, for class {worst} (accuracy: all classes)"]
        lines.append("")
        lines += _table(_OPTION_HEAD, [_option_row(each) for each in outcomes])
        notes = [f"{each.option}: {each.note}" for each in outcomes[1:] if each.note]
        lines += [""] if notes else []
        for note in notes:
            lines += wrapped(note, indent="  ")
    if rows is not None:
        least = min(range(len(rows)), key=lambda row: rows[row])
        lines.append("")
        lines += wrapped(
            f"A gradient (Gems(refine=…)) at the layer of this space: {rows[least]:.3g} samples "
            f"stand behind its row of class {least}, the fewest of all rows."
        )
    gone = [str(each.label) for each in found.given_away]
    lines += ["", f"DO NOT SEND: class {', '.join(gone)}" if gone else "Nothing alarming."]
    return lines


_HEAD = ("class", "samples", "rank", "AUC", "±", "formula", "rebuilt", "nearest", "")
_OPTION_HEAD = ("option", "bytes", "AUC", "±", "rebuilt", "accuracy", "class is")


def _row(finding: ClassFinding) -> tuple[str, ...]:
    exposure = finding.exposure
    return (
        str(finding.label),
        str(exposure.total),
        "mean" if exposure.directions is None else str(exposure.directions),
        *_auc_cells(finding),
        ("≤ " if finding.is_private else "") + share_text(exposure.mean_auc),
        _rebuilt_cell(finding),
        "–" if finding.rebuilt is None else share_text(finding.rebuilt.nearest, 3),
        "" if finding.level == "fine" else finding.level.upper(),
    )


def _auc_cells(finding: ClassFinding) -> tuple[str, str]:
    if finding.membership is None:
        return "–", "–"
    auc = finding.membership.auc
    return share_text(auc.value), share_text(auc.error)


def _rebuilt_cell(finding: ClassFinding) -> str:
    found = finding.rebuilt
    return "–" if found is None else f"{found.rebuilt} of {found.samples}"


def _option_row(outcome: Outcome) -> tuple[str, ...]:
    size = "–" if outcome.size_bytes is None else f"{outcome.size_bytes:,}"
    score = "–" if outcome.accuracy is None else share_text(outcome.accuracy, 3)
    finding = outcome.finding
    if finding is None:
        is_sum = outcome.size_bytes is not None and "such nodes" in outcome.option
        return outcome.option, size, "–", "–", "–", score, "see below" if is_sum else "not sent"
    cells = (*_auc_cells(finding), _rebuilt_cell(finding))
    return outcome.option, size, *cells, score, finding.level


def _legend(cone: ClassMomentCone, found: Inspection, is_held_out: bool) -> str:
    formula = (
        "formula: the most that any attacker reaches, by the noise"
        if cone.privacy is not None
        else "formula: AUC of one who knows the class's distribution, by the mean alone"
    )
    tried = [each.membership for each in found.classes if each.membership is not None]
    if not tried and all(each.rebuilt is None for each in found.classes):
        return f"{formula}. Attacks need the data: --data."
    text = (
        f"AUC: members told from others, .5 is guessing; {formula}; rebuilt: within .1 of the "
        "range, and half as far as anything known anyway; nearest: the best guess, per feature."
    )
    if not tried:
        return f"{text} Too few samples to try membership: give --held-out."
    if all(each.of_what_is_sent for each in tried):
        known = sorted({each.others // 2 for each in tried})
        return f"{text} The attacker knew {_span(known)} held-out samples of each class."
    others = sorted({each.others // 2 for each in tried if not each.of_what_is_sent})
    more = "more" if is_held_out else "some"
    return (
        f"{text} AUCs are of spaces of 3/4 of the samples, against the rest; the attacker knew "
        f"{_span(others)} samples of a class. One who knows more does better: give {more} "
        "--held-out."
    )


def _span(numbers: Sequence[int]) -> str:
    low, high = numbers[0], numbers[-1]
    return str(low) if low == high else f"{low} to {high}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned columns, the first and last to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if column in (0, len(head) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return a text in lines that fit."""
    return textwrap.wrap(text, WIDTH, initial_indent="", subsequent_indent=indent)
