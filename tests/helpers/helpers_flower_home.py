"""A Flower of its own for a test: another home, other ports, and nothing left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from simulations.deployment.federation import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@contextlib.contextmanager
def flower_of_its_own(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield an environment for ``flwr`` and an empty working folder; stop its SuperLink after."""
    home, neutral = folder / "home", folder / "neutral"
    home.mkdir(parents=True)
    neutral.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        # What is tested is the library beside these tests, whichever one is installed.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
    }
    try:
        yield environment, neutral
    finally:
        _stop_superlink(home)


def _stop_superlink(home: Path) -> None:
    """End the SuperLink that belongs to a FLWR_HOME: politely, then not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        listing = subprocess.run(["ps", "axwwo", "pid,args"], capture_output=True, text=True)
        for line in listing.stdout.splitlines():
            pid, _, arguments = line.strip().partition(" ")
            if "flower-superlink" in arguments and str(home) in arguments:
                os.kill(int(pid), how)
        time.sleep(2)
