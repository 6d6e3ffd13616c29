"""Ending a process together with everything that it started, in whichever session that is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path


def family(pid: int) -> list[int]:
    """Return a process and all its descendants, elders first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for member in found:
        found.extend(children.get(member, []))
    return found


def send(pids: Iterable[int], how: signal.Signals) -> None:
    """Send a signal to processes; those that have ended are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


def _parents() -> list[tuple[int, int]]:
    """Return every process with its parent."""
    if not Path("/proc/self/stat").exists():
        listing = subprocess.run(["ps", "axo", "pid=,ppid="], capture_output=True, text=True)
        pairs = (line.split() for line in listing.stdout.splitlines())
        return [(int(pid), int(parent)) for pid, parent in pairs]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # The name of the program, in brackets, may itself hold blanks and brackets.
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                found.append((int(entry.name), int(after_name[1])))
    return found
