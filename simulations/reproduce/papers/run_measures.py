"""What is read off a finished run: off its result, or off its rounds in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from simulations.reproduce.papers.multi_model_measures import MULTI_MODEL_MEASURES

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


def _rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def burst(folder: Path, drifts: Sequence[int]) -> float | None:
    """Return how much more is sent per round right after a drift than in quiet times.

    The first rounds of a run, when everything is new, count as neither.
    """
    sent = {each["round"]: each["bytes_up"] + each["bytes_down"] for each in _rounds(folder)}
    excited = {r for d in drifts for r in range(d, d + REACTION_ROUNDS)}
    after = [each for number, each in sent.items() if number in excited]
    quiet = [
        each for number, each in sent.items() if number > REACTION_ROUNDS and number not in excited
    ]
    if not after or not quiet or not sum(quiet):
        return None
    return fmean(after) / fmean(quiet)


def quiet_bytes(folder: Path) -> float:
    """Return the bytes of messages without a model, estimated from rounds that had none at all.

    What such a message takes is read off those rounds; a run without any has none to speak of.
    """
    quiet, without = {"up": [0, 0], "down": [0, 0]}, {"up": 0, "down": 0}
    for record in _rounds(folder):
        models = {way: record["train_metrics"].get(f"models_{way}", 0) for way in quiet}
        for way in quiet:
            messages = record[f"messages_{way}"]
            without[way] += max(0, messages - int(models[way]))
            if not any(models.values()):
                quiet[way][0] += record[f"bytes_{way}"]
                quiet[way][1] += messages
    return sum(
        bytes_ / messages * without[way] for way, (bytes_, messages) in quiet.items() if messages
    )


def _mean_test_loss(_: Result, folder: Path) -> float | None:
    """Return the mean over rounds of the loss on test data, the initial model left out."""
    records = _rounds(folder)
    losses = [r["server_metrics"].get("loss") for r in records if r["round"] > 0]
    known = [each for each in losses if each is not None]
    return fmean(known) if known else None


MEASURES: dict[str, Measure] = {
    "accuracy": lambda result, _: _number(result.get("accuracy")),
    "balanced accuracy": _detail("balanced_accuracy"),
    "loss": lambda result, _: _number(result["loss"]),
    "rmse": lambda result, _: _number(result.get("rmse")),
    "hidden neurons": _hidden,
    "empty": lambda result, _: float(bool(result["details"]["empty"])),
    "is average": lambda result, _: float(bool(result["details"]["is_average"])),
    "loss per learner": _loss_per_learner,
    "models per learner": _models_per_learner,
    "MB in all": lambda result, _: (result["bytes_up"] + result["bytes_down"]) / 1e6,
    "MB up": lambda result, _: result["bytes_up"] / 1e6,
    "MB of quiet messages": lambda _, folder: quiet_bytes(folder) / 1e6,
    "test loss over rounds": _mean_test_loss,
    "rounds": _rounds_to_target,
    "burst after drift": lambda result, folder: burst(folder, result["details"].get("drifts", [])),
    **MULTI_MODEL_MEASURES,
}


def kilobytes_up(result: Result) -> float:
    """Return what a node sends, on average, in KB."""
    return float(result["bytes_up"]) / int(result["nodes"]) / 1e3
