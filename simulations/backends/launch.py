"""Where the nodes of a simulation run.

``inprocess`` is embedded and starts at once; ``lockstep`` is the same with all nodes' training as
one computation (`simulations.backends.lockstep`); ``ray`` is Flower's simulation engine. All run
the same apps, so one seed gives the same numbers everywhere, with lockstep up to rounding.

Flower starts a Ray of its own unless this process is connected to one; with ``backend.address`` we
connect first. Workers there get this process' search path for modules, so code and data must lie
under the same paths on all machines: a shared folder, or the same image.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from gems_flwr import InProcessGrid, Task, TaskSet, task_client_app
from gems_flwr.errors import GemsError
from gems_flwr.node.limits import UNLIMITED
from simulations.backends.lockstep import LockstepGrid
from simulations.config import BackendConfig, RunConfig
from simulations.experiment.experiment import experiment_of

Server = Callable[[Grid], dict[str, Any]]


class ClusterError(GemsError, ConnectionError):
    """A Ray cluster that cannot be used; the message says what is missing."""


def simulated_client_app(config: RunConfig) -> ClientApp:
    """Return the ClientApp of a run; it carries the config as text into worker processes."""
    text = config.to_json()

    def make_task(context: Context) -> Task | TaskSet:
        return experiment_of(text).task(int(context.node_config["partition-id"]))

    return task_client_app(make_task, limits=UNLIMITED, device=config.backend.device)


def run_on_backend(config: RunConfig, server: Server) -> dict[str, Any]:
    """Start the nodes, let `server` work with them, and return what it returns."""
    app = simulated_client_app(config)
    if config.backend.kind == "ray":
        return run_on_ray(app, config.nodes, config.backend, server)
    grid = LockstepGrid if config.backend.kind == "lockstep" else InProcessGrid
    return server(grid(app, config.nodes))


def run_on_ray(
    app: ClientApp, nodes: int, backend: BackendConfig, server: Server
) -> dict[str, Any]:
    """Run on Flower's simulation engine; see `run_on_backend`."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    # A node that takes no share of a GPU sees all of them, instead of none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation

    init_args: dict[str, Any] = {}
    if backend.address is not None:
        connect(backend)
    else:
        # Its own, or it would look for one that runs on this machine and join that.
        init_args = {"address": "local", "num_cpus": backend.total_cpus}
        init_args |= {"log_to_driver": False, "logging_level": "ERROR"}
        if backend.total_gpus is not None:  # else Ray counts those that it finds
            init_args["num_gpus"] = backend.total_gpus
    results: list[dict[str, Any]] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(server(grid))

    resources: dict[str, Any] = {"num_cpus": backend.client_cpus, "num_gpus": backend.client_gpus}
    shape: Any = {"client_resources": resources, "init_args": init_args}
    python_path = os.environ.get("PYTHONPATH")
    try:
        # It announces its own deprecation.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_simulation(
                server_app,
                app,
                num_supernodes=nodes,
                backend_config=shape,
            )
    except KeyboardInterrupt:
        # Flower's server thread would go on waiting for replies; what it received is on disk.
        os._exit(130)
    finally:
        if backend.address is not None:
            # Ends the connection; the cluster goes on.
            import ray

            ray.shutdown()
        # Flower puts its folder on the path at every run.
        os.environ.pop("PYTHONPATH", None)
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
    return results[0]


def connect(backend: BackendConfig) -> None:
    """Connect this process to the cluster at ``backend.address``, or raise a ClusterError."""
    import ray

    # Workers inherit the environment of their machine, not that of this process.
    ours = {k: v for k, v in os.environ.items() if k.startswith(("GEMS_FLWR_", "FLWR_"))}
    ours["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
    host, _, port = (backend.address or "").rpartition(":")
    try:
        if host:  # where nothing listens Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=20).close()
        ray.init(
            address=backend.address,
            runtime_env={"env_vars": ours},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    # Ray has no errors of its own for this: wrong versions, other machines, no cluster.
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        ray.shutdown()
        raise ClusterError(
            f"backend.address={backend.address}: no Ray cluster could be reached "
            f"({' '.join(str(error).split())}); this command must run on a machine of the cluster: "
            "start Ray there with `ray start --address=…`, or the cluster with `ray start --head`"
        ) from error
