"""Flower's simulation engine on a Ray cluster that is there already.

Flower starts a Ray of its own unless this process is connected to one; so we connect first. What
Flower does at the end, `ray.shutdown`, ends a Ray that the process started, and of a cluster the
connection alone. Nodes are spread over as many actors as fit into the cluster's machines.

Workers inherit the environment of their machine, not that of this process. They are sent its search
path for modules and its variables of Flower and of this project, so the code and the data must lie
under the same paths on all machines: a shared folder, or the same image.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from gems_flwr.errors import GemsError
from simulations.config import BackendConfig

# Importing torch on a cold network disk has been seen to take a minute; this imports nothing.
_ANSWER_SECONDS = 300.0
_CONNECT_SECONDS = 20.0
_NEEDED = ("flwr", "gems_flwr", "simulations", "torch")


class ClusterError(GemsError, ConnectionError):
    """A Ray cluster that cannot be used; the message says what is missing."""


def connect(backend: BackendConfig) -> None:
    """Connect this process to the cluster at ``backend.address``.

    Raises
    ------
    ClusterError
        If there is none, if no machine of it has room for a node, or if one lacks the code.
    """
    import ray

    address = backend.address
    assert address is not None
    if address != "auto":
        _knock(address)
    try:
        ray.init(
            address=address,
            runtime_env={"env_vars": _environment()},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    # Ray has no errors of its own for this: wrong versions, other machines, no cluster.
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        ray.shutdown()
        raise ClusterError(
            f"backend.address={address}: no Ray cluster could be reached "
            f"({' '.join(str(error).split())}); this command must run on a machine of the cluster: "
            "start Ray there with `ray start --address=…`, or the cluster with `ray start --head`"
        ) from error
    try:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        machines = [each for each in nodes if each["Alive"]]
        _check_room(backend, [each["Resources"] for each in machines])
        _check_code(ray, {each["NodeID"]: each["NodeManagerAddress"] for each in machines})
    except BaseException:
        ray.shutdown()
        raise


def disconnect() -> None:
    """Leave the cluster, which goes on; nothing happens if Flower has done so."""
    import ray

    ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address where nobody listens, which Ray itself tries for a long time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"backend.address={address}: nobody listens there ({error}); the address is what "
            "`ray start --head` printed, such as 10.0.0.1:6379"
        ) from error


def _environment() -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k.startswith(("GEMS_FLWR_", "FLWR_"))}
    return {**ours, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}


def _check_room(backend: BackendConfig, machines: list[dict[str, float]]) -> None:
    needed = {"CPU": float(backend.client_cpus), "GPU": backend.client_gpus}
    if any(all(m.get(k, 0.0) >= v for k, v in needed.items()) for m in machines):
        return
    there = ", ".join(f"{m.get('CPU', 0):g} CPUs and {m.get('GPU', 0):g} GPUs" for m in machines)
    raise ClusterError(
        f"no machine of the cluster at backend.address={backend.address} has room for one node: "
        f"backend.client_cpus={backend.client_cpus} and "
        f"backend.client_gpus={backend.client_gpus:g} are asked for, the machines have "
        f"{there or 'nothing'}"
    )


def _check_code(ray: Any, machines: dict[str, str]) -> None:
    """Ask every machine whether it finds the code; what it lacks would show as lost nodes."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(_looker(_NEEDED))
    asked = {
        address: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote()
        for node_id, address in machines.items()
    }
    for address, answer in asked.items():
        try:
            absent = ray.get(answer, timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"the machine {address} of the Ray cluster gives no answer: {error}"
            ) from error
        if absent:
            raise ClusterError(
                f"the machine {address} of the Ray cluster has no {', '.join(absent)}: install "
                "gems-flwr[simulations] there, under the same path as here"
            )


def _looker(names: tuple[str, ...]) -> Callable[[], list[str]]:
    # A function within a function travels whole; others are looked up in a module over there.
    def absent() -> list[str]:
        from importlib.util import find_spec

        return [name for name in names if find_spec(name) is None]

    return absent
