"""One run from start to files: what every backend does once it has a grid.

A run's folder holds ``result.json``, ``rounds.jsonl``, ``config.yaml`` (resolved),
``partition.json``, ``model.safetensors``, and the checkpoint while the run is not finished.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from omegaconf import OmegaConf
from safetensors.numpy import save

from gems_flwr import wire
from gems_flwr.runtime.checkpoint import CheckpointFolder, write_atomically
from gems_flwr.strategies import Callback, RunResult
from simulations.config import RunConfig, variant_of
from simulations.experiment import Experiment
from simulations.training import torch_threads

RESULT = "result.json"
CONFIG = "config.yaml"


def finished_result(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """Return the result of an earlier run of the same config in this folder, if there is one."""
    try:
        result = json.loads((folder / RESULT).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    same = result.get("details", {}).get("fingerprint") == config.fingerprint()
    return result if same else None


def prepare(config: RunConfig, folder: Path) -> None:
    """Make the folder ready: nothing of another config, or of a run to be repeated, stays."""
    folder.mkdir(parents=True, exist_ok=True)
    resolved = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    before = folder / CONFIG
    changed = before.exists() and _fingerprint_of(before) != config.fingerprint()
    if config.fresh or changed:
        CheckpointFolder(folder).clear()
    (folder / RESULT).unlink(missing_ok=True)
    write_atomically(before, resolved.encode())


def run_server(
    experiment: Experiment,
    grid: Grid,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    *,
    simulated: bool = True,
) -> dict[str, Any]:
    """Run the experiment's strategy on a grid and write the folder's files.

    Parameters
    ----------
    experiment, grid, folder, callbacks
        What to run, where, and who is told.
    simulated : bool, default True
        Whether the nodes are those of a simulation, which may be asked for what real ones refuse.

    Returns
    -------
    dict
        What `result.json` holds.
    """
    config = experiment.config
    prepare(config, folder)
    started = time.perf_counter()
    counts = experiment.label_counts()
    write_atomically(folder / "partition.json", json.dumps(counts).encode())
    strategy = experiment.strategy(folder, callbacks, simulated=simulated)
    # The server's own mathematics is rounded differently on another number of threads, too.
    with torch_threads(config.backend.threads):
        result = strategy.start(
            grid=grid,
            initial_arrays=experiment.initial_arrays(),
            num_rounds=config.rounds,
            timeout=config.timeout,
            evaluate_fn=lambda number, arrays: (
                experiment.evaluate(strategy, arrays, number)
                if number % config.evaluate_every == 0 or number == config.rounds
                else None
            ),
        )
    if drifts := experiment.drift_rounds():
        result.details["drifts"] = drifts
    summary = summarise(config, result, seconds=time.perf_counter() - started)
    model = wire.to_numpy(result.arrays)
    write_atomically(folder / "model.safetensors", save(model))
    write_atomically(folder / RESULT, json.dumps(summary, indent=2).encode())
    # Everything in it stands in the other files now.
    CheckpointFolder(folder).clear()
    return summary


def summarise(config: RunConfig, result: RunResult, *, seconds: float) -> dict[str, Any]:
    """Return what `result.json` holds."""
    last, traffic = result.history[-1], result.traffic
    details = {
        "fingerprint": config.fingerprint(),
        "stopped_because": result.stopped_because,
        "balanced_accuracy": last.metric("balanced_accuracy"),
        "failures": [{"round": number, **asdict(each)} for number, each in result.failures],
        **_stream_losses(result),
        **_accuracies(result),
        **result.details,
    }
    # Variants of a strategy are rows of their own in a report.
    variant = variant_of(config)
    if config.label is not None or variant:
        details["label"] = config.label or f"{config.names['strategy']} {variant}"
    return {
        **{group: config.names[group] for group in ("strategy", "dataset", "partition", "model")},
        "seed": config.seed,
        "nodes": config.nodes,
        "rounds": last.round,
        "accuracy": last.metric("accuracy"),
        "loss": last.metric("loss"),
        "bytes_up": traffic.bytes_up,
        "bytes_down": traffic.bytes_down,
        "messages": traffic.messages_up + traffic.messages_down,
        "seconds": seconds,
        "nodes_failed": len({failure.node for _, failure in result.failures}),
        "details": details,
    }


def _stream_losses(result: RunResult) -> dict[str, float]:
    """Return the cumulative loss of a strategy that keeps no account of it, such as FedAvg.

    Its records hold means over the nodes that trained, which are turned into sums again.
    """
    sums = {"cumulative_loss": wire.LOSS_SUM, "batches": wire.BATCHES}
    trained = [r for r in result.history if wire.LOSS_SUM in r.train_metrics]
    return {
        name: sum(r.train_metrics[key] * len(r.nodes_answered) for r in trained)
        for name, key in sums.items()
        if trained
    }


def _accuracies(result: RunResult) -> dict[str, dict[str, float]]:
    """Return the accuracy of each model, where there are several."""
    prefix = "accuracy/"
    metrics = result.history[-1].server_metrics
    by_model = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
    return {"accuracies": by_model} if by_model else {}


def _fingerprint_of(path: Path) -> str | None:
    """Return the fingerprint of the config that an earlier run wrote; None if it is no config."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
        return RunConfig.from_json(json.dumps(values)).fingerprint()
    except Exception:
        return None
