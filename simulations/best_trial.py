"""The last word of a search: the best trial, and the command that tests it.

A search (``search=gems``, or any ``hydra/sweeper=optuna``) goes by the nodes' validation data and
shows no test figures, so that what they say about the settings that it finds is worth something.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from simulations.multirun import is_search

# Written by hydra-optuna-sweeper when a search is over.
RESULTS = "optimization_results.yaml"


class BestTrial(Callback):
    """Prints what a search has found when it ends; says nothing after other multiruns."""

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


def testing_command(overrides: list[str], best: list[str]) -> str:
    """Return the command that makes one run with the best settings and shows test figures.

    Parameters
    ----------
    overrides : list of str
        Those of the search.
    best : list of str
        What it found, as overrides.
    """
    found = {each.split("=")[0] for each in best}
    kept = [each for each in overrides if each.split("=")[0] not in found | {"evaluate_on"}]
    # A search's file may say more than where to search; in this mode it is one run.
    installed = sys.argv[0] == "gems-flwr run"
    command = ["gems-flwr", "run"] if installed else ["python", "-m", "simulations.run"]
    return shlex.join([*command, *kept, *best, "hydra.mode=RUN"])
