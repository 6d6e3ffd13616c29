"""What an inspection found, as plain values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gems_flwr.leaks.inspection import ClassFinding, Inspection
from gems_flwr.leaks.report_text import verdict
from gems_flwr.leaks.what_if import Outcome
from gems_flwr.spaces.cone import ClassMomentCone

# Raised if a field changes its meaning.
JSON_VERSION = 1


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
