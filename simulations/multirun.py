"""Multiruns: what a run has to know of the one that it is part of, and what searches go by.

Hydra's launcher makes the runs, one after the other in this process (``basic``) or in processes of
their own (``joblib``, ``submitit_slurm`` …). Its sweeper says which runs there are: those listed
(``basic``), or those that a search asks for (``optuna``). A search goes by the nodes' validation
data and shows no test figures, so that these say something about the settings that it finds.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from gems_flwr import GemsError
from simulations.config import ConfigError, RunConfig, is_multirun, is_search
from simulations.experiment.execution import first_score
from simulations.experiment.experiment import experiment_of

_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
# Written by hydra-optuna-sweeper when a search is over.
RESULTS = "optimization_results.yaml"
_LARGER_IS_BETTER = ("accuracy", "balanced_accuracy")


class RunFailedError(GemsError):
    """A run in another process failed; the message is empty if it was on the screen already."""


def is_parallel(hydra: Any) -> bool:
    """Return whether runs are made in other processes than the command's own."""
    return is_multirun(hydra) and str(hydra.launcher.get("_target_")) != _BASIC_LAUNCHER


def shares_screen(hydra: Any) -> bool:
    """Return whether what a run prints is on the command's screen; clusters write it to files."""
    return not is_parallel(hydra) or "joblib" in hydra.launcher.get("_target_", "")


def check_objective(config: RunConfig, direction: Any) -> None:
    """Refuse a search for a score that does not exist, or in the wrong direction.

    ``direction`` is the sweeper's: a word, Optuna's own type, or None where there is none.
    """
    scores = experiment_of(config.to_json()).dataset.target.metrics
    name = config.objective or scores[0]
    if name not in scores:
        raise ConfigError(f"objective must be {' or '.join(scores)}, got {name!r}")
    wanted = "maximize" if name in _LARGER_IS_BETTER else "minimize"
    given = getattr(direction, "name", direction)
    if given not in (None, wanted):
        raise ConfigError(
            f"a search by {name} needs hydra.sweeper.direction={wanted}, got {given}: it would "
            "look for the worst"
        )


def objective(config: RunConfig, result: Mapping[str, Any]) -> float | None:
    """Return the score of a finished run that a sweeper gets; None if there is none."""
    name = config.objective or first_score(result)[0]
    value = result.get(name, result["details"].get(name))
    return None if value is None else float(value)


class BestTrial(Callback):
    """Prints what a search has found when it ends; silent after other multiruns."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the best settings, how good they are on validation data, and how to test them."""
        path = Path(config.hydra.sweep.dir) / RESULTS
        if not is_search(config.hydra) or not path.exists():
            return
        found: Any = OmegaConf.to_container(OmegaConf.load(path))
        if "best_params" not in found:
            return
        best = [f"{key}={value}" for key, value in found["best_params"].items()]
        console = Console(stderr=True)
        for line in (
            f"best on validation data: {found['best_value']:.4f}  {' '.join(best)}",
            f"on test data: {testing_command(config.hydra.overrides.task, best)}",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def testing_command(overrides: Sequence[str], best: Sequence[str]) -> str:
    """Return the command that makes one run with the best settings and shows test figures."""
    found = {each.split("=")[0] for each in best}
    kept = [each for each in overrides if each.split("=")[0] not in found | {"evaluate_on"}]
    # A search's file may say more than where to search; in this mode it is one run.
    installed = sys.argv[0] == "gems-flwr run"
    command = ["gems-flwr", "run"] if installed else ["python", "-m", "simulations.run"]
    return shlex.join([*command, *kept, *best, "hydra.mode=RUN"])
