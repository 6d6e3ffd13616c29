"""Flower's command line, with an answer to "did it work?".

``flwr run`` ends with status 0 whatever becomes of the run; only ``flwr list`` knows. `FlowerCli`
submits a run, waits for its end and returns what became of it; ``gems-flwr submit`` ends with a
status that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems_flwr.errors import FlowerCliError

COMPLETED = "finished:completed"
_LOOKS = 20


@dataclass(frozen=True)
class FlowerCli:
    """Calls ``flwr`` for one SuperLink."""

    superlink: str | None = None  # the connection in Flower's config; its default one if not given
    environment: Mapping[str, str] | None = None  # of the command, such as another FLWR_HOME
    folder: Path | None = None  # working directory of the command

    def call(self, *arguments: str) -> str:
        """Call ``flwr`` and return what it printed; a FlowerCliError unless its status is 0."""
        done = self._run(list(arguments), capture_output=True, text=True)
        if done.returncode:
            output = f"{done.stdout}{done.stderr}".strip()
            raise FlowerCliError(f"flwr {' '.join(arguments)}: {output}")
        return str(done.stdout)

    def submit(self, app: str | Path, *options: str) -> int:
        """Submit an app with further options of ``flwr run``; return the run's id."""
        answer = self._json("run", str(app), *self._where, *options)
        if "run-id" not in answer:
            reason = " ".join(str(answer.get("error-message", answer)).split())
            raise FlowerCliError(f"flwr run {app}: {reason}")
        return int(answer["run-id"])

    def status(self, run_id: int) -> str:
        """Return Flower's word for a run, such as ``running`` or ``finished:completed``."""
        answer = self._json("list", *self._where, "--run-id", str(run_id))
        return str(answer["runs"][0]["status"])

    def wait(self, run_id: int, seconds: float | None = None) -> str:
        """Wait up to `seconds` for the end of a run and return its last status."""
        # A process of Flower's command line that waits costs less than one per look.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.follow(run_id, timeout=seconds, capture_output=True)
        # Some time may pass between the end of its log and that of the run.
        for _ in range(_LOOKS):
            if (status := self.status(run_id)).startswith("finished"):
                return status
            time.sleep(1)
        raise FlowerCliError(f"run {run_id} is still {status} after {seconds} s")

    def log(self, run_id: int) -> str:
        """Return what a run's ServerApp has logged so far."""
        return self.call("log", str(run_id), *self._where, "--show")

    def follow(self, run_id: int, **options: Any) -> None:
        """Show the log of a run until it ends."""
        self._run(["log", str(run_id), *self._where, "--stream"], **options)

    @property
    def _where(self) -> tuple[str, ...]:
        return () if self.superlink is None else (self.superlink,)

    def _run(self, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        # The command that belongs to this interpreter, whatever is on the path.
        command = [str(Path(sys.executable).parent / "flwr"), *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.environment, **options)

    def _json(self, *arguments: str) -> dict[str, Any]:
        printed = self.call(*arguments, "--format", "json")
        try:
            # Some commands print a line before.
            answer: dict[str, Any] = json.loads(printed[printed.index("{") :])
        except ValueError as error:
            raise FlowerCliError(f"flwr {arguments[0]} printed no JSON: {printed}") from error
        return answer


def add_submit(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
    submit = commands.add_parser(
        "submit",
        help="flwr run, follow the log, and end with a status that says how the run ended",
        epilog="Status: 0 for a run that completed, 1 for one that failed, 2 if it could not be "
        "submitted.",
    )
    submit.add_argument("app", nargs="?", default=".", help="folder of the Flower app")
    submit.add_argument("superlink", nargs="?", help="connection in Flower's config")
    submit.add_argument("-c", "--run-config", action="append", default=[], help="as of flwr run")
    submit.add_argument("--federation-config", help="as of flwr run")
    submit.set_defaults(run=_submit)


def _submit(options: argparse.Namespace) -> int:
    flwr = FlowerCli(options.superlink)
    further = [part for value in options.run_config for part in ("-c", value)]
    if options.federation_config:
        further += ["--federation-config", options.federation_config]
    run_id = flwr.submit(options.app, *further)
    print(f"run {run_id} is submitted", flush=True)
    flwr.follow(run_id)
    status = flwr.wait(run_id)
    print(f"run {run_id} is {status}")
    return 0 if status == COMPLETED else 1
