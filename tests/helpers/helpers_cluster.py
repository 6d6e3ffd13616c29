"""A Ray cluster of two machines that are both this one, on a loopback address of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers_patience import HANG_SECONDS

# Ray replaces 127.0.0.1 by an address that others can reach.
HOST = "127.0.0.2"


def free_ports(count: int) -> list[int]:
    """Return ports where nobody listens, above those that Ray keeps for its workers."""
    try:
        sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    except OSError as error:
        pytest.skip(f"{HOST} is no address of this machine: {error}")
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def two_machines():
    """Yield the address of a cluster with two raylets of one processor each, and its folder."""
    port, clients = free_ports(2)
    address = f"{HOST}:{port}"
    # Sockets lie in it, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    head = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    head += [f"--ray-client-server-port={clients}"]
    started = []
    try:
        for name, options in (("head", head), ("worker", [f"--address={address}"])):
            started.append(_start(folder / f"{name}.log", options))
        yield address, folder
    finally:
        for process in reversed(started):
            _stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def _start(log: Path, options: list[str]) -> subprocess.Popen:
    common = ["--num-cpus=1", f"--node-ip-address={HOST}", "--disable-usage-stats", "--block"]
    common += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    # A machine knows nothing of where we keep our code.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_ADDRESS")}
    environment["RAY_raylet_start_wait_time_s"] = str(HANG_SECONDS)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
    end = time.monotonic() + HANG_SECONDS
    while "--block" not in log.read_text():
        if process.poll() is not None or time.monotonic() > end:
            _stop(process)
            raise RuntimeError(log.read_text())
        time.sleep(0.2)
    return process


def _stop(process: subprocess.Popen) -> None:
    """End the process that we started and, by its group, all that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
