"""Kamp et al. 2018, Section 5, as one grid: every protocol in many settings, on four streams.

The figures of `dynamic2018` show the protocols of the paper; the grid has both conditions and both
ways of balancing, and how much more is sent after a drift. docs/dynamic-averaging.md discusses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulations.reproduce.papers import protocol_figures
from simulations.reproduce.papers.dynamic2018 import (
    PAPER,
    READS,
    TOTAL,
    alone,
    data_of,
    dynamic,
    periodic,
    stream_cell,
)
from simulations.reproduce.papers.equal_loss import compare_with_periodic
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope

BURST = "burst after drift"
PERIODS = (1, 2, 4, 8, 16, 32, 64)
THRESHOLDS = (0.1, 0.3, 0.7, 1.5, 3.0)
FRACTIONS = (0.3, 0.5, 0.7)
# Title, config in conf/experiment, and whether concepts change.
STREAMS = (
    ("MNIST, 100 learners", "mnist_100", False),
    ("graphical models, drifts", "graphical_drift", True),
    ("MNIST, permuted labels", "mnist_drift", True),
    ("CNN, 10 learners", "mnist_cnn", False),
)


def protocols(scope: Scope) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield name and overrides of every protocol that sends something."""
    for b in scope.pick(PERIODS, PERIODS[::3]):
        yield f"b = {b}", periodic(b)
    for delta in scope.pick(THRESHOLDS, THRESHOLDS[::3]):
        yield f"Δ = {delta:g}", dynamic(delta)
        yield f"total, Δ = {delta:g}", dynamic(delta, **TOTAL)
        if not scope.quick:
            yield f"all, Δ = {delta:g}", dynamic(delta, augmentation="all")
    for fraction in scope.pick(FRACTIONS, FRACTIONS[:1]):
        yield f"FedAvg, C = {fraction:g}", periodic(5, fraction=fraction)


def _grid(scope: Scope) -> list[Cell]:
    cells = []
    # A run of the large network takes as long as three others, however few its rounds.
    for title, experiment, drifts in scope.pick(STREAMS, STREAMS[:-1]):
        more = [f"experiment={experiment}"]
        more += data_of(scope) if experiment != "graphical_drift" else ()
        if scope.quick and drifts:
            # Still with one drift, so that something is seen.
            more.append("stream.drift.rounds=[51]")
        own = [stream_cell(title, method, words, *more) for method, words in protocols(scope)]
        own += alone(title, *more)
        cells += [replace(cell, reads=(*READS, BURST)) if drifts else cell for cell in own]
    return cells


REPRODUCTIONS = (
    Reproduction(
        name="dynamic_frontiers",
        paper=PAPER,
        where="Section 5",
        about="What a byte buys: a grid of protocols on four streams, bytes at equal loss.",
        cells=_grid,
        draw=protocol_figures.frontier_panels,
        seeds=1,
        minutes=200,
        quick=("rounds=120", "evaluate_every=120"),
        derive=compare_with_periodic,
        scaled="Our own grid of settings; the paper's figures have experiments of their own.",
        quick_minutes=3.7,
    ),
)
