"""What does a byte buy? Accuracy against bytes of a node, all methods on one split.

MNIST by label over five nodes, FedAvg's family for 200 rounds. Its options are chosen before
anything is compared, with equal care and without a look at the test data: first the nodes' options
with plain FedAvg (learning rate, batch size and local epochs, all combinations; on a lift the rate
alone), then each method's own options together with the rate, around what FedAvg chose. Every
candidate plays a tenth of the rounds and is judged by the accuracy on the nodes' validation parts,
with a seed that no result is made with.

At equal accuracy a method's *factor* is the bytes of the cheapest of FedAvg's family and of the
models merged once, divided by its own; none where no rival is ever as accurate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hydra.errors import HydraException
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike
from rich.console import Console

from simulations.report import read_runs
from simulations.report.plotting import (
    COLOURS,
    DARK,
    SOFT,
    Mark,
    Style,
    draw_marks,
    label_decades,
    legend_below,
    new_figure,
    write_heading,
)
from simulations.report.runs import Run
from simulations.report.summary import tick_bytes
from simulations.reproduce.findings import Finding, Findings
from simulations.reproduce.study import OURS, Study

SETTING = ("dataset=mnist", "partition=labels", "nodes=5")
ROUNDS, TUNING_SEED = 200, 100
FLOWER, PEERS, HEADS = "FedAvg and its family", "models merged once", "heads from moments"
CONES, REFINED, LIFTED = "cones", "refined cones", "cones on a seeded lift"
LAYERS, POOLED = "layer by layer", "all raw data"
# What ours are compared with by factors: many rounds, tuned.
RIVALS = (FLOWER, PEERS)
FAMILIES = (CONES, REFINED, LIFTED, LAYERS, HEADS, PEERS, FLOWER)
FACTOR = "factor of bytes at equal accuracy"

_SCAFFOLD = (
    "strategy=multi_model",
    "strategy.sampling=scaffold",
    "multi_model.tasks=[{dataset: null, model: null, share: 1.0}]",
    "multi_model.capacities=[1.0]",
    "strategy.budget=${nodes}",
)
_GEMS, _RANK_20 = ("strategy=gems",), ("strategy=gems", "strategy.space.rank=20")
_FILTERS, _FOURIER = ("model=random_filters",), ("model=random_fourier",)
_REFINED = ("strategy.refine=5",)
Words = tuple[str, ...]
METHODS: dict[tuple[str, str], Words] = {
    (FLOWER, "FedAvg"): ("strategy=fedavg",),
    (FLOWER, "FedAvgM"): ("strategy=fedavgm",),
    (FLOWER, "FedAdam"): ("strategy=fedadam",),
    (FLOWER, "FedProx"): ("strategy=fedprox",),
    (FLOWER, "SCAFFOLD"): _SCAFFOLD,
    (FLOWER, "FedAvg, filters"): ("strategy=fedavg", *_FILTERS),
    (PEERS, "average"): ("strategy=one_shot_average",),
    (PEERS, "Fisher"): ("strategy=merge", "strategy.method=fisher"),
    (PEERS, "RegMean"): ("strategy=merge", "strategy.method=regmean"),
    (HEADS, "ridge"): (*_RANK_20, "strategy.head.name=ridge"),
    (HEADS, "LDA"): (*_RANK_20, "strategy.head.name=lda"),
    (HEADS, "nearest mean"): (*_RANK_20, "strategy.head.name=nearest_mean"),
    (CONES, "rank 20"): _RANK_20,
    (CONES, "rank by samples"): _GEMS,
    (CONES, "full moments"): (*_GEMS, "strategy.space.rank=full"),
    (CONES, "rank 20, 8 clusters"): (*_RANK_20, "strategy.space.clusters=8"),
    (REFINED, "rank 20, 5 rounds more"): (*_RANK_20, *_REFINED),
    (LIFTED, "filters"): (*_RANK_20, *_FILTERS),
    (LIFTED, "filters, refined"): (*_RANK_20, *_FILTERS, *_REFINED),
    (LIFTED, "Fourier"): (*_RANK_20, *_FOURIER),
    (LIFTED, "Fourier, refined"): (*_RANK_20, *_FOURIER, *_REFINED),
    (LAYERS, "two layers"): ("strategy=gems_layerwise", "model=mlp"),
    # Level lines: solved to the end.
    (POOLED, "pooled optimum"): ("strategy=global",),
    (POOLED, "pooled optimum, filters"): ("strategy=global", *_FILTERS),
}

# --- rates for FedAvg's family ------------------------------------------------------------------

RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
# Batch size and epochs of a node in a round: from few long steps to many short ones.
LOCAL = ((4096, 1), (512, 1), (64, 1), (64, 5))
GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "FedAvgM": {
        "strategy.inner.server_momentum": (0.5, 0.9),
        "strategy.inner.server_learning_rate": (0.3, 1.0),
    },
    "FedAdam": {"strategy.inner.eta": (0.01, 0.03, 0.1, 0.3)},
    "FedProx": {"strategy.inner.proximal_mu": (0.01, 0.1, 1.0)},
}


class Tuning:
    """Chooses options of FedAvg's family on validation data; a candidate is run once.

    `common` are overrides of all runs, `rounds` what a candidate plays; `folder` keeps their runs.
    """

    def __init__(self, common: Sequence[str], rounds: int, folder: Path) -> None:
        own = (f"seed={TUNING_SEED}", f"rounds={rounds}", f"evaluate_every={10**6}")
        self._common = (*common, *own, "evaluate_on=validation")
        self._folder, self._scores = folder, dict[Words, float]()

    def options_for(self, name: str, words: Words) -> Words:
        """Return the best options of a method."""
        # What is trained decides the nodes' rate, so each model has its own.
        model = tuple(each for each in words if each.startswith("model="))
        local = self._local(model)
        if words[0] == "strategy=fedavg":
            return local
        grid = GRIDS.get(name, {})
        rate = RATES.index(float(local[0].partition("=")[2]))
        candidates = [
            (f"train.lr={near:g}", *local[1:], *own)
            for values in itertools.product(*grid.values())
            for own in [tuple(f"{key}={v:g}" for key, v in zip(grid, values, strict=True))]
            for near in RATES[max(0, rate - 1) : rate + 2]
        ]
        return self._best(words, candidates)

    def _local(self, model: Words) -> Words:
        """Return rate, batch size and epochs for FedAvg; on a model of its own the rate alone."""
        ways = [(f"train.batch_size={size}", f"train.epochs={epochs}") for size, epochs in LOCAL]
        ways = [self._local(())[1:]] if model else ways  # type: ignore[list-item]
        candidates = [(f"train.lr={rate:g}", *way) for rate in RATES for way in ways]
        return self._best(("strategy=fedavg", *model), candidates)

    def _best(self, words: Words, candidates: Iterable[Words]) -> Words:
        return max(candidates, key=lambda options: self._score((*words, *options)))

    def _score(self, words: Words) -> float:
        """Return what a candidate reaches; 0 for one whose models ran away and were refused."""
        from gems_flwr.errors import RoundFailedError

        if words not in self._scores:
            try:
                score = run_one((*words, *self._common), self._folder).accuracy
                self._scores[words] = score or 0.0
            except RoundFailedError:
                self._scores[words] = 0.0
        return self._scores[words]


def run_one(words: Iterable[str], folder: Path, console: Console | None = None) -> Run:
    """Run a config in a folder named after it, or read what it gave before."""
    from simulations.config import compose_config
    from simulations.run import run

    config = compose_config([*words, "progress=false"] if console is None else [*words])
    place = folder / config.run_name()
    run(config, place, console or Console(quiet=True))
    [done] = read_runs([place]).runs
    return done


def measure(
    overrides: Sequence[str], seed: int, folder: Path, console: Console
) -> Iterator[Finding]:
    """Yield accuracy and bytes of all methods, those of FedAvg's family tuned."""
    from simulations.config import ConfigError

    rounds = next((int(w[7:]) for w in reversed(overrides) if w.startswith("rounds=")), ROUNDS)
    common = (*SETTING, *(word for word in overrides if not word.startswith("rounds=")))
    tuning = Tuning(common, max(5, rounds // 10), folder / "tuning")
    for (family, name), words in METHODS.items():
        many = (f"rounds={rounds}",) if family == FLOWER else ()
        try:
            options = tuning.options_for(name, words) if family == FLOWER else ()
            chosen = (*words, *common, *options, *many, f"seed={seed}")
            done = run_one(chosen, folder / "runs", console)
        except (ConfigError, HydraException) as error:
            # Filters on feature vectors, say.
            console.print(f"Left out: {name} ({str(error).splitlines()[0]})", style="yellow")
            continue
        yield from curve_of(done, family, name)


# --- curves -------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A scored model: the round, what a node has sent up so far, how often the model is right."""

    round: int
    kilobytes: float
    accuracy: float


class Curve(NamedTuple):
    """What one method reaches with how many KB, in order of rounds."""

    name: str
    family: str
    points: tuple[Point, ...]

    def kilobytes_until(self, accuracy: float) -> float | None:
        """Return what a node has sent when the model is first as good; None if it never is."""
        return next((p.kilobytes for p in self.points if p.accuracy >= accuracy), None)


def curve_of(run: Run, family: str, name: str) -> Iterator[Finding]:
    """Yield the final accuracy of a run, and that of rounds 1, 2, 5, 10, 20 … on the way."""
    points, sent = [], 0
    for each in run.history:
        sent += each.bytes_up
        if each.number and each.accuracy is not None:
            points.append(Point(each.number, sent / run.setting.nodes / 1e3, each.accuracy))
    last = run.bytes_up / run.setting.nodes / 1e3
    yield Finding(family, name, "accuracy", [run.accuracy], [last])
    # Hidden layers alone are no model yet; raw data are a level.
    few = len(points) <= 10
    wanted = {base * 10**power for base in (1, 2, 5) for power in range(6)}
    for point in points if family not in (LAYERS, POOLED) else ():
        if few or point.round in wanted:
            quantity = f"accuracy after round {point.round}"
            yield Finding(family, name, quantity, [point.accuracy], [point.kilobytes])


def curves_of(found: Findings) -> list[Curve]:
    """Return the curves of all methods but the levels, for the first seed."""
    points: dict[tuple[str, str], list[Point]] = {}
    for each in found.findings:
        if each.quantity.startswith("accuracy") and each.setting != POOLED and each.values:
            number = int(each.quantity.rpartition(" ")[2]) if "round" in each.quantity else 10**9
            point = Point(number, each.kilobytes[0], each.values[0])
            points.setdefault((each.setting, each.method), []).append(point)
    return [Curve(n, family, tuple(sorted(own))) for (family, n), own in points.items()]


def add_factors(found: Findings) -> None:
    """Add for each method that is no rival by what factor of bytes it is ahead."""
    curves = curves_of(found)
    rivals = [curve for curve in curves if curve.family in RIVALS]
    for curve in curves:
        if curve.family not in RIVALS:
            last = curve.points[-1]
            needs = [rival.kilobytes_until(last.accuracy) for rival in rivals]
            known = [each for each in needs if each is not None]
            factor = min(known) / last.kilobytes if known else None
            found.findings.append(Finding(curve.family, curve.name, FACTOR, [factor]))


# --- the picture --------------------------------------------------------------------------------

_TICKS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)


def _height(accuracy: ArrayLike) -> np.ndarray:
    """Errors are logarithmic: from .90 to .99 is as far as from .00 to .90."""
    return np.asarray(-np.log10(np.maximum(1 - np.asarray(accuracy, dtype=float), 1e-4)))


def _accuracy(height: ArrayLike) -> np.ndarray:
    return np.asarray(1 - 10.0 ** -np.asarray(height, dtype=float))


def draw(found: Findings) -> Figure:
    """Draw all methods: accuracy against the bytes that a node has sent, below what is pooled."""
    curves = curves_of(found)
    levels = {each.method: each.mean for each in found.of("accuracy") if each.setting == POOLED}
    families = [family for family in FAMILIES if any(c.family == family for c in curves)]
    looks = {f: Style(COLOURS[i % 7], "oD^Psv"[i % 6]) for i, f in enumerate(families)}
    looks |= {FLOWER: Style(SOFT, "s"), PEERS: Style(DARK, "X")}
    figure = new_figure(6.2, 9.2)
    axes = figure.add_subplot()
    axes.set_yscale("function", functions=(_height, _accuracy))
    lines: list[tuple[str, Style, list[Mark]]] = []
    for curve in sorted(curves, key=lambda each: -each.points[-1].accuracy):
        marks = [Mark(point.kilobytes * 1e3, point.accuracy) for point in curve.points]
        marks[-1] = marks[-1]._replace(name=f"{curve.name} {share(marks[-1].y)}")
        known = any(label == curve.family for label, *_ in lines)
        lines.append(("_" if known else curve.family, looks[curve.family], marks))
    write_names = draw_marks(axes, lines, tick_bytes)
    for index, level in enumerate(levels.values()):
        axes.axhline(level, color=DARK, lw=1.3, ls=((0, (6, 3)), (0, (2, 2)))[index % 2])
    xs = [mark.x for *_, marks in lines for mark in marks]
    axes.set_xlim(min(xs) / 1.9, max(xs) * 1.9)
    label_decades(axes.xaxis, tick_bytes, subs=(1, 3))
    # Where curves end is of interest; where long ones begin only as far as the rest goes.
    ends = [curve.points[-1].accuracy for curve in curves] + list(levels.values())
    low, high = float(_height(min(ends))), float(_height(max(ends)))
    margin = 0.06 * (high - low) + 0.01
    axes.set_ylim(float(_accuracy(low - margin)), float(_accuracy(high + margin)))
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.3g}".lstrip("0") or "0"))
    write_heading(axes, "Accuracy against bytes", "a mark per round, on long curves 1, 2, 5, 10 …")
    axes.set_xlabel("bytes that a node has sent (1 MB = 10⁶ bytes)")
    axes.set_ylabel("test accuracy")
    legend_below(figure, 4, first=families, fontsize=9.5)
    texts = [
        axes.annotate(
            f"{name} {share(level)}", xy=(1, level), xycoords=axes.get_yaxis_transform(),
            xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=8.5, color=DARK,
        )
        for name, level in levels.items()
    ]  # fmt: skip
    along = np.geomspace(*axes.get_xlim(), 150)
    write_names(texts, [(float(x), level) for level in levels.values() for x in along])
    return figure


def share(value: float) -> str:
    """Write an accuracy as ``.912``."""
    return f"{value:.3f}".lstrip("0")


STUDY = Study(
    name="frontier",
    paper=OURS,
    where="",
    about="What does a byte buy? All methods on one split, FedAvg's family tuned.",
    measure=measure,
    derive=add_factors,
    draw=draw,
    shown=("accuracy", FACTOR),
    seeds=1,
    minutes=30,
    quick=("rounds=20",),
)
