"""What is read off a finished run: off its result, or off its rounds in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

Result = Mapping[str, Any]
Measure = Callable[[Result, Path], float | None]
# How long after a drift communication counts as a reaction to it.
REACTION_ROUNDS = 50


def _detail(name: str) -> Measure:
    return lambda result, _: _number(result["details"].get(name))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _hidden(result: Result, _: Path) -> float | None:
    """Return the hidden neurons of a layer-wise merged network."""
    sizes = result["details"].get("hidden")
    return None if sizes is None else float(sum(sizes))


def _loss_per_learner(result: Result, _: Path) -> float | None:
    total = result["details"].get("cumulative_loss")
    return None if total is None else float(total) / int(result["nodes"])


def _models_per_learner(result: Result, _: Path) -> float:
    details = result["details"]
    moved = float(details.get("models_up", 0) + details.get("models_down", 0))
    return moved / int(result["nodes"])


def _rounds_to_target(result: Result, _: Path) -> float | None:
    """Return the round in which the target was met; nothing if it never was."""
    reached = str(result["details"].get("stopped_because", "")) != "all rounds are done"
    return float(result["rounds"]) if reached else None


def burst(folder: Path, drifts: Sequence[int]) -> float | None:
    """Return how much more is sent per round right after a drift than in quiet times.

    The first rounds of a run, when everything is new, count as neither.
    """
    sent: dict[int, float] = {}
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        sent[record["round"]] = record["bytes_up"] + record["bytes_down"]
    excited = {r for d in drifts for r in range(d, d + REACTION_ROUNDS)}
    after = [each for number, each in sent.items() if number in excited]
    quiet = [
        each for number, each in sent.items() if number > REACTION_ROUNDS and number not in excited
    ]
    if not after or not quiet or not sum(quiet):
        return None
    return fmean(after) / fmean(quiet)


MEASURES: dict[str, Measure] = {
    "accuracy": lambda result, _: _number(result.get("accuracy")),
    "balanced accuracy": _detail("balanced_accuracy"),
    "loss": lambda result, _: _number(result["loss"]),
    "rmse": lambda result, _: _number(result.get("rmse")),
    "hidden neurons": _hidden,
    "empty": lambda result, _: float(bool(result["details"]["empty"])),
    "loss per learner": _loss_per_learner,
    "models per learner": _models_per_learner,
    "MB in all": lambda result, _: (result["bytes_up"] + result["bytes_down"]) / 1e6,
    "rounds": _rounds_to_target,
    "burst after drift": lambda result, folder: burst(folder, result["details"].get("drifts", [])),
}


def kilobytes_up(result: Result) -> float:
    """Return what a node sends, on average, in KB."""
    return float(result["bytes_up"]) / int(result["nodes"]) / 1e3
