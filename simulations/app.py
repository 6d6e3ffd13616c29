"""The repository as a Flower app: what ``flwr run .`` starts, on simulated or on real nodes.

The run config's ``overrides`` are those of ``python -m simulations.run``; ``output`` is the
folder for the results. A node's data is what its ``--node-config`` says: ``data='/srv/data'``, a
folder of its own (see `simulations.data.own_data`), or ``partition-id=0``, a part of the data set.
"""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from gems_flwr.client import Task, TaskSet, task_client_app
from gems_flwr.client.guard import node_name
from gems_flwr.strategies.events import log_event
from simulations.config import ConfigError, compose_config
from simulations.execution import run_server
from simulations.experiment import experiment_of

server_app = ServerApp()


@functools.lru_cache(maxsize=4)
def _config_text(overrides: str) -> str:
    return compose_config(shlex.split(overrides)).to_json()


def _make_task(context: Context) -> Task | TaskSet:
    text = _config_text(str(context.run_config["overrides"]))
    node = context.node_config
    if "data" in node:
        return experiment_of(text, str(node["data"])).own_task(node_name(context))
    if "partition-id" not in node:
        raise ConfigError(
            "this node does not know its data: start it with --node-config \"data='/folder'\" or "
            '"partition-id=0"'
        )
    return experiment_of(text).task(int(node["partition-id"]))


client_app = task_client_app(_make_task, share_examples=True, seed_private_noise=True)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy that the run config names."""
    text = _config_text(str(context.run_config["overrides"]))
    experiment = experiment_of(text)
    output = str(context.run_config["output"])
    folder = Path(output) if output else Path("runs") / experiment.config.run_name()
    result = run_server(experiment, grid, folder)
    log_event(
        "result",
        accuracy=result["accuracy"],
        bytes_up=result["bytes_up"],
        bytes_down=result["bytes_down"],
        folder=folder.resolve(),
    )
