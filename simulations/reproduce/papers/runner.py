"""Run all that a reproduction asks for: resumable, in parallel, one failure not stopping the rest.

Every run is an ordinary run of `simulations.run` in a folder named after its config: finished ones
are read, interrupted ones go on, and two tables that need the same run share it. Methods of one
setting that start from the same local training do it once (`simulations.experiment.remembered`).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
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

from gems_flwr.errors import GemsError
from simulations.config import RunConfig, compose_config
from simulations.data.archives import MissingDataError
from simulations.experiment.experiment import Experiment
from simulations.experiment.remembered import remember_training
from simulations.report.runs import read_runs
from simulations.reproduce.entry import Options
from simulations.reproduce.papers.findings import Finding, Findings, Timeline, merge
from simulations.reproduce.papers.run_measures import MEASURES, kilobytes_up
from simulations.reproduce.papers.spec import Cell, DoneRun, Reproduction, Scope
from simulations.run import run

RUNS = "runs"
TRAINED = "trained"
JOBS = 2
_POINTS = 240
# A run leaves some 40 MB of split-up heap behind; of hundreds in one process that is gigabytes.
_JOBS_OF_WORKER = 12


@dataclass(frozen=True)
class _Job:
    """Runs of one seed that share their training."""

    cells: tuple[Cell, ...]
    seed: int
    overrides: tuple[tuple[str, ...], ...]
    runs: Path
    lockstep: bool = False
    remembers: bool = True


@dataclass(frozen=True)
class _Outcome:
    """What a job found: one part per finding, and the reasons of runs that failed."""

    parts: list[Finding]
    failures: list[str]
    timelines: list[Timeline]
    runs: list[DoneRun] = field(default_factory=list)
    # What the runs took, whenever they were made.
    seconds: float = 0.0


def reproduce(reproduction: Reproduction, options: Options, console: Console) -> Findings:
    """Run a reproduction.

    Raises
    ------
    MissingDataError, GemsError
        Before anything starts, if data or a config is not there.
    """
    started = time.perf_counter()
    scope = Scope.of(options)
    seeds = list(reproduction.seeds_of(options))
    cells = reproduction.cells(scope)
    jobs = list(_jobs(reproduction, seeds, options))
    # One seed is enough to see whether configs and data are right.
    check_data(
        [each for job in jobs if job.seed == seeds[0] for each in job.overrides],
        has_stand_in=reproduction.has_stand_in,
    )
    workers = options.jobs or JOBS
    outcomes = _run_all(jobs, workers, reproduction.name, console)
    parts = [part for outcome in outcomes for part in outcome.parts]
    if reproduction.judge is not None:
        for seed in seeds:
            done = [
                run
                for job, outcome in zip(jobs, outcomes, strict=True)
                for run in outcome.runs
                if job.seed == seed
            ]
            if done:
                parts += reproduction.judge(done, scope, workers)
    found = Findings(
        name=reproduction.name,
        quick=scope.quick,
        stand_in=scope.stand_in,
        seeds=seeds,
        findings=_in_order(merge(parts), cells),
        timelines=[each for outcome in outcomes for each in outcome.timelines],
        failures=[reason for outcome in outcomes for reason in outcome.failures],
    )
    if reproduction.derive is not None:
        reproduction.derive(found)
    # Of an experiment that was interrupted, or shares runs with others, only the end is seen here.
    whole = sum(outcome.seconds for outcome in outcomes) / min(workers, len(jobs))
    found.made = provenance(max(time.perf_counter() - started, whole))
    found.made["jobs"] = workers
    if options.lockstep:
        found.made["backend"] = "lockstep"
    return found


def _jobs(reproduction: Reproduction, seeds: Sequence[int], options: Options) -> Iterator[_Job]:
    """Yield the jobs, seed by seed, so that an interrupted run has whole seeds."""
    folder = [f"data_dir={options.data_dir}"] if options.data_dir else []
    scope = Scope.of(options)
    for seed in seeds:
        groups: dict[str, list[Cell]] = {}
        for cell in reproduction.cells_of(options, seed):
            groups.setdefault(cell.group or cell.setting, []).append(cell)
        for members in groups.values():
            overrides = tuple(
                (*reproduction.overrides(cell, scope, seed), *folder, "progress=false")
                for cell in members
            )
            runs = options.output / RUNS
            yield _Job(
                tuple(members), seed, overrides, runs, options.lockstep, reproduction.remembers
            )


def _in_order(found: list[Finding], cells: Sequence[Cell]) -> list[Finding]:
    """Sort findings as the experiment has them, setting by setting, whoever ran first.

    What a judge found beside the runs comes after them, as it came.
    """
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    places = {(cell.setting, cell.method): index for index, cell in reversed([*enumerate(cells)])}
    last = len(cells)
    return sorted(
        found,
        key=lambda each: (
            settings.index(each.setting) if each.setting in settings else last,
            places.get((each.setting, each.method), last),
        ),
    )


def check_data(overrides: Sequence[Sequence[str]], *, has_stand_in: bool = True) -> None:
    """Open every data set, so that nothing is missing later."""
    seen: set[tuple[str, ...]] = set()
    for each in overrides:
        # Composing takes a quarter of a second, so not all of hundreds.
        about = tuple(word for word in each if word.startswith("dataset"))
        if about in seen:
            continue
        seen.add(about)
        try:
            _ = Experiment(compose_config(list(each))).dataset
        except MissingDataError as error:
            if not has_stand_in:
                raise
            raise MissingDataError(
                f"{error}\nOr let the bundled digits stand in: --dataset digits."
            ) from error


def _run_all(jobs: Sequence[_Job], workers: int, title: str, console: Console) -> list[_Outcome]:
    """Run jobs in processes of their own; return their outcomes in the order of the jobs."""
    outcomes: dict[int, _Outcome] = {}
    with _progress(console) as progress:
        total = sum(len(job.cells) for job in jobs)
        bar = progress.add_task(title, total=total)
        for index, outcome in _outcomes(jobs, workers):
            outcomes[index] = outcome
            progress.advance(bar, len(jobs[index].cells))
            for reason in outcome.failures:
                progress.console.print(f"failed: {reason}", style="red", markup=False)
    return [outcomes[index] for index in range(len(jobs))]


def _outcomes(jobs: Sequence[_Job], workers: int) -> Iterator[tuple[int, _Outcome]]:
    if workers <= 1 or len(jobs) == 1:
        for index, job in enumerate(jobs):
            yield index, _work(job)
        return
    # Spawned: a fork would copy torch's threads in whatever state they are in.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=begin_worker, max_tasks_per_child=_JOBS_OF_WORKER
    ) as pool:
        futures: dict[Future[_Outcome], int] = {
            pool.submit(_work, job): index for index, job in enumerate(jobs)
        }
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
    """Run the cells of a job one after the other."""
    parts: list[Finding] = []
    failures: list[str] = []
    timelines: list[Timeline] = []
    runs: list[DoneRun] = []
    seconds = 0.0
    quiet = Console(quiet=True)
    kept = remember_training(folder=job.runs.parent / TRAINED) if job.remembers else nullcontext()
    with kept:
        for cell, overrides in zip(job.cells, job.overrides, strict=True):
            try:
                config = compose_config(list(overrides))
                if job.lockstep:
                    config = in_lockstep(config)
                # Another job may need the same run, and be at it: then its result is ours.
                folder = job.runs / config.run_name()
                result = run(config, folder, quiet, wait=True)
            except (GemsError, ValueError, RuntimeError) as error:
                failures.append(f"{cell.setting}, {cell.method}, seed {job.seed}: {error}")
                parts += [_part(cell, name, None, None) for name in cell.reads]
                continue
            parts += [
                _part(cell, name, MEASURES[name](result, folder), kilobytes_up(result))
                for name in cell.reads
            ]
            runs.append(DoneRun(cell, folder))
            seconds += float(result.get("seconds", 0.0))
            if cell.timeline and job.seed == 0:
                timelines.append(_timeline(cell, folder))
    return _Outcome(parts, failures, timelines, runs, seconds)


def in_lockstep(config: RunConfig) -> RunConfig:
    """Return the config with ``backend=lockstep``, where that can do more than the one it has.

    It is another run, with a name of its own: what was run one by one stays where it is.
    """
    if config.backend.kind != "inprocess" or config.stream.is_on:
        return config
    return dataclasses.replace(
        config,
        backend=dataclasses.replace(config.backend, kind="lockstep"),
        names=config.names | {"backend": "lockstep"},
    )


def _timeline(cell: Cell, folder: Path) -> Timeline:
    """Read a run's rounds, thinned to what a picture can show."""
    (whole,) = read_runs([folder]).runs
    nodes, sent, loss = whole.setting.nodes, 0, 0.0
    numbers, losses, megabytes = [], [], []
    step = max(1, len(whole.history) // _POINTS)
    for index, entry in enumerate(whole.history):
        sent += entry.bytes_up + entry.bytes_down
        loss = loss if entry.cumulative_loss is None else entry.cumulative_loss
        if index % step == 0 or entry is whole.history[-1]:
            numbers.append(entry.number)
            losses.append(round(loss / nodes, 4))
            megabytes.append(round(sent / 1e6, 4))
    return Timeline(cell.setting, cell.method, numbers, losses, megabytes, list(whole.drifts))


def _part(cell: Cell, quantity: str, value: float | None, kilobytes: float | None) -> Finding:
    return Finding(
        cell.setting,
        cell.method,
        quantity,
        [value],
        [] if kilobytes is None else [kilobytes],
        cell.x,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
        disable=not console.is_terminal,
    )


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
    here = Path(__file__).resolve().parent
    ask: Callable[[list[str]], str] = lambda words: subprocess.run(  # noqa: E731
        ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        changed = ask(["status", "--porcelain", "--", str(here.parent.parent)])
        return ask(["rev-parse", "--short", "HEAD"]) + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
