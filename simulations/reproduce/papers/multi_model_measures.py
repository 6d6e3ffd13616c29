"""What is read off a run with several models: accuracies on the way, draws, noise of the steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Where accuracies are read off; runs are evaluated at least as often.
ROUNDS = (10, 20, 30, 50, 70, 100, 150)
# How long a run is that shows what rules without importance lack.
SHORT = 30
# Single rounds are noisy: what is compared beside the last round is the mean of the last third.
LATE_ACCURACY = "accuracy, last third of the rounds"
DRAWS = "draws per pair"
VARIANCE = "variance of a step"
STEP_NOISE = "sd of the step size"
RESIDUAL = "what old updates leave"


def accuracy_after(number: int) -> str:
    """Return what the accuracy after a round is called."""
    return f"accuracy after {number} rounds"


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def _accuracies(folder: Path) -> dict[int, float]:
    """Return the mean accuracy of all models by round, where they were evaluated."""
    found = {each["round"]: each["server_metrics"].get("accuracy") for each in _records(folder)}
    return {number: float(value) for number, value in found.items() if value is not None}


def late_accuracy(folder: Path) -> float | None:
    """Return the mean accuracy over the evaluations of the last third."""
    found = _accuracies(folder)
    late = [value for number, value in found.items() if number >= 2 * max(found) / 3]
    return statistics.fmean(late) if late else None


def _by_model(folder: Path, prefix: str) -> Iterator[list[float]]:
    """Yield each model's metric over the rounds that have it; a warm start does not count."""
    series: dict[str, list[float]] = {}
    for record in _records(folder):
        if record["round"] <= 1:
            continue
        for name, value in record["train_metrics"].items():
            if name.startswith(prefix):
                series.setdefault(name, []).append(float(value))
    yield from series.values()


def draws_per_pair(result: Mapping[str, Any], folder: Path) -> float | None:
    """Return how often a pair was drawn in the whole run, on average over those there are."""
    shares = json.loads((folder / "partition.json").read_text())["nodes"]
    tasks = len(result["details"]["accuracies"])
    pairs = 0
    for node in shares:
        classes = len(node["train"]) // tasks
        parts = [node["train"][task * classes :][:classes] for task in range(tasks)]
        pairs += sum(any(part) for part in parts)
    drawn = sum(each["train_metrics"].get("pairs_drawn", 0.0) for each in _records(folder))
    return drawn / pairs if pairs else None


def mean_variance(folder: Path) -> float | None:
    """Return the estimated variance of a model's step, mean over models and rounds."""
    series = [statistics.fmean(each) for each in _by_model(folder, "variance/")]
    return statistics.fmean(series) if series else None


def step_noise(folder: Path) -> float | None:
    """Return the standard deviation of Σ d/p over rounds, mean over models."""
    series = [statistics.pstdev(each) for each in _by_model(folder, "step_size/")]
    return statistics.fmean(series) if series else None


def residual(folder: Path) -> float | None:
    """Return Σ‖U − βh‖² / Σ‖U‖² of the pairs drawn again; above 1 old updates add variance."""
    values = [value for each in _by_model(folder, "residual/") for value in each]
    return statistics.median(values) if values else None


def _after(number: int) -> Callable[[Mapping[str, Any], Path], float | None]:
    return lambda _, folder: _accuracies(folder).get(number)


MULTI_MODEL_MEASURES: dict[str, Callable[[Mapping[str, Any], Path], float | None]] = {
    **{accuracy_after(number): _after(number) for number in ROUNDS},
    LATE_ACCURACY: lambda _, folder: late_accuracy(folder),
    DRAWS: draws_per_pair,
    VARIANCE: lambda _, folder: mean_variance(folder),
    STEP_NOISE: lambda _, folder: step_noise(folder),
    RESIDUAL: lambda _, folder: residual(folder),
}
