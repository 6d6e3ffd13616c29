"""Which point of the ellipsoids? The average, ours, and where the released code's descent ends.

Runs keep the spaces that nodes sent. Where the average of their centres lies outside, a strategy
has to choose a point: ours goes from the average towards the deepest point and stops at the first
that is in all spaces; the released code follows the gradient of Eq. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from gems_flwr import scoring
from gems_flwr.intersect.equation2 import descend_levels
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.output_layer import unflatten_linear
from gems_flwr.spaces.space_files import load_space
from simulations.data.examples import Dataset
from simulations.experiment.experiment import Experiment
from simulations.reproduce.papers.findings import Finding
from simulations.reproduce.papers.space_sweep import config_of
from simulations.reproduce.papers.spec import DoneRun, Scope

LEVEL = "largest level of the average"
AVERAGE = "of the average"
DESCENT = "by descent on Eq. 2"
# The released code takes up to 100,000; where ellipsoids do not meet, it never stops by itself.
STEPS = 20_000


def judge_points(runs: Sequence[DoneRun], scope: Scope, jobs: int) -> list[Finding]:
    """Return what the average and the released descent give, for the runs of one seed."""
    datasets: dict[str, Dataset] = {}
    parts = []
    for run in runs:
        config = config_of(run.folder)
        name = str(config.names["dataset"])
        # The test data are those of every number of nodes.
        if name not in datasets:
            datasets[name] = Experiment(config).dataset
        data = datasets[name]
        spaces = ellipsoids_of(run.folder)
        average = np.stack([each.center for each in spaces]).astype(np.float64).mean(axis=0)
        found = {
            AVERAGE: average,
            DESCENT: descend_levels(spaces, steps=STEPS).point,
        }
        quantity = run.cell.reads[0]
        parts += [
            Finding(
                run.cell.setting, run.cell.method, f"{quantity} {what}", [_score(w, data, quantity)]
            )
            for what, w in found.items()
        ]
        level = max(each.level(average) for each in spaces)
        parts.append(Finding(run.cell.setting, run.cell.method, LEVEL, [level]))
    return parts


def ellipsoids_of(folder: Path) -> list[EllipsoidSpace]:
    """Return the ellipsoids that the nodes of a run sent."""
    spaces = [load_space(path) for path in sorted((folder / "spaces").iterdir())]
    return [each for each in spaces if isinstance(each, EllipsoidSpace)]


def _score(point: ArrayLike, data: Dataset, quantity: str) -> float:
    inputs = data.test.features.reshape(len(data.test), -1).astype(np.float64) * data.scale
    weight, bias = unflatten_linear(point, data.classes, inputs.shape[1])
    guesses = (inputs @ weight.T + bias).argmax(axis=1)
    score = scoring.balanced_accuracy if quantity.startswith("balanced") else scoring.accuracy
    return float(score(guesses, data.test.labels))
