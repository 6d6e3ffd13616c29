"""What is read off a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Result = Mapping[str, Any]


def _detail(name: str) -> Callable[[Result], float | None]:
    return lambda result: _number(result["details"].get(name))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _hidden(result: Result) -> float | None:
    """Return the hidden neurons of a layer-wise merged network."""
    sizes = result["details"].get("hidden")
    return None if sizes is None else float(sum(sizes))


def _loss_per_learner(result: Result) -> float | None:
    total = result["details"].get("cumulative_loss")
    return None if total is None else float(total) / int(result["nodes"])


def _models_per_learner(result: Result) -> float:
    details = result["details"]
    moved = float(details.get("models_up", 0) + details.get("models_down", 0))
    return moved / int(result["nodes"])


def _rounds_to_target(result: Result) -> float | None:
    """Return the round in which the target was met; nothing if it never was."""
    reached = str(result["details"].get("stopped_because", "")) != "all rounds are done"
    return float(result["rounds"]) if reached else None


MEASURES: dict[str, Callable[[Result], float | None]] = {
    "accuracy": lambda result: _number(result["accuracy"]),
    "balanced accuracy": _detail("balanced_accuracy"),
    "loss": lambda result: _number(result["loss"]),
    "hidden neurons": _hidden,
    "empty": lambda result: float(bool(result["details"]["empty"])),
    "loss per learner": _loss_per_learner,
    "models per learner": _models_per_learner,
    "MB in all": lambda result: (result["bytes_up"] + result["bytes_down"]) / 1e6,
    "rounds": _rounds_to_target,
}


def kilobytes_up(result: Result) -> float:
    """Return what a node sends, on average, in KB."""
    return float(result["bytes_up"]) / int(result["nodes"]) / 1e3
