"""Kamp et al. 2018, Section 5 and A.4: deep driving, Figures 5.5 and A.5, Table 7.

What counts is no loss on data but how the resulting models drive, on tracks that no model was
trained on. A.4: "All the resulting models as well as baseline models were loaded to the simulator
and driven with a constant speed." The longest time and the highest frequency of crossings are those
of all models of one seed, so all of its runs are looked at together.

Periodic and dynamic protocols end in a synchronisation, whose bytes are counted, and the final
average drives. A run that keeps a model on every node (nosync) has no average, and no reason to
take one of them: its first three learners drive, and the run has the mean of their losses.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from simulations.reproduce.findings import Finding, Findings
from simulations.reproduce.measures import BYTES, LOSS, MODELS
from simulations.reproduce.papers.dynamic2018 import PAPER
from simulations.reproduce.pictures import draw_frontier
from simulations.reproduce.study import Cell, DoneRun, Scope, Study

SETTING = "10 learners"
PERIODS = (1, 2, 4, 8)
THRESHOLDS = (0.01, 0.05, 0.1, 0.3)
LEARNERS = 3
L_DD, TIME_LOST, CROSSINGS, ON_LINE = "L_dd", "time lost", "crossings", "time on the line"
LAPS = "laps"
BEATEN = "share that a dynamic protocol outperforms"


def _cells(scope: Scope) -> list[Cell]:
    protocols = {f"b = {b}": ("strategy=periodic", f"strategy.b={b}") for b in PERIODS}
    protocols |= {f"Δ = {d:g}": ("strategy=dynamic", f"strategy.delta={d}") for d in THRESHOLDS}
    protocols |= {
        "nosync": ("strategy=nosync", "strategy.report_every=50"),
        # It has no nodes that could work side by side.
        "serial": ("strategy=serial", "backend=inprocess"),
    }
    reads = ("rmse", LOSS, BYTES, MODELS)
    return [Cell(SETTING, method, words, reads) for method, words in protocols.items()]


def drive_run(folder: Path, tracks: int, laps: int) -> dict[str, list[dict[str, Any]]]:
    """Return what a run's models did on tracks that no model was trained on, by learner.

    Driving takes longer than training, so it is kept beside the run, in a file that goes by the
    model's own bytes.
    """
    import torch

    from gems_flwr.core.disk import write_atomically
    from simulations.driving.drive import drive_track
    from simulations.driving.models import MODEL_FILE, load_models, steering
    from simulations.driving.recording import unseen_track_seed

    digest = hashlib.blake2b((folder / MODEL_FILE).read_bytes(), digest_size=8).hexdigest()
    file = folder / f"drives-{digest}-{tracks}-{laps}.json"
    if file.is_file():
        return json.loads(file.read_text())  # type: ignore[no-any-return]
    torch.set_num_threads(1)
    driven: dict[str, list[dict[str, Any]]] = {}
    for learner, model in list(load_models(folder).items())[:LEARNERS]:
        steer = steering(model)
        journeys = [
            drive_track(lambda moment: steer(moment.image), unseen_track_seed(0, track), laps=laps)  # noqa: B023
            for track in range(tracks)
        ]
        driven[learner] = [{"laps": each.laps, "drive": asdict(each.drive())} for each in journeys]
    write_atomically(file, json.dumps(driven, indent=1).encode())
    return driven


def judge(runs: Sequence[DoneRun], scope: Scope) -> list[Finding]:
    """Let the models of one seed drive; return `L_DD`, its parts and `LAPS`."""
    from simulations.driving.loss import Drive, driving_losses
    from simulations.driving.simulator import require_simulator
    from simulations.reproduce.runner import begin_worker

    require_simulator()
    roads = (1, 1) if scope.quick else (3, 2)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(scope.jobs, mp_context=context, initializer=begin_worker) as pool:
        futures = {run.cell.method: pool.submit(drive_run, run.folder, *roads) for run in runs}
        driven = {method: future.result() for method, future in futures.items()}
    losses = driving_losses(
        {
            f"{method}\t{learner}": [Drive(**record["drive"]) for record in records]
            for method, learners in driven.items()
            for learner, records in learners.items()
        }
    )
    found = []
    for method, learners in driven.items():
        own = [losses[f"{method}\t{learner}"] for learner in learners]
        values = {
            L_DD: fmean(loss.total for loss in own),
            TIME_LOST: fmean(loss.time_lost for loss in own),
            CROSSINGS: fmean(loss.crossings for loss in own),
            ON_LINE: fmean(loss.on_line for loss in own),
            LAPS: fmean(sum(r["laps"] for r in records) for records in learners.values()),
        }
        found += [Finding(SETTING, method, name, [value]) for name, value in values.items()]
    return found


def compare_drivers(found: Findings) -> None:
    """Add the share of periodic protocols that a dynamic one outperforms, as the paper claims."""
    drives = {each.method: each.mean for each in found.of(L_DD) if each.values}
    sent = {each.method: each.mean for each in found.of(BYTES) if each.values}
    dynamic = [method for method in drives if method.startswith("Δ")]
    periodic = [method for method in drives if method.startswith("b =")]
    # It outperforms a periodic one if it drives better and sends less.
    beaten = [
        any(drives[ours] < drives[theirs] and sent[ours] < sent[theirs] for ours in dynamic)
        for theirs in periodic
    ]
    # Where all drive alike there is nothing to outperform, and a share of 0 would be wrong.
    if beaten and len({round(drives[method], 6) for method in (*periodic, *dynamic)}) > 1:
        share = sum(beaten) / len(beaten)
        found.findings.append(Finding(SETTING, "periodic", BEATEN, [share]))


STUDIES = (
    Study(
        name="dynamic_driving",
        paper=PAPER,
        experiment="kamp2018_driving",
        where="Figures 5.5 and A.5",
        about="Learning to drive in a fleet of 10: how models drive, against what they have sent.",
        cells=_cells,
        draw=draw_frontier,
        seeds=1,
        minutes=62,
        quick=("rounds=60", "model=pilotnet_small"),
        derive=compare_drivers,
        judge=judge,
        has_stand_in=False,
        differs="Another simulator (a top view of 64×64 grey pixels), a controller instead of a "
        "human driver, 500 batches of each learner instead of 2,500, and a rate of 0.05, the best "
        "of four by held-out error on one other seed; models drive two laps of each of three "
        "tracks that no model was trained on.",
    ),
)
