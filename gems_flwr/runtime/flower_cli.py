"""Flower's command line, with an answer to "did it work?".

``flwr run`` ends with status 0 whatever becomes of the run; only ``flwr list`` knows. `FlowerCli`
submits a run, waits for its end and returns what became of it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gems_flwr.errors import FlowerCliError

COMPLETED = "finished:completed"
_FINISHED = "finished"
# How long a run may take to be called finished once its log has ended.
_END_SECONDS = 20.0


@dataclass(frozen=True)
class FlowerCli:
    """Calls ``flwr`` for one SuperLink.

    Parameters
    ----------
    superlink : str, optional
        Name of the connection in Flower's config; its default one if not given.
    environment : mapping from str to str, optional
        Environment of the command, such as another ``FLWR_HOME``; this process' if not given.
    folder : Path, optional
        Working directory of the command; this process' if not given.
    """

    superlink: str | None = None
    environment: Mapping[str, str] | None = None
    folder: Path | None = None

    def call(self, *arguments: str) -> str:
        """Call ``flwr`` and return what it printed.

        Raises
        ------
        FlowerCliError
            If it ends with another status than 0.
        """
        done = subprocess.run(
            [self._command, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = f"{done.stdout}{done.stderr}".strip()
            raise FlowerCliError(f"flwr {' '.join(arguments)}: {said}")
        return done.stdout

    def submit(self, app: str | Path, *options: str) -> int:
        """Submit an app with further options of ``flwr run``; return the run's id."""
        said = self._json("run", str(app), *self._where, *options)
        if not said.get("success", True) or "run-id" not in said:
            reason = " ".join(str(said.get("error-message", said)).split())
            raise FlowerCliError(f"flwr run {app}: {reason}")
        return int(said["run-id"])

    def status(self, run_id: int) -> str:
        """Return Flower's word for a run, such as ``running`` or ``finished:completed``."""
        said = self._json("list", *self._where, "--run-id", str(run_id))
        return str(said["runs"][0]["status"])

    def wait(self, run_id: int, seconds: float | None = None) -> str:
        """Wait for the end of a run and return its last status.

        Raises
        ------
        FlowerCliError
            If that takes longer than `seconds`; None waits for ever.
        """
        # A process of Flower's command line that waits costs less than one per look.
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                self._log_command(run_id),
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
            )
        deadline = time.monotonic() + _END_SECONDS
        while not (status := self.status(run_id)).startswith(_FINISHED):
            if time.monotonic() > deadline:
                raise FlowerCliError(f"run {run_id} is still {status} after {seconds} s")
        return status

    def log(self, run_id: int) -> str:
        """Return what a run's ServerApp has logged so far."""
        return self.call("log", str(run_id), *self._where, "--show")

    def follow(self, run_id: int) -> None:
        """Show the log of a run until it ends."""
        subprocess.run(self._log_command(run_id), cwd=self.folder, env=self.environment)

    def _log_command(self, run_id: int) -> list[str]:
        return [self._command, "log", str(run_id), *self._where, "--stream"]

    @property
    def _command(self) -> str:
        # The one that belongs to this interpreter, whatever is on the path.
        return str(Path(sys.executable).parent / "flwr")

    @property
    def _where(self) -> tuple[str, ...]:
        return () if self.superlink is None else (self.superlink,)

    def _json(self, *arguments: str) -> dict:
        said = self.call(*arguments, "--format", "json")
        try:
            # Some commands say a word before.
            answer = json.loads(said[said.index("{") :])
        except ValueError as error:
            raise FlowerCliError(f"flwr {arguments[0]} printed no JSON: {said}") from error
        assert isinstance(answer, dict)
        return answer
