"""Run all that a study asks for: resumable, in parallel, one failure not stopping the rest.

Every run is an ordinary run of `simulations.run` in a folder named after its config: finished ones
are read, interrupted ones go on, and two studies that need the same run share it. Methods of one
setting that begin with the same local training do it once. A study that measures by itself keeps
the findings of each finished seed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gems_flwr.core.disk import write_atomically
from gems_flwr.errors import GemsError
from simulations.config import compose_config
from simulations.data import MissingDataError
from simulations.experiment.experiment import Experiment
from simulations.reproduce.findings import Finding, Findings, merge
from simulations.reproduce.measures import MEASURES, kilobytes_up
from simulations.reproduce.study import Cell, DoneRun, Scope, Study
from simulations.run import run

# A run leaves some 40 MB of split-up heap behind; of hundreds in one process that is gigabytes.
_JOBS_OF_WORKER = 24


@dataclass(frozen=True)
class _Job:
    """One run."""

    cell: Cell
    overrides: list[str]
    seed: int
    output: Path


@dataclass
class _Outcome:
    """What a job found: one part per finding, and the reasons of runs that failed."""

    parts: list[Finding] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    runs: list[DoneRun] = field(default_factory=list)
    # What the runs took, whenever they were made.
    seconds: float = 0.0


def run_study(study: Study, scope: Scope, console: Console) -> Findings:
    """Run a study.

    Raises
    ------
    MissingDataError, GemsError
        Before anything starts, if data or a config is not there.
    """
    started, seeds = time.perf_counter(), [*study.seeds_of(scope)]
    found, spent = Findings(study.name, scope.quick, scope.dataset is not None, seeds, []), 0.0
    if study.measure is not None:
        found.findings = merge(_measured(study, scope, console))
    else:
        assert study.cells is not None
        jobs = list(_jobs(study, scope))
        # One seed is enough to see whether configs and data are right.
        first = [job.overrides for job in jobs if job.seed == seeds[0]]
        check_data(first, has_stand_in=study.has_stand_in)
        outcomes = _outcomes(study.name, jobs, scope.jobs, console)
        parts = [part for outcome in outcomes for part in outcome.parts]
        if study.judge is not None:
            for seed in seeds:
                own = [o.runs for job, o in zip(jobs, outcomes, strict=True) if job.seed == seed]
                done = [run for runs in own for run in runs]
                parts += study.judge(done, scope) if done else []
        found.findings = _in_order(merge(parts), study.cells(scope))
        found.failures = [reason for outcome in outcomes for reason in outcome.failures]
        spent = sum(each.seconds for each in outcomes) / min(scope.jobs, len(jobs))
    if study.derive is not None:
        study.derive(found)
    # Of a study that was interrupted, or shares runs with others, only the end is seen here.
    found.made = provenance(max(time.perf_counter() - started, spent))
    return found


def _measured(study: Study, scope: Scope, console: Console) -> Iterator[Finding]:
    """Yield what a study measures by itself, seed by seed; finished seeds are read."""
    assert study.measure is not None
    folder = study.file(scope).parent
    words = [*(study.quick if scope.quick else ()), *study.common(scope)]
    for seed in study.seeds_of(scope):
        file, about = folder / f"seed-{seed}.json", {"overrides": words}
        known = json.loads(file.read_text()) if file.exists() else {}
        if known.get("about") != about:
            parts = [asdict(part) for part in study.measure(words, seed, folder, console)]
            known = {"about": about, "findings": parts}
            write_atomically(file, json.dumps(known).encode())
        yield from (Finding(**part) for part in known["findings"])


def _jobs(study: Study, scope: Scope) -> Iterator[_Job]:
    """Yield the jobs, seed by seed, so that an interrupted run has whole seeds."""
    for seed in study.seeds_of(scope):
        for cell in study.cells_of(scope, seed):
            words = [*study.overrides(cell, scope, seed), "progress=false"]
            yield _Job(cell, words, seed, scope.output)


def _in_order(found: list[Finding], cells: Sequence[Cell]) -> list[Finding]:
    """Sort findings as the experiment has them; what a judge found comes after them."""
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    pairs = list(dict.fromkeys((cell.setting, cell.method) for cell in cells))

    def place(each: Finding) -> tuple[int, int]:
        if each.key[:2] not in pairs:
            return len(cells), len(cells)
        return settings.index(each.setting), pairs.index(each.key[:2])

    return sorted(found, key=place)


def check_data(overrides: Sequence[Sequence[str]], *, has_stand_in: bool = True) -> None:
    """Open every data set, so that nothing is missing later."""
    # Composing takes a quarter of a second, so not all of hundreds.
    kinds = {tuple(w for w in each if w.startswith("dataset")): each for each in overrides}
    for each in kinds.values():
        try:
            _ = Experiment(compose_config(list(each))).dataset
        except MissingDataError as error:
            if not has_stand_in:
                raise
            raise MissingDataError(
                f"{error}\nOr let the bundled digits stand in: --dataset digits."
            ) from error


def _outcomes(name: str, jobs: Sequence[_Job], workers: int, console: Console) -> list[_Outcome]:
    """Return what every job found, in their order."""
    outcomes: dict[int, _Outcome] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    is_quiet = not console.is_terminal
    with Progress(*columns, *times, console=console, disable=is_quiet) as progress:
        bar = progress.add_task(name, total=len(jobs))
        for index, outcome in _as_completed(jobs, workers):
            outcomes[index] = outcome
            progress.advance(bar)
            for reason in outcome.failures:
                progress.console.print(f"failed: {reason}", style="red", markup=False)
    return [outcomes[index] for index in range(len(jobs))]


def _as_completed(jobs: Sequence[_Job], workers: int) -> Iterator[tuple[int, _Outcome]]:
    if workers <= 1 or len(jobs) == 1:
        yield from ((index, _work(job)) for index, job in enumerate(jobs))
        return
    # Spawned: a fork would copy torch's threads in whatever state they are in.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=begin_worker, max_tasks_per_child=_JOBS_OF_WORKER
    ) as pool:
        futures = {pool.submit(_work, job): index for index, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def begin_worker() -> None:
    """Keep a worker to one core, and end it with the process that it works for."""
    # Libraries that take all cores would wait for each other.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker waits for work for ever, even if whoever gives it out was killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: _Job) -> _Outcome:
    found, cell = _Outcome(), job.cell
    values: list[float | None] = [None] * len(cell.reads)
    kilobytes = []
    try:
        config = compose_config(job.overrides)
        folder = job.output / "runs" / config.run_name()
        result = run(config, folder, Console(quiet=True), wait=True)
    except (GemsError, ValueError, RuntimeError) as error:
        found.failures.append(f"{cell.setting}, {cell.method}, seed {job.seed}: {error}")
    else:
        values = [MEASURES[name](result, folder) for name in cell.reads]
        kilobytes = [kilobytes_up(result)]
        found.runs.append(DoneRun(cell, folder))
        found.seconds += float(result.get("seconds", 0.0))
    found.parts = [
        Finding(cell.setting, cell.method, quantity, [value], [*kilobytes], cell.x)
        for quantity, value in zip(cell.reads, values, strict=True)
    ]
    return found


def provenance(seconds: float) -> dict[str, Any]:
    """Return what, where and when: machine, versions, commit, time."""
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "flwr", "numpy")},
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": round(seconds / 60, 1),
    }


def _commit() -> str:
    """Return the commit of the code, marked if files were changed since."""
    here = Path(__file__).resolve().parents[2]

    def ask(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = ask("status", "--porcelain", "--", "simulations", "gems_flwr", "conf")
        return ask("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
