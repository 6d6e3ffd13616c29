"""Learning rates for the multi-model experiment, chosen without a look at the test data.

A rule's rate is the one with the highest accuracy on the nodes' own validation parts, pooled, on a
seed that no result is made with; the same grid for all rules. The rate that serves all of them, as
on the slides ("the same local training settings"), is the best on average over `full` and `random`:
the calmest rule and the wildest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from gems_flwr.server.members import split_models
from simulations.config import RunConfig, compose_config
from simulations.data.examples import Examples
from simulations.experiment.experiment import experiment_of
from simulations.experiment.multi_model_experiment import MultiModelExperiment
from simulations.report.tables import TextTable, print_table
from simulations.run import run as run_one

RATES = (0.01, 0.02, 0.05, 0.1)
METHODS = ("full", "random", "mifa", "scaffold", "fedvarp")
COMMON = ("full", "random")
# All pairs of it train in every round.
_TOGETHER = ("full",)
SEED = 100


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the grid, print the accuracies on validation data; return the path of the numbers."""
    found = {
        method: [_score(method, rate, overrides, output) for rate in RATES] for method in METHODS
    }
    common = np.mean([found[method] for method in COMMON], axis=0)
    lines = [
        (f"{rate:g}", *(f"{found[m][i]:.4f}" for m in METHODS), f"{common[i]:.4f}")
        for i, rate in enumerate(RATES)
    ]
    headings = ("learning rate", *METHODS, " and ".join(COMMON))
    print_table(
        TextTable.of(headings, lines), console, title="accuracy on the nodes' validation data"
    )
    path = output / "multi-model-rates.json"
    path.write_text(json.dumps({"rates": RATES, **found}, indent=1))
    return path


def _score(method: str, rate: float, overrides: Sequence[str], output: Path) -> float:
    config = compose_config(
        [
            "experiment=multi_model_slides",
            *(["backend=lockstep"] if method in _TOGETHER else []),
            *overrides,
            f"seed={SEED}",
            f"train.lr={rate}",
            f"strategy.sampling={method}",
            "progress=false",
            f"evaluate_every={10**6}",
        ]
    )
    folder = output / config.run_name()
    run_one(config, folder, Console(quiet=True))
    return validation_accuracy(config, folder)


def validation_accuracy(config: RunConfig, folder: Path) -> float:
    """Return the mean over the models of their accuracy on all nodes' validation parts."""
    experiment = experiment_of(config.to_json())
    assert isinstance(experiment, MultiModelExperiment)
    accuracies = []
    for name, arrays in split_models(load_file(folder / "model.safetensors")).items():
        task = experiment.tasks[name]
        held_out = Examples.concatenate([share.validation for share in task.shares])
        accuracies.append(experiment.score_model(task, arrays, held_out)["accuracy"])
    return float(np.mean(accuracies))
