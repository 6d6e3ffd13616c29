"""A SuperLink and SuperNodes in processes of their own, on loopback, with TLS and authentication.

Use it as a context manager: whatever it started is stopped at the end, whatever happened::

    with Federation(folder) as federation:
        for number in range(3):
            federation.start_node(f"hospital-{number}", f"partition-id={number}")
        run = federation.submit(app, overrides="strategy=gems", output=str(folder / "out"))
        assert federation.flwr.wait(run) == COMPLETED

Each process has a log in ``folder/logs``, and can be killed together with what it started, as a
machine that loses power would be.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self, TypeVar

from gems_flwr import GemsError
from gems_flwr.tools import FlowerCli
from simulations.deployment.credentials import Keys, make_node_keys, make_server_credentials

_BIN = Path(sys.executable).parent
_CONNECTION = "local-deployment"
_CLI = "cli"
# How long Flower's own processes may take to come up, also on a busy machine.
_START_SECONDS = 300.0
_STOP_SECONDS = 5.0
T = TypeVar("T")


class DeploymentError(GemsError, RuntimeError):
    """Something of the federation did not start or failed; the message says what."""


class Federation:
    """A SuperLink and its SuperNodes.

    Parameters
    ----------
    folder : Path
        Where keys, logs, Flower's homes and the SuperLink's database go.
    environment : mapping from str to str, optional
        Added to the environment of every process, such as ``GEMS_FLWR_DATA``.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder.resolve()
        self.address = f"127.0.0.1:{free_port()}"
        self._extra = dict(environment or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keys: dict[str, Keys] = {}
        self._credentials = make_server_credentials(self.folder / "credentials")
        self._write_cli_config()

    def __enter__(self) -> Self:
        """Start the SuperLink."""
        try:
            self.start_superlink()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self.stop()

    # --- processes ----------------------------------------------------------------------------

    def start_superlink(self) -> None:
        """Start the SuperLink, or start it again with the database that it had."""
        host, port = self.address.split(":")
        made = self._credentials
        self._start(
            "superlink",
            "flower-superlink",
            *("--host", host, "--port", port, "--database", str(self.folder / "superlink.db")),
            *("--ssl-ca-certfile", str(made.public), "--ssl-certfile", str(made.public)),
            *("--ssl-keyfile", str(made.private), "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
        )
        wait_until(
            lambda: self._alive("superlink") and _answers(host, int(port)),
            _START_SECONDS,
            "the SuperLink does not answer",
        )

    def register(self, name: str, known_as: str | None = None) -> None:
        """Make keys for a node and register the public one, under its name or another one."""
        self._keys[name] = make_node_keys(self.folder / "credentials", name)
        public = str(self._keys[name].public)
        self.flwr.call("supernode", "register", public, _CONNECTION, "--name", known_as or name)

    def start_node(
        self, name: str, config: str, *, registered: bool = True, known_as: str | None = None
    ) -> None:
        """Start a SuperNode, or start it again as the same node.

        Parameters
        ----------
        name : str
            What its process is called here.
        config : str
            The ``--node-config``, such as ``partition-id=0``.
        registered : bool, default True
            Whether to register the node's key with the SuperLink first.
        known_as : str, optional
            The name to register it under, if that is another one.
        """
        if name not in self._keys:
            if registered:
                self.register(name, known_as)
            else:
                self._keys[name] = make_node_keys(self.folder / "credentials", name)
        self._start(
            name,
            "flower-supernode",
            *("--superlink", self.address, "--port", str(free_port()), "--node-config", config),
            *("--root-certificates", str(self._credentials.public)),
            *("--auth-supernode-private-key", str(self._keys[name].private)),
        )

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """Return the process of a node, or of ``superlink``."""
        return self._processes[name]

    def kill(self, name: str) -> None:
        """Kill a process and all that it started, as ``kill -9`` does."""
        process = self._processes.pop(name)
        send(family(process.pid), signal.SIGKILL)
        process.wait()

    def end(self, name: str) -> None:
        """End a node politely: it says goodbye to the SuperLink."""
        process = self._processes.pop(name)
        members = family(process.pid)
        send(members, signal.SIGCONT)
        send([process.pid], signal.SIGTERM)
        try:
            process.wait(_START_SECONDS)
        finally:
            send(members, signal.SIGKILL)

    def pause(self, name: str) -> None:
        """Let a process and all that it started stand still, as a machine that hangs does."""
        send(family(self._processes[name].pid), signal.SIGSTOP)

    def wake(self, name: str) -> None:
        """Let a process that stands still go on."""
        send(family(self._processes[name].pid), signal.SIGCONT)

    def stop(self) -> None:
        """Stop everything that was started: politely, then not."""
        # Flower's workers have sessions of their own, and survive those that started them.
        members = {pid for each in self._processes.values() for pid in family(each.pid)}
        for process in self._processes.values():
            send([process.pid], signal.SIGCONT)
            send([process.pid], signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        send(members, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    # --- runs ---------------------------------------------------------------------------------

    @property
    def flwr(self) -> FlowerCli:
        """Flower's command line, connected to this SuperLink."""
        return FlowerCli(_CONNECTION, self._environment(_CLI), self._made("empty"))

    def submit(self, app: Path, **config: str) -> int:
        """Submit an app with values for its run config; return the run's id."""
        values = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return self.flwr.submit(app, "-c", values)

    def log(self, name: str) -> str:
        """Return the log of a process."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    # --- helpers ------------------------------------------------------------------------------

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with (self._made("logs") / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(_BIN / command), *arguments],
                # Flower's workers put their working directory first on the path.
                cwd=self._made("empty"),
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _alive(self, name: str) -> bool:
        if self._processes[name].poll() is not None:
            raise DeploymentError(f"{name} ended:\n{self.log(name)}")
        return True

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self._made("homes", name)),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            **self._extra,
        }

    def _made(self, *place: str) -> Path:
        folder = self.folder.joinpath(*place)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write_cli_config(self) -> None:
        """Tell Flower's command line where this SuperLink is."""
        (self._made("homes", _CLI) / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "{self.address}"\nroot-certificates = "{self._credentials.public}"\n'
        )


def wait_until(condition: Callable[[], T], seconds: float, complaint: str) -> T:
    """Ask until the answer is true, and return it.

    Raises
    ------
    DeploymentError
        With the complaint, if that took longer.
    """
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise DeploymentError(f"{complaint} after {seconds:g} s")
        time.sleep(0.2)
    return answer


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


# --- ending a process together with everything that it started, in whichever session that is -----


def family(pid: int) -> list[int]:
    """Return a process and all its descendants, elders first."""
    found = [pid]
    for member in found:
        if Path("/proc/self").exists():
            for listed in Path(f"/proc/{member}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found.extend(map(int, listed.read_text().split()))
        else:  # macOS
            done = subprocess.run(["pgrep", "-P", str(member)], capture_output=True, text=True)
            found.extend(map(int, done.stdout.split()))
    return found


def send(pids: Iterable[int], how: signal.Signals) -> None:
    """Send a signal to processes; those that have ended are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
