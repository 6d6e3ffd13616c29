"""The repository as a Flower app: what ``flwr run .`` starts, on simulated or on real nodes.

The run config's ``overrides`` are those of ``python -m simulations.run``; ``output`` says where the
results go (see `simulations.results_folder`), and so does the log. A node's data is what its
``--node-config`` says: ``data='/srv/data'``, a folder of its own (see `simulations.data.own_data`),
or ``partition-id=0``, a part of the data set.

What a node gives away is what its own limits allow (`gems_flwr.NodeLimits`), also from its
``--node-config``. Raw data and noise from a known seed are refused here whatever they are: that
is for ``python -m simulations.run``, where no node has data of its own.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from gems_flwr.client.fault_reply_mod import node_name
from gems_flwr.client.limits import NodeLimits
from gems_flwr.client.task import Task, TaskSet
from gems_flwr.client.task_app import task_client_app
from gems_flwr.server.log import log_event
from gems_flwr.server.settings import Callback
from gems_flwr.tracking.live_view import LiveView
from simulations.config import ConfigError, RunConfig, compose_config
from simulations.data.own_data import own_folder
from simulations.experiment.card_facts import told_overrides
from simulations.experiment.execution import first_score, run_server
from simulations.experiment.experiment import experiment_of
from simulations.experiment.run_trackers import give_files, trackers_of
from simulations.results_folder import results_folder

# Where Flower has unpacked this app.
BUNDLE = Path(__file__).resolve().parents[1]
# Beside a node's own data: what it has spent of its privacy.
LEDGER = "privacy-spent.json"

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


def _limits(context: Context) -> NodeLimits:
    """Return the node's own limits; the privacy that it spends is noted beside its data."""
    config = dict(context.node_config)
    if "data" in config and "privacy-ledger" not in config:
        config["privacy-ledger"] = str(own_folder(str(config["data"])) / LEDGER)
    return NodeLimits.of_node(config)


def _device(context: Context) -> str:
    """Return where a node computes: as it says itself, else as the run's config does."""
    if "device" in context.node_config:
        return str(context.node_config["device"])
    text = _config_text(str(context.run_config["overrides"]))
    return RunConfig.from_json(text).backend.device


client_app = task_client_app(_make_task, limits=_limits, device=_device)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy that the run config names."""
    text = _config_text(str(context.run_config["overrides"]))
    experiment = experiment_of(text)
    name = experiment.config.run_name()
    folder = results_folder(str(context.run_config["output"]), name, bundle=BUNDLE)
    log_event("results", folder=folder)
    overrides = shlex.join(told_overrides(shlex.split(str(context.run_config["overrides"]))))
    command = f"flwr run . -c 'overrides=\"{overrides}\"'"
    with contextlib.ExitStack() as stack:
        trackers = [stack.enter_context(each) for each in trackers_of(experiment.config)]
        watching: list[Callback] = [*trackers]
        if experiment.config.live:
            watching.append(LiveView(name))
        result = run_server(experiment, grid, folder, watching, simulated=False, command=command)
        give_files(trackers, folder)
    name, value = first_score(result)
    log_event(
        "result",
        **{name: value},
        bytes_up=result["bytes_up"],
        bytes_down=result["bytes_down"],
        folder=folder,
    )
