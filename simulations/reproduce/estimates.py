"""How long an entry takes here: what it took where it was published, times this machine's factor.

The factor comes from what is finished in the output folder, beside what the same took there. Before
anything is finished, a training of a fraction of a second is timed instead.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from simulations.reproduce.entry import Entry, Options

MEASURED = Path(__file__).with_name("papers") / "measured"
# Published minutes are those of two processes on two cores.
PUBLISHED_JOBS = 2
# What a quick version takes at most, on one processor.
QUICK_MINUTES = 5.0
# What `training_seconds` gives on the machine of the published minutes.
PUBLISHED_SECONDS = 0.094
# Less than this says nothing about a machine: starting a process takes as long.
_LEAST_MINUTES = 1.0
_REPEATS = 5
_STEPS = 3000


@dataclass(frozen=True)
class Estimate:
    """The factor of this machine, and where it comes from."""

    factor: float
    basis: str

    def minutes(self, entry: Entry, options: Options) -> float:
        """Return what an entry takes here, in minutes."""
        share = workers(entry, options)
        seeds = options.seeds or (1 if options.quick else entry.seeds)
        whole = published_minutes(entry) * seeds / entry.seeds * PUBLISHED_JOBS
        if options.quick:
            known = entry.quick_minutes
            whole = min(whole, QUICK_MINUTES) if known is None else known * seeds
        return self.factor * whole / share

    def __str__(self) -> str:
        """Say what the minutes rest on."""
        return f"published minutes × {self.factor:.2g}, this machine's factor ({self.basis})"


def workers(entry: Entry, options: Options) -> int:
    """Return how many processes work at a time; a study was published with the one that it has."""
    if not entry.in_processes:
        return 1 if options.quick else PUBLISHED_JOBS
    return max(1, min(options.jobs or PUBLISHED_JOBS, os.cpu_count() or 1))


def published_minutes(entry: Entry) -> float:
    """Return what the full version took when it was published; else what the catalogue says."""
    made = _made(entry.name)
    if made is None:
        return entry.minutes
    minutes, seeds = made
    return minutes * entry.seeds / seeds


@cache
def _made(name: str) -> tuple[float, int] | None:
    """Return minutes and seeds of kept findings."""
    content = _read(MEASURED / f"{name}.json")
    return (float(content["made"]["minutes"]), len(content["seeds"])) if content else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


def estimate_here(output: Path, entries: Iterable[Entry]) -> Estimate:
    """Return this machine's factor.

    Parameters
    ----------
    output : Path
        Where finished experiments of papers are looked for.
    entries : iterable of Entry
        Which.
    """
    here = there = 0.0
    names = []
    for entry in entries:
        content = _read(output / entry.name / f"{entry.name}.json")
        if content is None or content["failures"] or _made(entry.name) is None:
            continue
        seeds, made = len(content["seeds"]), content["made"]
        shared = min(int(made.get("jobs", PUBLISHED_JOBS)), os.cpu_count() or 1)
        here += float(made["minutes"])
        there += published_minutes(entry) * seeds / entry.seeds * PUBLISHED_JOBS / shared
        names.append(entry.name)
    if there >= _LEAST_MINUTES:
        return Estimate(here / there, f"from what is finished in {output}: {', '.join(names)}")
    return Estimate(training_seconds() / PUBLISHED_SECONDS, "from a short training, timed")


@cache
def training_seconds() -> float:
    """Return the processor time of a small fixed training: the best of a few tries, in seconds."""
    return min(_train() for _ in range(_REPEATS))


def _train() -> float:
    """Train a net of one hidden layer on noise; so small that one thread does it all."""
    generator = np.random.default_rng(0)
    inputs, wanted = generator.normal(size=(10, 256)), generator.normal(size=(10, 10))
    first, second = generator.normal(size=(256, 64)), generator.normal(size=(64, 10))
    started = time.thread_time()
    for _ in range(_STEPS):
        hidden = np.maximum(inputs @ first / 16, 0)
        error = hidden @ second / 8 - wanted
        back = (error @ second.T) * (hidden > 0)
        second -= 1e-4 * hidden.T @ error
        first -= 1e-4 * inputs.T @ back
    return time.thread_time() - started


def in_digits(minutes: float) -> str:
    """Return minutes for a column of a table."""
    return f"{minutes:.1f}" if minutes < 9.95 else f"{minutes:.0f}"


def in_words(minutes: float) -> str:
    """Return a length of time as somebody would say it."""
    if minutes < 1:
        return "less than a minute"
    if minutes < 90:
        return f"about {minutes:.0f} minutes" if minutes >= 1.5 else "about a minute"
    return f"about {minutes / 60:.1f} hours"
