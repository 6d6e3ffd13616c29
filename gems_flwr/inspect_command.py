"""``gems-flwr inspect``: what a space gives away, before it is sent.

The command's options, its tables and its JSON; what is found stands in `gems_flwr.leaks`. Plain
text of at most 80 columns, for a person who decides whether a file leaves the house, and a status
that a script can wait for: 0 if nothing is alarming, 4 if a class is given away.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems_flwr.errors import OptionError
from gems_flwr.offline import describe
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.space_files import load_space

if TYPE_CHECKING:
    from gems_flwr.leaks.inspection import ClassFinding, Inspection, LayerSamples
    from gems_flwr.leaks.what_if import Outcome

GIVEN_AWAY_STATUS = 4
# Of the JSON text; raised if a field changes its meaning.
JSON_VERSION = 1
WIDTH = 80

_DATA = """\
The data are inputs of the layer that the space is for, and classes: .npz or .safetensors with arrays
'inputs' and 'labels', .csv or .npy with the class in the last column. For a plain logistic model
these are the training data; for a network, features:

    from gems_flwr import save_features
    save_features("data.npz", train_loader, model)   # the model that the server sent

Nothing leaves this machine. Status: 0 if nothing is alarming, 4 if a class is given away, 2 for
bad input."""


def add_inspect(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
    inspect = commands.add_parser(
        "inspect",
        help="say what a space gives away before it is sent (status 4: do not send)",
        description="Attack a space with the data that it was made of, as its owner.",
        epilog=_DATA,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("file", type=Path, help="a space file")
    inspect.add_argument("--data", type=Path, help="what the space was made of")
    inspect.add_argument(
        "--held-out", type=Path, help="more samples of the same kind that it was not made of"
    )
    inspect.add_argument(
        "--classes",
        type=int,
        help="attack at most so many classes, those that show most first; 12",
    )
    inspect.add_argument(
        "--no-options", action="store_true", help="do not try what other options would change"
    )
    inspect.add_argument("--seed", type=int, default=0, help="of all that is random; 0")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")
    inspect.set_defaults(run=run_inspect)


def run_inspect(options: argparse.Namespace) -> int:
    """Inspect a file and print what was found; return the status."""
    if options.held_out is not None and options.data is None:
        raise OptionError("--held-out needs --data: the samples that the space was made of")
    if options.seed < 0 or (options.classes is not None and options.classes < 0):
        raise OptionError("--seed and --classes must be at least 0")
    space = load_space(options.file)
    if not isinstance(space, ClassMomentCone):
        _print_model(options, [("file", str(options.file)), *describe(space)])
        return 0
    # Only now: scikit-learn takes a while to import.
    from gems_flwr.leaks.feature_files import read_features
    from gems_flwr.leaks.gradient_rows import row_samples
    from gems_flwr.leaks.inspection import MOST_CLASSES, inspect_cone
    from gems_flwr.leaks.what_if import own_layer, what_if

    data = None if options.data is None else read_features(options.data)
    held_out = None if options.held_out is None else read_features(options.held_out)
    _check_held_out(space, held_out)
    most = MOST_CLASSES if options.classes is None else options.classes
    said = _say if sys.stderr.isatty() else None
    found = inspect_cone(space, data, held_out, most_classes=most, seed=options.seed, progress=said)
    outcomes: list[Outcome] = []
    rows = None
    if data is not None:
        if not options.no_options:
            outcomes = what_if(space, found, data, held_out, seed=options.seed, progress=said)
        rows = row_samples(data.inputs, data.labels, *own_layer(space)).tolist()
    if said is not None:
        _say("")
    if options.json:
        print(json.dumps(as_json(options.file, space, found, outcomes, rows), indent=2))
    else:
        print("\n".join(as_text(options.file, space, found, outcomes, rows, held_out)))
    return GIVEN_AWAY_STATUS if found.given_away else 0


def _say(what: str) -> None:
    print(f"\r{what:<{WIDTH - 1}}", end="" if what else "\r", file=sys.stderr, flush=True)


def _check_held_out(space: ClassMomentCone, held_out: LayerSamples | None) -> None:
    if held_out is None:
        return
    features, top = held_out.inputs.shape[1], space.num_classes - 1
    if features != space.num_features:
        raise OptionError(
            f"held-out data: expected {space.num_features} features, as in the file, got {features}"
        )
    if held_out.labels.min() < 0 or held_out.labels.max() > top:
        raise OptionError(f"held-out data: expected classes 0 to {top}")


def _print_model(options: argparse.Namespace, rows: Sequence[tuple[str, str]]) -> None:
    note = (
        "a ball or an ellipsoid reveals the node's own model, as averaging does; what a model "
        "tells of its samples is not tried here"
    )
    if options.json:
        fields = {name.replace(" ", "_"): text for name, text in rows}
        print(json.dumps({"version": JSON_VERSION, **fields, "note": note}, indent=2))
        return
    for name, text in rows:
        print(f"{name}: {text}")
    print("\n".join(_wrapped(note)))


# --- JSON -----------------------------------------------------------------------------------------


def as_json(
    file: Path,
    cone: ClassMomentCone,
    found: Inspection,
    outcomes: Sequence[Outcome],
    rows: Sequence[float] | None,
) -> dict[str, Any]:
    """Return what was found as plain values."""
    return {
        "version": JSON_VERSION,
        "file": str(file),
        "kind": cone.kind,
        "bytes": cone.size_bytes,
        "features": cone.num_features,
        "made_by": None if found.recipe is None else str(found.recipe),
        "reproduced": found.is_reproduced,
        "privacy": None if cone.privacy is None else list(cone.privacy),
        "given_away": [each.label for each in found.given_away],
        "withheld": list(cone.withheld),
        "classes": [_finding_json(each) for each in found.classes],
        "options": [_outcome_json(each) for each in outcomes],
        "samples_behind_gradient_rows": rows,
    }


def _finding_json(finding: ClassFinding) -> dict[str, Any]:
    exposure, tried, rebuilt = finding.exposure, finding.membership, finding.rebuilt
    return {
        "label": finding.label,
        "level": finding.level,
        "verdict": verdict(finding),
        "samples": exposure.total,
        "fewest_samples": exposure.count,
        "directions": exposure.directions,
        "exact": exposure.exact,
        "auc_by_formula": exposure.mean_auc,
        "membership": None
        if tried is None
        else {
            "auc": tried.auc.value,
            "error": tried.auc.error,
            "samples": tried.samples,
            "others": tried.others,
            "of_what_is_sent": tried.of_what_is_sent,
        },
        "rebuilt": None
        if rebuilt is None
        else {
            "samples": rebuilt.samples,
            "rebuilt": rebuilt.rebuilt,
            "by_chance": rebuilt.by_chance,
            "nearest": rebuilt.nearest,
            "known_anyway": rebuilt.anyway,
        },
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    finding = None if outcome.finding is None else _finding_json(outcome.finding)
    return {
        "option": outcome.option,
        "bytes": outcome.size_bytes,
        "class": finding,
        "accuracy": outcome.accuracy,
        "note": outcome.note,
    }


# --- text -----------------------------------------------------------------------------------------


def verdict(finding: ClassFinding) -> str:
    """Return in plain words what a class gives away and whether to send it."""
    exposure = finding.exposure
    start = f"class {finding.label}: {exposure.total} samples of {exposure.features} features"
    if finding.reason is not None:
        within = ""
        if finding.rebuilt is not None and finding.rebuilt.is_attack:
            within = " within .1 of their range"
        return f"{start}, {finding.reason}{within}: do not send"
    if finding.membership is not None:
        auc = finding.membership.auc
        tells = f"members are told with an AUC of {_share(auc.value)} ± {_share(auc.error)}"
        if finding.level == "told of":
            return f"{start}, {tells}: more than the default would tell"
        return f"{start}, {tells}: no alarm"
    if finding.is_private:
        return f"{start}, no attacker gets beyond an AUC of {_share(exposure.mean_auc)}: no alarm"
    by = f"by its mean one who knows the class tells members with {_share(exposure.mean_auc)}"
    ending = "more than the default would tell" if finding.level == "told of" else "no alarm"
    return f"{start}, {by}: {ending}"


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
    told = f"members are told with an AUC of {_share(most.value)} ± {_share(most.error)} at most"
    return f"classes {names}: {told}: no alarm"


def as_text(
    file: Path,
    cone: ClassMomentCone,
    found: Inspection,
    outcomes: Sequence[Outcome],
    rows: Sequence[float] | None,
    held_out: LayerSamples | None,
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
    lines += _wrapped(_legend(cone, found, held_out))
    lines.append("")
    for each in found.classes:
        if each.level != "fine":
            lines += _wrapped(verdict(each), indent="  ")
    lines += _wrapped(_no_alarm(found), indent="  ")
    if outcomes:
        worst = found.worst.label
        lines += ["", f"What other options would change, for class {worst} (accuracy: all classes)"]
        lines.append("")
        lines += _table(_OPTION_HEAD, [_option_row(each) for each in outcomes])
        notes = [f"{each.option}: {each.note}" for each in outcomes[1:] if each.note]
        lines += [""] if notes else []
        for note in notes:
            lines += _wrapped(note, indent="  ")
    if rows is not None:
        least = min(range(len(rows)), key=lambda row: rows[row])
        lines.append("")
        lines += _wrapped(
            f"A gradient (Gems(refine=…)) at the layer of this space: {rows[least]:.3g} samples "
            f"stand behind its row of class {least}, the fewest of all rows."
        )
    gone = [str(each.label) for each in found.given_away]
    lines += ["", f"DO NOT SEND: class {', '.join(gone)}" if gone else "Nothing alarming."]
    return lines


_HEAD = ("class", "samples", "directions", "AUC", "±", "by formula", "rebuilt", "nearest", "")
_OPTION_HEAD = ("option", "bytes", "AUC", "±", "rebuilt", "accuracy", "class is")


def _row(finding: ClassFinding) -> tuple[str, ...]:
    exposure = finding.exposure
    return (
        str(finding.label),
        str(exposure.total),
        "mean" if exposure.directions is None else str(exposure.directions),
        *_auc_cells(finding),
        ("≤ " if finding.is_private else "") + _share(exposure.mean_auc),
        _rebuilt_cell(finding),
        "–" if finding.rebuilt is None else _share(finding.rebuilt.nearest, 3),
        "" if finding.level == "fine" else finding.level.upper(),
    )


def _auc_cells(finding: ClassFinding) -> tuple[str, str]:
    if finding.membership is None:
        return "–", "–"
    auc = finding.membership.auc
    return _share(auc.value), _share(auc.error)


def _rebuilt_cell(finding: ClassFinding) -> str:
    found = finding.rebuilt
    return "–" if found is None else f"{found.rebuilt} of {found.samples}"


def _option_row(outcome: Outcome) -> tuple[str, ...]:
    size = "–" if outcome.size_bytes is None else f"{outcome.size_bytes:,}"
    score = "–" if outcome.accuracy is None else _share(outcome.accuracy, 3)
    finding = outcome.finding
    if finding is None:
        is_sum = outcome.size_bytes is not None and "such nodes" in outcome.option
        return outcome.option, size, "–", "–", "–", score, "see below" if is_sum else "not sent"
    cells = (*_auc_cells(finding), _rebuilt_cell(finding))
    return outcome.option, size, *cells, score, finding.level


def _legend(cone: ClassMomentCone, found: Inspection, held_out: LayerSamples | None) -> str:
    formula = (
        "by formula: the most that any attacker reaches, by the noise"
        if cone.privacy is not None
        else "by formula: AUC of one who knows the class's distribution, by the mean alone"
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
    more = "more" if held_out is not None else "some"
    return (
        f"{text} AUCs are of spaces of 3/4 of the samples, against the rest; the attacker knew "
        f"{_span(others)} samples of a class. One who knows more does better: give {more} --held-out."
    )


def _span(numbers: Sequence[int]) -> str:
    low, high = numbers[0], numbers[-1]
    return str(low) if low == high else f"{low} to {high}"


def _share(value: float, digits: int = 2) -> str:
    """Return a number from 0 to 1 as the documentation writes it: .66, 1.00."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


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


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="", subsequent_indent=indent)
