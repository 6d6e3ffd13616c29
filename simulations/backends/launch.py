"""Where the nodes of a simulation run.

``inprocess`` is embedded and starts at once; ``ray`` is Flower's simulation engine. Both run
the same apps, so one seed gives the same numbers on either. ``lockstep`` trains the small models of
many nodes at once: of streams without any apps, else with the same apps up to where they train.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from gems_flwr.client.limits import UNLIMITED
from gems_flwr.client.task import Task, TaskSet
from gems_flwr.client.task_app import task_client_app
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from simulations.backends.cluster import connect, disconnect
from simulations.backends.lockstep import LockstepGrid
from simulations.backends.lockstep_training import LockstepTrainingGrid
from simulations.config import BackendConfig, RunConfig
from simulations.experiment.experiment import experiment_of

Server = Callable[[Grid], dict[str, Any]]


def simulated_client_app(config: RunConfig) -> ClientApp:
    """Return the ClientApp of a run; it carries the config as text into worker processes."""
    text = config.to_json()

    def make_task(context: Context) -> Task | TaskSet:
        return experiment_of(text).task(int(context.node_config["partition-id"]))

    return task_client_app(make_task, limits=UNLIMITED, device=config.backend.device)


def run_on_backend(config: RunConfig, server: Server) -> dict[str, Any]:
    """Start the nodes, let `server` work with them, and return what it returns."""
    is_lockstep = config.backend.kind == "lockstep"
    if is_lockstep and config.stream.is_on:
        return server(LockstepGrid(experiment_of(config.to_json())))
    app = simulated_client_app(config)
    if is_lockstep:
        return server(LockstepTrainingGrid(app, config.nodes))
    if config.backend.kind == "inprocess":
        return server(InProcessGrid(app, config.nodes))
    return run_on_ray(app, config.nodes, config.backend, server)


def _gpus(backend: BackendConfig) -> dict[str, int]:
    """Return what Ray is told of GPUs; without `total_gpus` it counts those that it finds."""
    return {} if backend.total_gpus is None else {"num_gpus": backend.total_gpus}


def run_on_ray(
    app: ClientApp, nodes: int, backend: BackendConfig, server: Server
) -> dict[str, Any]:
    """Run on Flower's simulation engine; see `run_on_backend`."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    # A node that takes no share of a GPU sees all of them, instead of none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation

    if backend.address is None:
        # Told to be its own, or it would look for one that runs on this machine and join that.
        init_args: dict[str, Any] = {
            "address": "local",
            "num_cpus": backend.total_cpus,
            **_gpus(backend),
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
    else:
        connect(backend)
        init_args = {}
    results: list[dict[str, Any]] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(server(grid))

    python_path = os.environ.get("PYTHONPATH")
    try:
        # It announces its own deprecation.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_simulation(
                server_app,
                app,
                num_supernodes=nodes,
                backend_config={
                    "client_resources": {
                        "num_cpus": backend.client_cpus,
                        "num_gpus": backend.client_gpus,
                    },
                    "init_args": init_args,
                },
            )
    except KeyboardInterrupt:
        # Flower's server thread would go on waiting for replies; what it received is on disk.
        os._exit(130)
    finally:
        if backend.address is not None:
            disconnect()
        # Flower puts its folder on the path at every run.
        if python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = python_path
    return results[0]
