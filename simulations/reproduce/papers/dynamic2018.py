"""Kamp et al. 2018: Figures 5.1 to 5.4, 6.1, 6.2 and A.1 to A.8 without deep driving.

Single runs say little, since a protocol that sends less loses more. Frontiers are compared: how
many bytes periodic averaging would need for the same loss, read off between its own runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from simulations.reproduce.findings import Finding, Findings
from simulations.reproduce.measures import BYTES, LOSS, MODELS
from simulations.reproduce.pictures import draw_curves, draw_frontier
from simulations.reproduce.study import Cell, Scope, Study

PAPER = "Dynamic averaging 2018"
AT_EQUAL_LOSS = "bytes beside periodic at equal loss"
READS = (LOSS, BYTES, MODELS)
# What a last synchronisation costs is not the protocol's.
OPEN_END = "strategy.final_sync=false"
NOISES = (0.0, 1.0, 3.0, 5.0, 10.0, 20.0)
PERIODS = (1, 2, 5, 10, 25, 50)
ALONE = ("nosync", "serial")


def protocol(method: str) -> tuple[str, ...]:
    """Return a protocol's overrides by its name, such as ``total, Δ = 0.3``."""
    kind, _, value = method.rpartition(" = ")
    periodic, dynamic = ("strategy=periodic", OPEN_END), ("strategy=dynamic", OPEN_END)
    known = {
        "b": (*periodic, f"strategy.b={value}"),
        "FedAvg, C": (*periodic, "strategy.b=5", f"strategy.fraction={value}"),
        "Δ": (*dynamic, f"strategy.delta={value}"),
        "total, Δ": (
            *(*dynamic, f"strategy.delta={value}"),
            *("strategy.condition=total", "strategy.augmentation=all"),
        ),
    }
    alone = {
        "nosync": ("strategy=nosync", "strategy.report_every=50", OPEN_END),
        "serial": ("strategy=serial",),
    }
    return known[kind] if kind else alone[method]


def named(kind: str, *values: float) -> list[str]:
    """Return names of protocols: ``b = 1``, ``b = 2`` …"""
    return [f"{kind} = {value:g}" for value in values]


def stream_cells(setting: str, methods: Sequence[str], *more: str) -> list[Cell]:
    """Return runs of protocols on a stream."""
    return [Cell(setting, method, (*protocol(method), *more), READS) for method in methods]


def _protocols(scope: Scope) -> list[Cell]:
    methods = [*named("b", 1, 2, 4, 16, 32), *named("Δ", 0.1, 0.3, 0.7, 1.0), "total, Δ = 0.3"]
    return stream_cells("100 learners", [*methods, *ALONE], *scope.data("mnist"))


def _fedavg(scope: Scope) -> list[Cell]:
    setting, data = "30 learners", scope.data("mnist")
    cells = stream_cells(setting, ["b = 5", *named("FedAvg, C", 0.3, 0.5, 0.7)], *data)
    deltas = named("Δ", 0.1, 0.2, 0.4, 0.6, 0.8)
    cells += stream_cells(setting, deltas, "strategy.check_every=5", *data)
    cells += stream_cells(setting, named("b", 10, 20, 40), *data)
    return [replace(cell, reads=(*READS, "accuracy")) for cell in cells]


def _drift(scope: Scope) -> list[Cell]:
    methods = [*named("b", 1, 2, 4, 16, 64), *named("Δ", 0.1, 0.3, 0.7, 1.0), "total, Δ = 0.03"]
    return stream_cells("100 learners", [*methods, *ALONE])


def _scale(scope: Scope) -> list[Cell]:
    methods, data = [*named("b", 1, 2, 8, 32), *named("Δ", 0.3, 0.7)], scope.data("mnist")
    return [
        cell
        for nodes in (10, 100, 200)
        for cell in stream_cells(f"{nodes} learners", methods, f"nodes={nodes}", *data)
    ]


def _optimisers(scope: Scope) -> list[Cell]:
    methods, data = [*named("b", 1, 10, 40), *named("Δ", 0.3, 0.7)], scope.data("mnist")
    cells = []
    for name, rate in {"SGD": 0.1, "Adam": 0.001, "RMSprop": 0.001}.items():
        words = (f"train.optimizer={name.lower()}", f"train.lr={rate}")
        cells += stream_cells(name, methods, *words, *data)
    return cells


def _initialisation(scope: Scope) -> list[Cell]:
    protocols: dict[str, Callable[[int], tuple[str, ...]]] = {
        "periodic": lambda b: ("strategy=periodic", f"strategy.b={b}"),
        "dynamic, Δ = 0.7": lambda b: ("strategy=dynamic", f"strategy.check_every={b}"),
    }
    return [
        Cell(
            f"ε = {noise:g}, b = {b}",
            method,
            (*overrides(b), f"stream.initial_noise={noise}", *scope.data("mnist")),
            x=float(b),
        )
        for method, overrides in protocols.items()
        for noise in scope.pick(NOISES, (0.0, 3.0, 20.0))
        for b in scope.pick(PERIODS, (1, 10, 50))
    ]


# --- bytes at equal loss ----------------------------------------------------------------------


def equal_loss_bytes(periodic: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the bytes that periodic averaging would need for a loss; None beyond its runs.

    Between two of its runs, given as pairs of loss and bytes, the logarithm of the bytes is taken
    to be linear in the loss.
    """
    points = sorted((at, np.log(sent)) for at, sent in periodic)
    if len(points) < 2 or not points[0][0] <= loss <= points[-1][0]:
        return None
    losses, logs = zip(*points, strict=True)
    return float(np.exp(np.interp(loss, losses, logs)))


def compare_with_periodic(found: Findings) -> None:
    """Add the bytes beside those that periodic averaging needs for the same loss, seed by seed."""
    for setting in found.settings():
        runs = {}
        for loss in found.of(LOSS):
            sent = found.get(setting, loss.method, BYTES)
            if loss.setting == setting and sent is not None:
                runs[loss.method] = loss.pairs(sent)
        for method, own in runs.items():
            if "Δ" not in method and "C =" not in method:
                continue
            shares: list[float | None] = []
            for seed, run in enumerate(own):
                those = [each[seed] for name, each in runs.items() if name.startswith("b = ")]
                same = equal_loss_bytes([p for p in those if p], run[0]) if run else None
                shares.append(run[1] / same if run and same else None)
            if any(share is not None for share in shares):
                found.findings.append(Finding(setting, method, AT_EQUAL_LOSS, shares))


def compare_with(
    found: Findings, setting: str, theirs: str, ours: Sequence[str], name: str = ""
) -> None:
    """Add bytes and loss of protocols beside those of one other, seed by seed."""
    for quantity, title in ((BYTES, "bytes beside"), (LOSS, "loss beside")):
        reference = found.get(setting, theirs, quantity)
        for method in ours:
            new = (setting, method, f"{title} {name or theirs}")
            found.ratio(new, found.get(setting, method, quantity), reference)


def _compare_stationary(found: Findings) -> None:
    """Add what stands behind the paper's sentence: Δ and b = 2 beside b = 1."""
    compare_with_periodic(found)
    compare_with(found, "100 learners", "b = 1", ("b = 2", "Δ = 0.1", "Δ = 0.3", "Δ = 0.7"))


def _compare_with_fedavg(found: Findings) -> None:
    """Add loss, bytes and accuracy of the paper's favourites beside FedAvg with C = 0.3."""
    compare_with_periodic(found)
    setting, favourites = "30 learners", ("Δ = 0.4", "Δ = 0.6", "Δ = 0.8")
    compare_with(found, setting, "FedAvg, C = 0.3", favourites, "FedAvg")
    theirs = found.get(setting, "FedAvg, C = 0.3", "accuracy")
    for method in favourites:
        ours = found.get(setting, method, "accuracy")
        if ours and theirs:
            gaps = [None if p is None else p[0] - p[1] for p in ours.pairs(theirs)]
            found.findings.append(Finding(setting, method, "accuracy less FedAvg's", gaps))


def _compare_under_drift(found: Findings) -> None:
    """Add the best ratio of the paper's condition, and the comparison that the paper makes.

    Its "up to" is about protocols of a similar loss, and its periods end at 4.
    """
    compare_with_periodic(found)
    for title, wanted in (("dynamic", "Δ"), ("dynamic, total", "total")):
        shares = [f.by_seed for f in found.of(AT_EQUAL_LOSS) if f.method.startswith(wanted)]
        known = [[v for v in seed if v is not None] for seed in zip(*shares, strict=True)]
        least = [min(seed) if seed else None for seed in known]
        name = "least bytes beside periodic at equal loss"
        found.findings.append(Finding("100 learners", title, name, least))
    others = ("b = 16", "b = 64", "Δ = 0.1", "Δ = 0.3", "Δ = 0.7", "Δ = 1")
    compare_with(found, "100 learners", "b = 4", others)


_SMALL_NET = "A net of 784-64-10 instead of the CNN of 1.2 million weights, and η = 0.1."
# What the experiments share.
_STUDY = Study(
    name="",
    paper=PAPER,
    where="",
    about="",
    experiment="kamp2018",
    draw=draw_frontier,
    seeds=3,
    minutes=0,
    derive=compare_with_periodic,
    differs=_SMALL_NET,
)

STUDIES = (
    replace(
        _STUDY,
        name="dynamic_protocols",
        where="Figures 5.1 and A.1",
        about="Loss against communication on stationary data, 100 learners.",
        cells=_protocols,
        minutes=40,
        quick=("rounds=100",),
        derive=_compare_stationary,
    ),
    replace(
        _STUDY,
        name="dynamic_fedavg",
        base=("nodes=30", "rounds=800"),
        where="Figures 5.2, 5.3, A.2 and A.3",
        about="Dynamic averaging beside FedAvg, 30 learners, b = 5.",
        cells=_fedavg,
        minutes=30,
        quick=("rounds=200",),
        derive=_compare_with_fedavg,
    ),
    replace(
        _STUDY,
        name="dynamic_drift",
        experiment="kamp2018_drift",
        where="Figures 5.4 and A.4",
        about="Concepts that change: random graphical models, 100 learners.",
        cells=_drift,
        minutes=145,
        # Still with one drift, so that something is seen.
        quick=("rounds=200", "stream.drift.rounds=[101]"),
        derive=_compare_under_drift,
        differs="1,200 rounds with drifts twice as often as in the paper, so that some are seen.",
    ),
    replace(
        _STUDY,
        name="dynamic_scale",
        where="Figures 6.1 and A.7",
        about="10, 100 and 200 learners with the same number of examples each.",
        cells=_scale,
        seeds=1,
        minutes=54,
        quick=("rounds=60",),
    ),
    replace(
        _STUDY,
        name="dynamic_optimisers",
        base=("nodes=10", "rounds=1080"),
        where="Figure A.6",
        about="The learning algorithm as a black box: SGD, Adam, RMSprop; 10 learners.",
        cells=_optimisers,
        minutes=45,
        quick=("rounds=200",),
    ),
    replace(
        _STUDY,
        name="dynamic_initialisation",
        base=("nodes=10", "rounds=50"),
        where="Figures 6.2 and A.8",
        about="Noise of scale ε on every learner's initial weights, against the period b.",
        cells=_initialisation,
        draw=partial(draw_curves, quantity="accuracy", log=True),
        minutes=20,
        derive=None,
    ),
)
