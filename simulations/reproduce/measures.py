"""What is read off a finished run: off its result, or off its rounds in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

Result = Mapping[str, Any]
Measure = Callable[[Result, Path], float | None]
# On streams: the loss that learners suffer before they learn from each batch, and what they send.
LOSS, BYTES, MODELS = "loss per learner", "MB in all", "models per learner"
# Where accuracies of several models are read off; runs are evaluated at least as often.
ROUNDS = (10, 20, 30, 50, 70, 100, 150)
LATE_ACCURACY = "accuracy, last third of the rounds"


def accuracy_after(number: int) -> str:
    """Return what the accuracy after a round is called."""
    return f"accuracy after {number} rounds"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _detail(name: str) -> Measure:
    return lambda result, _: _number(result["details"].get(name))


def _hidden(result: Result, _: Path) -> float | None:
    """Return the hidden neurons of a layer-wise merged network."""
    sizes = result["details"].get("hidden")
    return None if sizes is None else float(sum(sizes))


def _per_learner(*names: str) -> Measure:
    """Return the sum of some details over the number of nodes; nothing where there are none."""

    def measure(result: Result, _: Path) -> float | None:
        known = [result["details"][name] for name in names if name in result["details"]]
        return sum(map(float, known)) / int(result["nodes"]) if known else None

    return measure


def _rounds_to_target(result: Result, _: Path) -> float | None:
    """Return the round in which the target was met; nothing if it never was."""
    reached = str(result["details"].get("stopped_because", "")) != "all rounds are done"
    return float(result["rounds"]) if reached else None


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's rounds."""
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def _over_rounds(name: str, first: Callable[[int], float]) -> Measure:
    """Return the mean of a test metric over the evaluated rounds from one on."""

    def measure(_: Result, folder: Path) -> float | None:
        records = {r["round"]: r["server_metrics"].get(name) for r in rounds_of(folder)}
        known = {number: value for number, value in records.items() if number and value is not None}
        late = [value for number, value in known.items() if number >= first(max(known))]
        return fmean(late) if late else None

    return measure


def _accuracy_after(wanted: int) -> Measure:
    def measure(_: Result, folder: Path) -> float | None:
        found = {r["round"]: r["server_metrics"].get("accuracy") for r in rounds_of(folder)}
        return _number(found.get(wanted))

    return measure


MEASURES: dict[str, Measure] = {
    **{name: (lambda r, _, n=name: _number(r.get(n))) for name in ("accuracy", "loss", "rmse")},  # type: ignore[misc]
    "balanced accuracy": _detail("balanced_accuracy"),
    "hidden neurons": _hidden,
    "empty": lambda result, _: float(bool(result["details"]["empty"])),
    LOSS: _per_learner("cumulative_loss"),
    MODELS: _per_learner("models_up", "models_down"),
    BYTES: lambda result, _: (result["bytes_up"] + result["bytes_down"]) / 1e6,
    "MB up": lambda result, _: result["bytes_up"] / 1e6,
    "test loss over rounds": _over_rounds("loss", lambda last: 1),
    "rounds": _rounds_to_target,
    LATE_ACCURACY: _over_rounds("accuracy", lambda last: 2 * last / 3),
    **{accuracy_after(number): _accuracy_after(number) for number in ROUNDS},
}


def kilobytes_up(result: Result) -> float:
    """Return what a node sends, on average, in KB."""
    return float(result["bytes_up"]) / int(result["nodes"]) / 1e3
