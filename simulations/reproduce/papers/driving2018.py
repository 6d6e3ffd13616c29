"""Kamp et al. 2018, Section 5 and A.4: deep driving, Figures 5.5 and A.5, Table 7.

What counts is no loss on data but how the resulting models drive, on tracks that nobody trained on;
see `driven_runs` for which model that is. Periodic and dynamic protocols end in a synchronisation,
whose bytes are counted. The final averages are driven as they are.

On our roads models that are trained this long all have an L_dd of 0 (seed 0), which tells none of
them from another by how they drive; by what they have sent it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulations.reproduce.papers import driving_figures
from simulations.reproduce.papers.driven_runs import (
    CROSSINGS,
    L_DD,
    LAPS,
    ON_LINE,
    TIME_LOST,
    Roads,
    drive_runs,
)
from simulations.reproduce.papers.dynamic2018 import PAPER
from simulations.reproduce.papers.equal_loss import BYTES, LOSS, MODELS
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.spec import Cell, DoneRun, Reproduction, Scope

SETTING = "10 learners"
PERIODS = (1, 2, 4, 8)
THRESHOLDS = (0.01, 0.05, 0.1, 0.3)
BEATEN = "share that a dynamic protocol outperforms"
BESIDE_SERIAL = "L_dd beside serial"
FULL, QUICK = Roads(tracks=3, laps=2), Roads(tracks=1, laps=1)


def _cells(scope: Scope) -> list[Cell]:
    protocols = {f"b = {b}": ("strategy=periodic", f"strategy.b={b}") for b in PERIODS}
    protocols |= {f"Δ = {d:g}": ("strategy=dynamic", f"strategy.delta={d}") for d in THRESHOLDS}
    protocols |= {
        "nosync": ("strategy=nosync", "strategy.report_every=50"),
        # It has no nodes that could work side by side.
        "serial": ("strategy=serial", "backend=inprocess"),
    }
    return [
        Cell(
            SETTING, method, words, ("rmse", LOSS, BYTES, MODELS), group=f"driving {method}",
            timeline=True,
        )
        for method, words in protocols.items()
    ]  # fmt: skip


def _judge(runs: Sequence[DoneRun], scope: Scope, jobs: int) -> list[Finding]:
    """Let the models of one seed drive."""
    named = [(run.cell.method, run.folder) for run in runs]
    driven = drive_runs(named, QUICK if scope.quick else FULL, jobs)
    return [
        Finding(SETTING, method, quantity, [value[quantity]])
        for quantity in (L_DD, TIME_LOST, CROSSINGS, ON_LINE, LAPS)
        for method, value in driven.items()
    ]


def compare_drivers(found: Findings) -> None:
    """Add what the paper claims of its picture, so that it can be counted."""
    drives = {each.method: each for each in found.of(L_DD) if each.values}
    sent = {each.method: each for each in found.of(BYTES) if each.values}
    dynamic = [method for method in drives if method.startswith("Δ")]
    periodic = [method for method in drives if method.startswith("b =")]
    # A dynamic protocol outperforms a periodic one if it drives better and sends less.
    beaten = [
        any(
            drives[ours].mean < drives[theirs].mean and sent[ours].mean < sent[theirs].mean
            for ours in dynamic
        )
        for theirs in periodic
    ]
    # Where all drive alike there is nothing to outperform, and a share of 0 would say otherwise.
    if beaten and len({round(drives[method].mean, 6) for method in (*periodic, *dynamic)}) > 1:
        found.add(Finding(SETTING, "periodic", BEATEN, [sum(beaten) / len(beaten)]))
    if serial := drives.get("serial"):
        for method in (*periodic, *dynamic, "nosync"):
            if method in drives:
                pairs = zip(drives[method].by_seed, serial.by_seed, strict=True)
                gaps = [None if a is None or b is None else a - b for a, b in pairs]
                found.add(Finding(SETTING, method, BESIDE_SERIAL, gaps))


REPRODUCTIONS = (
    Reproduction(
        name="dynamic_driving",
        paper=PAPER,
        where="Figures 5.5 and A.5",
        about="Learning to drive in a fleet of 10: how models drive, against what they have sent.",
        cells=_cells,
        draw=driving_figures.driving_and_bytes,
        seeds=1,
        minutes=60,
        quick=("rounds=60", "evaluate_every=60", "model=pilotnet_small"),
        derive=compare_drivers,
        judge=_judge,
        has_stand_in=False,
        scaled="Another simulator (a top view of 64×64 grey pixels), a controller instead of a "
        "human driver, 500 batches of each learner instead of 2,500, and a rate of 0.05, the best "
        "of four by held-out error on one other seed; models drive two laps of each of three "
        "tracks that nobody trained on.",
    ),
)
