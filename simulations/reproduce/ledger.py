"""What is finished in an output folder, what runs, and what failed: for ``all`` and the list.

An experiment of a paper is finished if its findings are there, of as many seeds as asked for and
without a failure. A study leaves files of its own kind, so its end is noted here; and so is what
was begun and what failed, whoever it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from gems_flwr.disk.files import write_atomically
from simulations.reproduce.entry import Entry, Options

FOLDER = "ledger"
RUNNING, DONE, FAILED, INTERRUPTED, MISSING = "running", "done", "failed", "interrupted", "to come"


@dataclass(frozen=True)
class Note:
    """What happened last to an entry: `RUNNING`, `DONE` or `FAILED`."""

    state: str
    pid: int
    started: float
    seeds: int
    reason: str = ""


def key(entry: Entry, options: Options) -> str:
    """Return the name of an entry's folder and files, as the version that is asked for."""
    quick = "-quick" if options.quick else ""
    return f"{entry.name}{quick}{f'-{options.dataset}' if options.dataset else ''}"


def note(entry: Entry, options: Options, state: str, reason: str = "") -> None:
    """Write down what happens to an entry."""
    path = _path(entry, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    what = Note(state, os.getpid(), time.time(), _seeds(entry, options), reason)
    write_atomically(path, json.dumps(asdict(what)).encode())


def watched(entry: Entry, options: Options, run: Callable[[], int]) -> int:
    """Run an entry and write down how it goes; return how many of its runs failed.

    What is interrupted stays noted as running, by a process that is no more.
    """
    note(entry, options, RUNNING)
    try:
        failed = run()
    except Exception as error:
        note(entry, options, FAILED, f"{type(error).__name__}: {error}")
        raise
    note(entry, options, FAILED if failed else DONE, f"{failed} runs failed" if failed else "")
    return failed


def read(entry: Entry, options: Options) -> Note | None:
    """Return what was written down last; None if nothing was, or nothing readable."""
    try:
        return Note(**json.loads(_path(entry, options).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def state(entry: Entry, options: Options) -> str:
    """Return whether an entry is done, runs, failed, was interrupted, or is to come."""
    last = read(entry, options)
    if last is not None and last.state == RUNNING:
        return RUNNING if _lives(last.pid) else INTERRUPTED
    if _has_findings(entry, options):
        return DONE
    if last is None or last.seeds < _seeds(entry, options):
        return MISSING
    # An experiment of a paper whose findings are gone is not done, whatever was noted.
    return MISSING if last.state == DONE and entry.in_processes else last.state


def _has_findings(entry: Entry, options: Options) -> bool:
    name = key(entry, options)
    try:
        found = json.loads((options.output / name / f"{name}.json").read_text())
        return not found["failures"] and len(found["seeds"]) >= _seeds(entry, options)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _path(entry: Entry, options: Options) -> Path:
    return options.output / FOLDER / f"{key(entry, options)}.json"


def _seeds(entry: Entry, options: Options) -> int:
    return options.seeds or (1 if options.quick else entry.seeds)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
