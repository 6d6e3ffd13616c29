"""A run with several models that sends nothing: `backend=silent`.

The numbers of the other backends up to rounding, several times as fast where every pair trains; see
`simulations.experiment.silent_rounds`. An interrupted run begins again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from gems_flwr.disk.files import write_atomically
from gems_flwr.server.members import join_models
from simulations.config import ConfigError, variant_of
from simulations.experiment.execution import RESULT, prepare
from simulations.experiment.experiment import Experiment
from simulations.experiment.multi_model_experiment import MultiModelExperiment
from simulations.experiment.silent_rounds import SilentRounds
from simulations.experiment.training import torch_threads


def run_silently(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Run an experiment with several models and write the folder's files.

    Returns
    -------
    dict
        What `result.json` holds.

    Raises
    ------
    ConfigError
        If it is another experiment, or has something that needs messages.
    """
    config = experiment.config
    if not isinstance(experiment, MultiModelExperiment):
        raise ConfigError("backend=silent is for strategy=multi_model; take backend=lockstep")
    if config.secure or config.strategy.get("compress", "float32") != "float32":
        raise ConfigError(
            "backend=silent sends nothing that could be masked or packed: leave secure and "
            "strategy.compress out, or take backend=lockstep"
        )
    prepare(config, folder)
    started = time.perf_counter()
    counts = json.dumps(experiment.label_counts())
    write_atomically(folder / "partition.json", counts.encode())
    records: list[dict[str, Any]] = []
    with torch_threads(config.backend.threads):
        rounds = SilentRounds(experiment)
        for number in range(config.rounds + 1):
            metrics, up, down = rounds.play(number) if number else ({}, 0, 0)
            due = number % config.evaluate_every == 0 or number == config.rounds
            scores = rounds.evaluate() if due else {}
            records.append(_record(number, metrics, scores, up, down))
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_atomically(folder / "rounds.jsonl", lines.encode())
    write_atomically(folder / "model.safetensors", save(join_models(rounds.models)))
    last = records[-1]["server_metrics"]
    variant = config.label or f"{config.names['strategy']} {variant_of(config)}".strip()
    result = {
        **{group: config.names[group] for group in ("strategy", "dataset", "partition", "model")},
        "seed": config.seed,
        "nodes": config.nodes,
        "rounds": config.rounds,
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        **{key: sum(record[key] for record in records) for key in ("bytes_up", "bytes_down")},
        "messages": 0,
        "seconds": time.perf_counter() - started,
        "nodes_failed": 0,
        "details": {
            "fingerprint": config.fingerprint(),
            "stopped_because": "all rounds are done",
            **({"evaluated_on": "validation"} if config.evaluate_on == "validation" else {}),
            "balanced_accuracy": last["balanced_accuracy"],
            "failures": [],
            "accuracies": {name: last[f"accuracy/{name}"] for name in rounds.models},
            "sampling": rounds.rule.name,
            "models": list(rounds.models),
            "sampled": rounds.sampled,
            "label": variant,
        },
    }
    write_atomically(folder / RESULT, json.dumps(result, indent=2).encode())
    return result


def _record(
    number: int, metrics: dict[str, float], scores: dict[str, float], up: int, down: int
) -> dict[str, Any]:
    """Return a line of ``rounds.jsonl``; nobody was asked, so nobody is named."""
    return {
        "round": number,
        "seconds": 0.0,
        "nodes_asked": [],
        "nodes_answered": [],
        "failures": [],
        "name_disputes": [],
        "train_metrics": metrics,
        "evaluate_metrics": {},
        "server_metrics": scores,
        "bytes_up": up,
        "bytes_down": down,
        "messages_up": 0,
        "messages_down": 0,
    }
