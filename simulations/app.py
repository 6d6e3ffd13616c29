"""The repository as a Flower app: what ``flwr run .`` starts, on simulated or on real nodes.

The run config's ``overrides`` are those of ``python -m simulations.run``; ``output`` says where the
results go (see `results_folder`), and so does the log. A node's data is what its
``--node-config`` says: ``data='/srv/data'``, a folder of its own (see `simulations.data.own_data`),
or ``partition-id=0``, a part of the data set.

What a node gives away is what its own limits allow (`gems_flwr.NodeLimits`), also from its
``--node-config``. Raw data and noise from a known seed are refused here whatever they are: that
is for ``python -m simulations.run``, where no node has data of its own.
"""

from __future__ import annotations

import functools
import os
import shlex
import tomllib
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from gems_flwr import Callback, NodeLimits, Task, TaskSet, task_client_app
from gems_flwr.core.log import log_event
from gems_flwr.node import node_name
from gems_flwr.tools import LiveView
from simulations.config import ConfigError, RunConfig, compose_config
from simulations.data import own_folder
from simulations.experiment.execution import first_score, lasting_overrides, run_server
from simulations.experiment.experiment import experiment_of
from simulations.experiment.watching import trackers_of

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
    overrides = shlex.join(lasting_overrides(shlex.split(str(context.run_config["overrides"]))))
    command = f"flwr run . -c 'overrides=\"{overrides}\"'"
    watching: list[Callback] = [*trackers_of(experiment.config)]
    if experiment.config.live:
        watching.append(LiveView(name))
    result = run_server(experiment, grid, folder, watching, simulated=False, command=command)
    name, value = first_score(result)
    log_event(
        "result",
        **{name: value},
        bytes_up=result["bytes_up"],
        bytes_down=result["bytes_down"],
        folder=folder,
    )


def results_folder(output: str, name: str, *, bundle: Path) -> Path:
    """Return the folder for the results of a run, as an absolute path.

    Flower bundles an app, and a ServerApp works in the folder in which the SuperLink was started.
    That one is the user's, or below it, whenever ``flwr run .`` started the SuperLink itself.

    Parameters
    ----------
    output : str
        What the run config says. A path is taken as it is; if it ends with a slash, the run gets a
        folder of its own in it. Empty: below ``runs`` in the app's own folder, if the SuperLink
        was started in it, and else in the folder where it was started.
    name : str
        The run's own name.
    bundle : Path
        Where Flower has unpacked the app.
    """
    if output:
        folder = Path(output).expanduser()
        return (folder / name if output.endswith("/") else folder).absolute()
    # A shell's own word for the folder keeps the links by which the user got there.
    starts = [here := Path.cwd(), Path(os.environ.get("PWD", ""))]
    above = [each for start in starts if start.is_absolute() for each in (start, *start.parents)]
    own = _identity(bundle)
    app = next((each for each in above if own is not None and _identity(each) == own), here)
    return app / "runs" / name


def _identity(folder: Path) -> tuple[str, str] | None:
    """Return publisher and name of the Flower app in a folder; None if there is none."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        return project["tool"]["flwr"]["app"]["publisher"], project["project"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
