"""The repository as a Flower app: what ``flwr run .`` starts, on simulated or on real nodes.

The run config's ``overrides`` are those of ``python -m simulations.run``; ``output`` is the
folder for the results. A node's data is its ``partition-id`` of the config's partition.
"""

from __future__ import annotations

import functools
import logging
import shlex
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from gems_flwr.client import Task, TaskSet, task_client_app
from simulations.config import compose_config
from simulations.execution import run_server
from simulations.experiment import experiment_of

server_app = ServerApp()


@functools.lru_cache(maxsize=4)
def _config_text(overrides: str) -> str:
    return compose_config(shlex.split(overrides)).to_json()


def _make_task(context: Context) -> Task | TaskSet:
    text = _config_text(str(context.run_config["overrides"]))
    return experiment_of(text).task(int(context.node_config["partition-id"]))


client_app = task_client_app(_make_task, share_examples=True, seed_private_noise=True)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy that the run config names."""
    text = _config_text(str(context.run_config["overrides"]))
    experiment = experiment_of(text)
    output = str(context.run_config["output"])
    folder = Path(output) if output else Path("runs") / experiment.config.run_name()
    result = run_server(experiment, grid, folder)
    logging.getLogger("flwr.gems").info(
        "accuracy %s, %d bytes up, %d down, results in %s",
        result["accuracy"],
        result["bytes_up"],
        result["bytes_down"],
        folder.resolve(),
    )
