"""What all trackers have in common: a run is never held up, changed or ended by one.

A tracker is a callback. What it hears it turns into flat names and numbers (`round_numbers`) and
hands to a thread of its own, which talks to the tracker's library: a server that takes its time
costs the run none. Whatever goes wrong there (a full disk, a server that is away, a wrong address)
is said once; it is tried again with the next round, in order, so that a short absence leaves no
gap. When the run has ended, it waits for the thread, but not for ever.
"""

from __future__ import annotations

import importlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from gems_flwr.errors import NotInstalledError, OptionError
from gems_flwr.server.log import log_event, log_warning, short
from gems_flwr.server.members import split_members
from gems_flwr.server.settings import Callback
from gems_flwr.server.state import RoundRecord, RunResult
from gems_flwr.tracking.round_numbers import (
    Plain,
    Totals,
    flat_values,
    result_values,
    round_numbers,
    setting_values,
    totals_of,
)

Status = Literal["finished", "failed", "interrupted"]
# Files of a run that name no node; all others are for trackers that may know the nodes.
_WITHOUT_NODES = ("config.yaml", "model.safetensors")
_NOTHING = np.empty(0)
# How often one thing is tried before it is given up: other things may still get through.
_ATTEMPTS = 3
# After an interrupt nobody wants to wait.
_HURRY_SECONDS = 5.0


@dataclass(frozen=True)
class Opening:
    """What a tracker's run begins with.

    Parameters
    ----------
    name : str
        What the run is called.
    parameters : mapping from str to plain value
        All options, by flat names.
    folder : Path, optional
        Where the run keeps its checkpoint.
    goes_on : bool
        Whether the run may be one that an earlier process has begun.
    finished_rounds : int
        How many rounds that one has played.
    """

    name: str
    parameters: Mapping[str, Plain]
    folder: Path | None
    goes_on: bool
    finished_rounds: int


class Tracker(Callback, ABC):
    """Base of all trackers; a subclass talks to one library, in a thread that may be held up.

    As a context manager it stays open when the strategy has ended, so that files can follow
    (`log_files`), and closes at the end of the block.

    Parameters
    ----------
    name : str, optional
        What the run is called; by default its checkpoint folder's name, else the strategy's.
    config : mapping, optional
        Further parameters of the run, such as ``context.run_config``; nested is fine.
    nodes : bool
        Whether single nodes are told of, by name.
    artifacts : bool
        Whether `log_files` does anything.
    wait_seconds : float
        How long the end of a run waits for the tracker.
    """

    def __init__(
        self,
        *,
        name: str | None,
        config: Mapping[str, object] | None,
        nodes: bool,
        artifacts: bool,
        wait_seconds: float,
    ) -> None:
        if not wait_seconds >= 0:
            raise OptionError(f"wait_seconds must be at least 0, got {wait_seconds}")
        self.name = name
        self.config: Mapping[str, object] = config or {}
        self.nodes = nodes
        self.artifacts = artifacts
        self.wait_seconds = wait_seconds
        # Who is told that the tracker is in trouble; `gems-flwr run` has its console here.
        self.say: Callable[[str], None] = lambda text: log_warning("tracking", reason=text)
        self._held = False
        self._settings: Mapping[str, object]
        self._history: tuple[RoundRecord, ...]
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._forget()

    # --- what a subclass does, in the tracker's thread ----------------------------------------

    @abstractmethod
    def open_run(self, opening: Opening) -> int:
        """Begin a run, or go on with one; return the last round that it has, -1 for none."""

    @abstractmethod
    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add one round."""

    @abstractmethod
    def log_end(self, values: Mapping[str, Plain]) -> None:
        """Add what is said of the whole run."""

    @abstractmethod
    def close_run(self, status: Status) -> None:
        """End the run."""

    def log_file(self, path: Path) -> None:
        """Add a file, where the tracker has any."""

    # --- what it hears ------------------------------------------------------------------------

    def on_setup(self, settings: Mapping[str, object], history: Sequence[RoundRecord]) -> None:
        """Note the settings and the rounds that are there already."""
        self._settings, self._history = settings, tuple(history)
        self._totals = totals_of(history)

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Begin a run, or go on with the one of this folder."""
        given = self._settings.get("checkpoint_dir")
        folder = None if given is None else Path(str(given)).resolve()
        opening = Opening(
            name=self.name or (folder.name if folder else strategy),
            parameters={
                "strategy": strategy,
                "num_rounds": num_rounds,
                **flat_values(self.config),
                # What the strategy has in fact been told, whatever stands in a config.
                **{f"strategy.{k}": v for k, v in setting_values(self._settings).items()},
            },
            folder=folder,
            goes_on=bool(self._settings.get("resume")),
            finished_rounds=finished_rounds,
        )
        history, nodes = self._history, self.nodes

        def begin() -> None:
            known, totals = self.open_run(opening), Totals()
            self._is_open = True
            for record in history:
                totals = totals.after(record)
                numbers = round_numbers(record, totals, nodes=nodes)
                if record.round > known and numbers:
                    self.log_round(record.round, numbers)

        self._started = True
        self._thread = threading.Thread(target=self._work, daemon=True, name=type(self).__name__)
        self._thread.start()
        self._jobs.put(begin)

    def on_round_end(self, record: RoundRecord) -> None:
        """Add the round."""
        self._totals = self._totals.after(record)
        numbers = round_numbers(record, self._totals, nodes=self.nodes)
        self._jobs.put(lambda: self.log_round(record.round, numbers))

    def on_end(self, result: RunResult) -> None:
        """Add what came of the run, and close it unless files may follow."""
        values = result_values(result, nodes=self.nodes)
        members = {*split_members(dict.fromkeys(result.arrays, _NOTHING))} - {""}
        self._nodes_in_model = not members <= {*result.details.get("models", ())}
        self._jobs.put(lambda: self.log_end(values))
        if not self._held:
            self.close("finished")

    def on_error(self, error: BaseException) -> None:
        """Close the run as one that failed, or that somebody interrupted."""
        self.close("failed" if isinstance(error, Exception) else "interrupted")

    # --- files, and the end -------------------------------------------------------------------

    def log_files(self, paths: Sequence[str | Path]) -> None:
        """Add files, if `artifacts` is set; those that name nodes only with `nodes`."""
        for path in map(Path, paths):
            harmless = path.name in _WITHOUT_NODES
            if path.suffix == ".safetensors" and self._nodes_in_model:
                harmless = False  # an ensemble's members are called as their nodes
            if self.artifacts and (self.nodes or harmless):
                self._jobs.put(lambda path=path: self.log_file(path))  # type: ignore[misc]

    def close(self, status: Status = "finished") -> None:
        """End the run in the tracker, and wait until it has everything; twice does no harm."""
        if not self._started:
            return
        self._started = False
        self._jobs.put(lambda: self.close_run(status))
        self._jobs.put(None)
        assert self._thread is not None
        patience = self.wait_seconds
        if status == "interrupted":
            patience = min(patience, _HURRY_SECONDS)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._complain(f"it did not take everything within {patience:g} s")
        # Should it still be at it, it keeps the queue that it has.
        self._jobs = queue.Queue()
        self._forget()

    def __enter__(self) -> Self:
        self._held = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held = False
        if error is not None:
            self.on_error(error)
        self.close()

    # --- the thread ---------------------------------------------------------------------------

    def _forget(self) -> None:
        self._started = self._is_open = self._complained = self._nodes_in_model = False
        self._settings, self._history = {}, ()
        self._totals = Totals()

    def _work(self) -> None:
        jobs, waiting, attempts = self._jobs, list[Callable[[], None]](), 0
        while (job := jobs.get()) is not None:
            waiting.append(job)
            while waiting:
                try:
                    waiting[0]()
                except (Exception, SystemExit) as error:
                    self._complain(f"{type(error).__name__}: {short(str(error))}")
                    attempts += 1
                    if attempts < _ATTEMPTS:
                        break
                    if not self._is_open:
                        return  # there is nothing to write to
                waiting.pop(0)
                attempts = 0

    def _complain(self, reason: str) -> None:
        name = type(self).__name__
        if self._complained:
            log_event("tracking", tracker=name, reason=reason)
            return
        self._complained = True
        self.say(f"{name} does not follow the run, which goes on: {reason}")


def needed(module: str, extra: str) -> Any:
    """Return a module of a tracker.

    Raises
    ------
    NotInstalledError
        Says which extra brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalledError(
            f"pip install 'gems-flwr[{extra}]' (in a checkout '.[{extra}]'): this tracker needs "
            f"{module.partition('.')[0]}, which cannot be imported ({error})"
        ) from error
