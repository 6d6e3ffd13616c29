"""A learning rate for the multi-model experiment, chosen without a look at the test data.

One rate serves all methods, as on the slides ("the same local training settings"). It is the one
with the highest accuracy on the nodes' own validation parts, pooled, averaged over `full` and
`random`: the calmest method and the wildest. Seed 100, which no result is made with.
"""

from __future__ import annotations

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

RATES = (0.05, 0.1, 0.2)
METHODS = ("full", "random")
SEED = 100


def run(overrides: Sequence[str], output: Path, console: Console) -> None:
    """Run the grid and print the accuracies on validation data."""
    lines = []
    for rate in RATES:
        scores = []
        for method in METHODS:
            config = compose_config(
                [
                    "experiment=multi_model_slides",
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
            scores.append(validation_accuracy(config, folder))
        lines.append((f"{rate:g}", *(f"{s:.4f}" for s in scores), f"{np.mean(scores):.4f}"))
    table = TextTable.of(("learning rate", *METHODS, "mean"), lines)
    print_table(table, console, title="accuracy on the nodes' validation data")


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
