"""Kamp et al. 2018: Figures 5.1 to 5.4, 6.1, 6.2 and A.1 to A.8 without deep driving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulations.reproduce.papers import curve_figures, protocol_figures
from simulations.reproduce.papers.equal_loss import (
    AT_EQUAL_LOSS,
    BYTES,
    LOSS,
    MODELS,
    compare_with,
    compare_with_periodic,
)
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope, options

PAPER = "Dynamic averaging 2018"
READS = (LOSS, BYTES, MODELS)
# What a last synchronisation costs is not the protocol's.
OPEN_END = "strategy.final_sync=false"
TOTAL = {"condition": "total", "augmentation": "all"}
NOISES = (0.0, 1.0, 3.0, 5.0, 10.0, 20.0)
PERIODS = (1, 2, 5, 10, 25, 50)
# Rounds between two drifts; each divides all the rounds that there are.
INTERVALS = (50, 100, 200, 400)
QUIET_ROUNDS, QUICK_ROUNDS = 800, 200


def periodic(b: int, **more: object) -> tuple[str, ...]:
    """Return the overrides of periodic averaging."""
    return ("strategy=periodic", f"strategy.b={b}", OPEN_END, *options(more))


def dynamic(delta: float, **more: object) -> tuple[str, ...]:
    """Return the overrides of dynamic averaging."""
    return ("strategy=dynamic", f"strategy.delta={delta}", OPEN_END, *options(more))


def stream_cell(setting: str, method: str, overrides: tuple[str, ...], *more: str) -> Cell:
    """Return a run of a protocol on a stream, whose loss and bytes are kept round by round."""
    return Cell(
        setting, method, (*overrides, *more), READS, group=f"{setting} {method}", timeline=True
    )


def _protocols(scope: Scope) -> list[Cell]:
    setting, more = "100 learners", data_of(scope)
    cells = [stream_cell(setting, f"b = {b}", periodic(b), *more) for b in (1, 2, 4, 16, 32)]
    cells += [stream_cell(setting, f"Δ = {d:g}", dynamic(d), *more) for d in (0.1, 0.3, 0.7, 1.0)]
    cells.append(stream_cell(setting, "total, Δ = 0.3", dynamic(0.3, **TOTAL), *more))
    return [*cells, *alone(setting, *more)]


def alone(setting: str, *more: str) -> list[Cell]:
    """Return the two references without messages."""
    quiet = ("strategy=nosync", "strategy.report_every=50", OPEN_END)
    return [
        stream_cell(setting, "nosync", quiet, *more),
        stream_cell(setting, "serial", ("strategy=serial",), *more),
    ]


def data_of(scope: Scope) -> tuple[str, ...]:
    """Return the override that lets the digits stand in, if they do."""
    return ("dataset=digits",) if scope.stand_in else ()


def _fedavg(scope: Scope) -> list[Cell]:
    setting, more = "30 learners", data_of(scope)
    cells = [stream_cell(setting, "b = 5", periodic(5), *more)]
    cells += [
        stream_cell(setting, f"FedAvg, C = {c:g}", periodic(5, fraction=c), *more)
        for c in (0.3, 0.5, 0.7)
    ]
    cells += [
        stream_cell(setting, f"Δ = {d:g}", dynamic(d, check_every=5), *more)
        for d in (0.1, 0.2, 0.4, 0.6, 0.8)
    ]
    cells += [stream_cell(setting, f"b = {b}", periodic(b), *more) for b in (10, 20, 40)]
    return [replace(cell, reads=(*READS, "accuracy")) for cell in cells]


def _drift(scope: Scope) -> list[Cell]:
    setting = "100 learners"
    cells = [stream_cell(setting, f"b = {b}", periodic(b)) for b in (1, 2, 4, 16, 64)]
    cells += [stream_cell(setting, f"Δ = {d:g}", dynamic(d)) for d in (0.1, 0.3, 0.7, 1.0)]
    cells.append(stream_cell(setting, "total, Δ = 0.03", dynamic(0.03, **TOTAL)))
    return [*cells, *alone(setting)]


def _quiet(scope: Scope) -> list[Cell]:
    rounds = QUICK_ROUNDS if scope.quick else QUIET_ROUNDS
    cells = []
    for interval in scope.pick(INTERVALS, INTERVALS[:2]):
        drifts = ",".join(map(str, range(interval + 1, rounds + 1, interval)))
        more = (f"stream.drift.rounds=[{drifts}]", f"rounds={rounds}", f"evaluate_every={rounds}")
        cells += [
            replace(stream_cell(f"a drift every {interval} rounds", *each, *more), x=interval)
            for each in (
                *((f"b = {b}", periodic(b)) for b in (4, 16, 64)),
                *((f"Δ = {d:g}", dynamic(d)) for d in (0.1, 0.3)),
                *((f"total, Δ = {d:g}", dynamic(d, **TOTAL)) for d in (0.03, 0.1)),
            )
        ]
    # One seed's picture over time is enough, and is in dynamic_drift.
    return [replace(cell, timeline=False) for cell in cells]


def _scale(scope: Scope) -> list[Cell]:
    return [
        stream_cell(f"{nodes} learners", method, overrides, f"nodes={nodes}", *data_of(scope))
        for nodes in (10, 100, 200)
        for method, overrides in {
            "b = 1": periodic(1),
            "b = 2": periodic(2),
            "b = 8": periodic(8),
            "b = 32": periodic(32),
            "Δ = 0.3": dynamic(0.3),
            "Δ = 0.7": dynamic(0.7),
        }.items()
    ]


def _optimisers(scope: Scope) -> list[Cell]:
    return [
        stream_cell(
            name,
            method,
            overrides,
            f"train.optimizer={name.lower()}",
            f"train.lr={rate}",
            *data_of(scope),
        )
        for name, rate in (("SGD", 0.1), ("Adam", 0.001), ("RMSprop", 0.001))
        for method, overrides in {
            "b = 1": periodic(1),
            "b = 10": periodic(10),
            "b = 40": periodic(40),
            "Δ = 0.3": dynamic(0.3),
            "Δ = 0.7": dynamic(0.7),
        }.items()
    ]


def _initialisation(scope: Scope) -> list[Cell]:
    protocols: dict[str, Callable[[int], tuple[str, ...]]] = {
        "periodic": lambda b: ("strategy=periodic", f"strategy.b={b}"),
        "dynamic, Δ = 0.7": lambda b: ("strategy=dynamic", f"strategy.check_every={b}"),
    }
    return [
        Cell(
            f"ε = {noise:g}, b = {b}",
            method,
            (*overrides(b), f"stream.initial_noise={noise}", *data_of(scope)),
            x=float(b),
            group=f"{method} {noise}",
        )
        for method, overrides in protocols.items()
        for noise in scope.pick(NOISES, (0.0, 3.0, 20.0))
        for b in scope.pick(PERIODS, (1, 10, 50))
    ]


def _compare_stationary(found: Findings) -> None:
    """Add what stands behind the paper's sentence: Δ and b = 2 beside b = 1."""
    compare_with_periodic(found)
    compare_with(found, "100 learners", "b = 1", ("b = 2", "Δ = 0.1", "Δ = 0.3", "Δ = 0.7"))


def _compare_with_fedavg(found: Findings) -> None:
    """Add loss, bytes and accuracy of the paper's favourites beside FedAvg with C = 0.3."""
    compare_with_periodic(found)
    favourites = ("Δ = 0.4", "Δ = 0.6", "Δ = 0.8")
    compare_with(found, "30 learners", "FedAvg, C = 0.3", favourites, "FedAvg")
    theirs = found.get("30 learners", "FedAvg, C = 0.3", "accuracy")
    for method in favourites:
        ours = found.get("30 learners", method, "accuracy")
        if ours and theirs:
            pairs = zip(ours.by_seed, theirs.by_seed, strict=True)
            gaps = [None if a is None or b is None else a - b for a, b in pairs]
            found.add(Finding("30 learners", method, "accuracy less FedAvg's", gaps))


def _compare_under_drift(found: Findings) -> None:
    """Add the best ratio of the paper's condition, and the comparison that the paper makes.

    Its "up to" is about protocols of a similar loss, and its periods end at 4.
    """
    compare_with_periodic(found)
    for title, wanted in (("dynamic", "Δ"), ("dynamic, total", "total")):
        shares = [f.by_seed for f in found.of(AT_EQUAL_LOSS) if f.method.startswith(wanted)]
        known = [[v for v in seed if v is not None] for seed in zip(*shares, strict=True)]
        if any(known):
            least = [min(seed) if seed else None for seed in known]
            name = "least bytes beside periodic at equal loss"
            found.add(Finding("100 learners", title, name, least))
    others = ("b = 16", "b = 64", "Δ = 0.1", "Δ = 0.3", "Δ = 0.7", "Δ = 1")
    compare_with(found, "100 learners", "b = 4", others)


_SMALL_NET = "A net of 784-64-10 instead of the CNN of 1.2 million weights, and η = 0.1."

REPRODUCTIONS = (
    Reproduction(
        name="dynamic_protocols",
        paper=PAPER,
        where="Figures 5.1 and A.1",
        about="Loss against communication on stationary data, 100 learners.",
        cells=_protocols,
        draw=protocol_figures.frontier_and_timeline,
        seeds=3,
        minutes=25,
        quick=("rounds=100", "evaluate_every=100"),
        derive=_compare_stationary,
        scaled=_SMALL_NET,
        quick_minutes=1.1,
    ),
    Reproduction(
        name="dynamic_fedavg",
        paper=PAPER,
        where="Figures 5.2, 5.3, A.2 and A.3",
        about="Dynamic averaging beside FedAvg, 30 learners, b = 5.",
        cells=_fedavg,
        draw=protocol_figures.frontier_and_timeline,
        seeds=3,
        minutes=10,
        quick=("rounds=200", "evaluate_every=200"),
        derive=_compare_with_fedavg,
        scaled=_SMALL_NET,
        quick_minutes=0.7,
    ),
    Reproduction(
        name="dynamic_drift",
        paper=PAPER,
        where="Figures 5.4 and A.4",
        about="Concepts that change: random graphical models, 100 learners.",
        cells=_drift,
        draw=protocol_figures.frontier_and_timeline,
        seeds=3,
        minutes=20,
        # Still with one drift, so that something is seen.
        quick=("rounds=200", "evaluate_every=200", "stream.drift.rounds=[101]"),
        derive=_compare_under_drift,
        scaled="1,200 rounds with drifts twice as often as in the paper, so that some are seen.",
        quick_minutes=2.1,
    ),
    Reproduction(
        name="dynamic_quiet",
        paper=PAPER,
        where="Section 5, drift",
        about="How long must quiet times be? Bytes at equal loss against rounds between drifts.",
        cells=_quiet,
        draw=protocol_figures.shares_by_interval,
        seeds=3,
        minutes=20,
        quick=(),
        derive=compare_with_periodic,
        scaled="Our own question about the paper's claim: 30 learners, drifts at even intervals.",
    ),
    Reproduction(
        name="dynamic_scale",
        paper=PAPER,
        where="Figures 6.1 and A.7",
        about="10, 100 and 200 learners with the same number of examples each.",
        cells=_scale,
        draw=protocol_figures.frontier_panels,
        seeds=1,
        minutes=60,
        quick=("rounds=60", "evaluate_every=60"),
        derive=compare_with_periodic,
        scaled=_SMALL_NET,
        quick_minutes=1.5,
    ),
    Reproduction(
        name="dynamic_optimisers",
        paper=PAPER,
        where="Figure A.6",
        about="The learning algorithm as a black box: SGD, Adam, RMSprop; 10 learners.",
        cells=_optimisers,
        draw=protocol_figures.frontier_panels,
        seeds=3,
        minutes=10,
        quick=("rounds=200", "evaluate_every=200"),
        derive=compare_with_periodic,
        scaled=_SMALL_NET,
        quick_minutes=0.8,
    ),
    Reproduction(
        name="dynamic_initialisation",
        paper=PAPER,
        where="Figures 6.2 and A.8",
        about="Noise of scale ε on every learner's initial weights, against the period b.",
        cells=_initialisation,
        draw=curve_figures.initialisation_curves,
        seeds=3,
        minutes=6,
        quick=(),
        scaled=_SMALL_NET,
        quick_minutes=0.3,
    ),
)
