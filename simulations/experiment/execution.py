"""One run from start to files: what every backend does once it has a grid.

A run's folder holds ``result.json``, ``rounds.jsonl``, ``config.yaml`` (resolved),
``partition.json``, ``model.safetensors``, ``model_card.md``, and the checkpoint
while the run is not finished. One run at a time owns it. What a folder holds is never thrown away
because it cannot be read: the error says what is strange about it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from omegaconf import OmegaConf
from safetensors.numpy import save

from gems_flwr.core import Callback, RunResult
from gems_flwr.core.disk import disk_faults, hold_folder, make_folder, write_atomically
from gems_flwr.core.folder import CheckpointFolder
from gems_flwr.core.records import single_numbers, to_numpy
from gems_flwr.errors import CheckpointError
from gems_flwr.strategies.learner_questions import BATCHES, LOSS_SUM
from gems_flwr.targets import Target
from gems_flwr.tools import write_model_card
from simulations.config import NOT_IN_NAME, RunConfig, variant_of
from simulations.experiment.experiment import Experiment
from simulations.experiment.training import torch_threads

RESULT, CONFIG, CARD = "result.json", "config.yaml", "model_card.md"
# What others read off a result without asking whether it is there.
_NUMBERS = ("loss", "nodes", "rounds", "bytes_up", "bytes_down")


def finished_result(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """Return the result of an earlier run of the same config in this folder, if there is one.

    A file that holds no result is a CheckpointError.
    """
    path = folder / RESULT
    with disk_faults(f"read {path}"):
        if not path.exists():
            return None
        data = path.read_bytes()
    try:
        result = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _strange(path, f"it is not JSON ({error})") from error
    if not isinstance(result, dict) or not isinstance(result.get("details"), dict):
        raise _strange(path, "expected an object with 'details'")
    if result["details"].get("fingerprint") != config.fingerprint():
        return None
    # And one score: an accuracy, or an error where numbers are predicted.
    for key in (first_score(result)[0], *_NUMBERS):
        if not isinstance(result.get(key, ""), int | float | None):
            raise _strange(path, f"its '{key}' is no number")
    return result


def _strange(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not the result of a run: {what}; move it away, or start afresh with fresh=true"
    )


def prepare(config: RunConfig, folder: Path) -> None:
    """Make the folder ready: nothing of another config, or of a run to be repeated, stays.

    A checkpoint that may or may not belong to this config is a CheckpointError.
    """
    make_folder(folder)
    before = folder / CONFIG
    if config.fresh or (before.exists() and _is_other(config, before)):
        CheckpointFolder(folder).clear()
    for name in (RESULT, CARD):
        with disk_faults(f"remove {folder / name}"):
            (folder / name).unlink(missing_ok=True)
    # Who watches is no part of the run, and an address may hold a password.
    kept = {key: value for key, value in asdict(config).items() if key != "tracking"}
    write_atomically(before, OmegaConf.to_yaml(OmegaConf.create(kept)).encode())


def _is_other(config: RunConfig, path: Path) -> bool:
    """Return whether the config that an earlier run wrote differs in what changes the result."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
        if not values:
            raise ValueError("it is empty")
        return RunConfig.from_json(json.dumps(values)).fingerprint() != config.fingerprint()
    except Exception as error:  # YAML, OmegaConf and our own checks raise many kinds
        if CheckpointFolder(path.parent).is_empty():
            return True
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} is not the config of a run ({type(error).__name__}: {reason}), so it is open "
            f"whether the checkpoint beside it belongs to this one; restore it, or start afresh "
            "with fresh=true"
        ) from error


def run_server(
    experiment: Experiment,
    grid: Grid,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    *,
    simulated: bool = True,
    command: str | None = None,
) -> dict[str, Any]:
    """Run the experiment's strategy on a grid and write the folder's files.

    Parameters
    ----------
    experiment, grid, folder, callbacks
        What to run, where, and who is notified.
    simulated : bool, default True
        Whether the nodes are those of a simulation, which may be asked for what real ones refuse.
    command : str, optional
        What was typed to start it, for the model card.

    Returns
    -------
    dict
        What `result.json` holds.
    """
    config = experiment.config
    with hold_folder(folder):
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
                should_stop=experiment.stop_rules(),
                resume=True,
            )
        if drifts := experiment.drift_rounds():
            result.details["drifts"] = drifts
        seconds = time.perf_counter() - started
        summary = summarise(config, result, experiment.dataset.target, seconds=seconds)
        model = to_numpy(result.arrays)
        write_atomically(folder / "model.safetensors", save(model))
        names, how = config.names, ""
        if simulated:
            how = f", divided by {config.names['partition']} among nodes of a simulation"
        write_model_card(
            result,
            folder / CARD,
            strategy=strategy,
            title=config.run_name(),
            data=f"{names['dataset']}{how}",
            # Real nodes report what they want to.
            examples=sum(sum(n["train"]) for n in counts["nodes"]) if simulated else None,
            command=command,
        )
        write_atomically(folder / RESULT, json.dumps(summary, indent=2).encode())
        # Everything in it stands in the other files now.
        CheckpointFolder(folder).clear()
        return summary


def summarise(
    config: RunConfig, result: RunResult, target: Target, *, seconds: float
) -> dict[str, Any]:
    """Return what `result.json` holds: of the scores, those that the target has."""
    last, traffic = result.history[-1], result.traffic
    scores = {name: last.metric(name) for name in target.metrics}
    balanced = {name: scores.pop(name) for name in scores.keys() & {"balanced_accuracy"}}
    details = {
        "fingerprint": config.fingerprint(),
        "stopped_because": result.stopped_because,
        **({"evaluated_on": "validation"} if config.evaluate_on == "validation" else {}),
        **balanced,
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
        **scores,
        "bytes_up": traffic.bytes_up,
        "bytes_down": traffic.bytes_down,
        "messages": traffic.messages_up + traffic.messages_down,
        "seconds": seconds,
        "nodes_failed": len({failure.node for _, failure in result.failures}),
        "details": details,
    }


def first_score(result: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the name and the value of the score that a person reads first."""
    name = "rmse" if "rmse" in result else "accuracy"
    return name, result.get(name)


def _stream_losses(result: RunResult) -> dict[str, float]:
    """Return the cumulative loss of a strategy that reports means over nodes, such as FedAvg."""
    sums = {"cumulative_loss": LOSS_SUM, "batches": BATCHES}
    each = [(single_numbers(r.train_metrics), len(r.nodes_answered)) for r in result.history]
    trained = [(metrics, nodes) for metrics, nodes in each if LOSS_SUM in metrics]
    return {
        name: sum(metrics[key] * nodes for metrics, nodes in trained)
        for name, key in sums.items()
        if trained
    }


def _accuracies(result: RunResult) -> dict[str, dict[str, float]]:
    """Return the accuracy of each model, where there are several."""
    prefix = "accuracy/"
    metrics = single_numbers(result.history[-1].server_metrics)
    by_model = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
    return {"accuracies": by_model} if by_model else {}


def lasting_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command that change its result: no paths, no addresses."""
    keys = [each.lstrip("+~").partition("=")[0] for each in overrides]
    return [
        override
        for override, key in zip(overrides, keys, strict=True)
        if re.split("[./@]", key)[0] not in ("hydra", *NOT_IN_NAME) and key != "backend.address"
    ]
