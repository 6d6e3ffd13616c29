"""Why a number differs from the paper's: sentences, each backed by an experiment."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from simulations.reproduce.papers.findings import Findings, Line, compare

EXPLANATIONS = Path(__file__).with_name("explanations.yaml")


def explain(found: Findings) -> list[str]:
    """Return a sentence or two for every group of notable differences.

    What is not explained is named as such, so that a new difference is not overlooked. Quick
    versions and stand-ins are not the paper's experiments, and nothing of them is explained.
    """
    if found.quick or found.stand_in:
        return []
    open_lines = [line for line in compare(found) if line.notable]
    notes = []
    for entry in _entries().get(found.name, []):
        covered = [line for line in open_lines if _covers(entry, line)]
        if covered:
            notes.append(f"{_names(covered)}: {entry['says']}")
            open_lines = [line for line in open_lines if line not in covered]
    if open_lines:
        notes.append(f"{_names(open_lines)}: not explained.")
    return notes


def _covers(entry: dict[str, str], line: Line) -> bool:
    found = line.finding
    fields = {"setting": found.setting, "method": found.method, "quantity": found.quantity}
    return all(
        re.search(entry[name], value) for name, value in fields.items() if entry.get(name)
    ) and ("sign" not in entry or (line.difference or 0.0) * float(entry["sign"]) > 0)


def _names(lines: list[Line]) -> str:
    """Return which numbers are meant, by method."""
    by_method: dict[str, list[str]] = {}
    for line in lines:
        by_method.setdefault(line.finding.method, []).append(line.finding.setting)
    return "; ".join(
        f"{method} ({', '.join(dict.fromkeys(settings))})" for method, settings in by_method.items()
    )


@cache
def _entries() -> dict[str, list[dict[str, str]]]:
    content: Any = OmegaConf.to_container(OmegaConf.load(EXPLANATIONS))
    return content or {}
