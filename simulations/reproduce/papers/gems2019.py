"""Guha & Smith 2019: Tables 1 to 3 and 5 to 11, Figures 3, 4 and 6."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from simulations.reproduce.findings import Finding, Findings
from simulations.reproduce.pictures import draw_curves, draw_methods
from simulations.reproduce.study import Cell, Scope, Study, options

PAPER = "GEMS 2019"
Overrides = tuple[str, ...]
NODES = (2, 3, 5)
SAMPLES = (100, 300, 1000)
EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# The released code fine-tunes GEMS and the average at this rate, everything else at 0.001.
RELEASED_RATE, EQUAL_RATE = 0.01, 0.001

# --- methods that stand in several tables; names are those of the tables ---------------------

# The papers' pooled models are trained like a node's, not solved.
POOLED = ("strategy=global", "strategy.converged=false")
REFERENCES: Mapping[str, Overrides] = {
    "Global": POOLED,
    "Local": ("strategy=local",),
    # The papers' average knows no sample counts.
    "Averaged": ("strategy=one_shot_average", "strategy.weighted=false"),
}
NODES_ALONE = {name: REFERENCES[name] for name in ("Local", "Averaged")}
# What the kept findings were measured with, whatever the counts of a class allow.
FULL_CONE = ("strategy=gems", "strategy.space.rank=full")
FULL_HEAD: dict[str, object] = {"/head": "cone", "head.space.rank": "full"}
ENSEMBLES: Mapping[str, Overrides] = {
    "Majority vote": ("strategy=ensemble",),
    "Softmax mean": ("strategy=ensemble", "strategy.vote=softmax_mean"),
}
# One-shot merging methods of others.
MERGED: Mapping[str, Overrides] = {
    "RegMean": ("strategy=merge", "strategy.method=regmean"),
    "Fisher, diagonal": ("strategy=merge", "strategy.method=fisher"),
}


def convex_gems(scope: Scope, epsilon: float) -> dict[str, Overrides]:
    """Return GEMS for a linear model: the paper's spaces, and ours."""
    tuned = {"tune": scope.public(1000), "tune_rate": RELEASED_RATE}
    ellipsoid = {"/space": "ellipsoid", "space.epsilon": epsilon}
    return {
        "GEMS ellipsoid": ("strategy=gems", *options(ellipsoid)),
        "GEMS ellipsoid, tuned": ("strategy=gems", *options(ellipsoid | tuned)),
        "GEMS ball": ("strategy=gems", *options({"/space": "ball", "space.epsilon": epsilon})),
        "GEMS cone": FULL_CONE,
        "GEMS cone, rank 20": ("strategy=gems", "strategy.space.rank=20"),
        "GEMS cone, tuned": (*FULL_CONE, f"strategy.tune={scope.public(1000)}"),
    }


def neural_gems(
    scope: Scope, *, hidden: float, clusters: int, output: float
) -> dict[str, Overrides]:
    """Return GEMS layer by layer: the paper's output layer, and ours."""
    merging = {"neurons.epsilon": hidden, "clusters": clusters}
    ball = merging | {"/head": "ball", "head.space.epsilon": output}
    tuned = {"head.tune": scope.public(1000), "head.tune_rate": RELEASED_RATE}
    return {
        "GEMS": ("strategy=gems_layerwise", *options(ball)),
        "GEMS, tuned": ("strategy=gems_layerwise", *options(ball | tuned)),
        "GEMS, cone head": ("strategy=gems_layerwise", *options(merging | FULL_HEAD)),
    }


# --- data sets (Appendix B and C) -------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """A data set of the paper, with its settings."""

    title: str
    config: str
    convex_epsilon: float
    output_epsilon: float
    hidden: int
    # Deviation of a neuron and clusters, by number of nodes.
    merging: dict[int, tuple[float, int]]
    # Clusters and deviations of the tables of sizes.
    sizes: tuple[tuple[int, float], ...]
    measure: str = "accuracy"
    options: Overrides = ()

    def overrides(self, scope: Scope, nodes: int, *more: str) -> Overrides:
        """Return the overrides that choose the data."""
        return (*scope.data(self.config, *self.options), f"nodes={nodes}", *more)


DATA = (
    Data(
        "MNIST", "mnist", 0.4, 0.7, 50, {2: (0.01, 1), 3: (1.0, 100), 5: (1.0, 100)},
        ((75, 0.5), (100, 1.0), (50, 1.0), (75, 1.0)),
    ),
    Data(
        "CIFAR-10", "cifar10_features", 0.2, 0.2, 100, {2: (0.1, 1), 3: (0.3, 150), 5: (0.3, 200)},
        ((150, 0.7), (150, 0.5), (200, 0.3), (100, 0.3)),
    ),
    Data(
        "HAM10000", "ham10000_features", 0.2, 0.25, 50,
        {2: (0.01, 1), 3: (0.07, 100), 5: (0.07, 100)},
        ((75, 0.07), (100, 0.07), (50, 0.07)),
        "balanced accuracy", ("dataset.balance=2000",),
    ),
)  # fmt: skip


def data_sets(scope: Scope) -> Sequence[Data]:
    """Return the data sets; the digits can stand in for one only."""
    return DATA[:1] if scope.stand_in else DATA


def _table(
    data: Data,
    scope: Scope,
    setting: str,
    nodes: int,
    methods: Mapping[str, Overrides],
    *more: str,
) -> list[Cell]:
    """Return a row of a table: the pooled reference, one run for all rows, and the methods."""
    pooled = (*data.overrides(scope, 5, *more), *POOLED)
    chosen = data.overrides(scope, nodes, *more)
    return [
        Cell(setting, "Global", pooled, (data.measure,)),
        *(Cell(setting, name, (*chosen, *o), (data.measure,)) for name, o in methods.items()),
    ]


def _convex(scope: Scope) -> list[Cell]:
    cells = []
    for data in data_sets(scope):
        methods = {**NODES_ALONE, **convex_gems(scope, data.convex_epsilon), **ENSEMBLES}
        methods |= MERGED
        for nodes in NODES:
            cells += _table(data, scope, f"{data.title}, {nodes} nodes", nodes, methods)
    return cells


def _networks(scope: Scope, chosen: Sequence[Data]) -> list[Cell]:
    cells = []
    for data in chosen:
        for nodes in NODES:
            hidden, clusters = data.merging[nodes]
            gems = neural_gems(scope, hidden=hidden, clusters=clusters, output=data.output_epsilon)
            methods = {**NODES_ALONE, **gems, **ENSEMBLES, **MERGED}
            setting = f"{data.title}, {nodes} nodes"
            cells += _table(data, scope, setting, nodes, methods, f"model.hidden=[{data.hidden}]")
    return cells


def _neural(scope: Scope) -> list[Cell]:
    return _networks(scope, DATA[:1])


def _neural_features(scope: Scope) -> list[Cell]:
    return _networks(scope, data_sets(scope)[0 if scope.stand_in else 1 :])


def _model_size(scope: Scope) -> list[Cell]:
    cells = []
    for data in data_sets(scope):
        chosen = data.overrides(scope, 5, f"model.hidden=[{data.hidden}]")
        for clusters, hidden in data.sizes:
            gems = neural_gems(scope, hidden=hidden, clusters=clusters, output=data.output_epsilon)
            setting, reads = f"{data.title}, m_ε = {clusters}, ε_j = {hidden:g}", (data.measure,)
            cells += [
                Cell(setting, name, (*chosen, *gems[name]), (*reads, "hidden neurons"))
                for name in ("GEMS, tuned", "GEMS, cone head")
            ]  # fmt: skip
        cells += [
            Cell(f"{data.title}, ensemble", name, (*chosen, *o), (data.measure,))
            for name, o in ENSEMBLES.items()
        ]
    return cells


def _tuning(scope: Scope) -> list[Cell]:
    """Both figures in one experiment: logistic regression, and networks."""
    cells = []
    for model, data in itertools.product(("convex", "network"), data_sets(scope)):
        more: Overrides = ("experiment=gems2019_convex",)
        if model == "network":
            more = ("experiment=gems2019_neural", f"model.hidden=[{data.hidden}]")
        chosen = data.overrides(scope, 5, *more)
        for method, (overrides, rates) in _tuned(scope, model, data).items():
            at = "head." if "strategy=gems_layerwise" in overrides else ""
            for rate, samples in itertools.product(rates, scope.pick(SAMPLES, (100, 1000))):
                tune: dict[str, float] = {f"{at}tune": scope.public(samples)}
                tune |= {f"{at}tune_rate": rate} if rate else {}
                cells.append(
                    Cell(
                        f"{data.title}, {model}, {samples} samples",
                        f"{method}, rate {rate:g}" if rate else method,
                        (*chosen, *overrides, *options(tune)),
                        (data.measure,),
                        x=float(samples),
                    )
                )
    return cells


def _tuned(scope: Scope, model: str, data: Data) -> dict[str, tuple[Overrides, tuple[float, ...]]]:
    """Return what is fine-tuned, and Adam's rates for it."""
    if model == "convex":
        gems = convex_gems(scope, data.convex_epsilon)
        ours, cones = gems["GEMS ellipsoid"], {"GEMS cone, joint objective": gems["GEMS cone"]}
    else:
        hidden, clusters = data.merging[5]
        gems = neural_gems(scope, hidden=hidden, clusters=clusters, output=data.output_epsilon)
        ours, cones = gems["GEMS"], {"GEMS, cone head, joint objective": gems["GEMS, cone head"]}
    methods = {
        "GEMS": ours,
        "average": REFERENCES["Averaged"],
        "local": REFERENCES["Local"],
        "raw": ("strategy=public_only",),
    }
    both = (EQUAL_RATE, RELEASED_RATE)
    return {
        **{name: (words, both) for name, words in methods.items()},
        **{name: (words, (0.0,)) for name, words in cones.items()},
    }


def gains(found: Findings) -> None:
    """Add the paper's summary: what GEMS gains with 100 samples, over data sets and models."""
    first = {f.key[:2]: f for f in found.findings if f.setting.endswith(" 100 samples")}
    settings = list(dict.fromkeys(setting for setting, _ in first))
    cases = {
        "all, as released": (RELEASED_RATE, RELEASED_RATE, EQUAL_RATE),
        "all, equal rates of 0.001": (EQUAL_RATE,) * 3,
        "all, equal rates of 0.01": (RELEASED_RATE,) * 3,
    }
    for case, (ours, averages, others) in cases.items():
        for method, rate in (("raw", others), ("average", averages), ("local", others)):
            pairs = []
            for setting in settings:
                a = first.get((setting, f"GEMS, rate {ours:g}"))
                b = first.get((setting, f"{method}, rate {rate:g}"))
                if a and b:
                    pairs.append(a.pairs(b))
            known = [[p[0] - p[1] for p in seed if p] for seed in zip(*pairs, strict=True)]
            title = "over raw" if method == "raw" else f"over tuned {method}"
            by_seed = [fmean(seed) if seed else None for seed in known]
            found.findings.append(Finding(case, title, "gain with 100 samples", by_seed))


def _epsilon_grid(scope: Scope) -> list[Cell]:
    """Two nodes, an ε for each: up to what every node's own model reaches."""
    grid = scope.pick(EPSILONS, (0.3, 0.6, 0.9))
    chosen = (*DATA[0].overrides(scope, 2), "strategy=gems", "strategy/space=ball")
    return [
        Cell(
            f"radii {radius}, ε₁ = {first:g}",
            f"ε₂ = {second:g}",
            (
                *chosen,
                f"strategy.space.radius={radius}",
                f"strategy.space.epsilon={{0:{first},1:{second}}}",
            ),
            ("accuracy", "empty"),
            x=first,
        )
        for radius in ("sampled", "certified")
        for first in grid
        for second in grid
    ]


_FEATURES = (
    "CIFAR-10 and HAM10000 are features of EfficientNet-Lite0; the paper has others. HAM10000 is "
    "balanced by repetition, tested on all of its test images, and scored by balanced accuracy."
)
_SHORT = ("train.epochs=2", "train.output_epochs=2")

# What the experiments share.
_STUDY = Study(
    name="",
    paper=PAPER,
    where="",
    about="",
    experiment="gems2019_neural",
    draw=draw_methods,
    seeds=5,
    minutes=0,
    quick=_SHORT,
    differs=_FEATURES,
)

STUDIES = (
    replace(
        _STUDY,
        name="gems2019_convex",
        experiment="gems2019_convex",
        where="Tables 1 and 5",
        about="Logistic regression, nodes with different labels, one round.",
        cells=_convex,
        minutes=20,
        quick=("train.epochs=2",),
    ),
    replace(
        _STUDY,
        name="gems2019_neural",
        where="Tables 2 and 6",
        about="Networks with one hidden layer, merged layer by layer; MNIST.",
        cells=_neural,
        minutes=25,
        differs="",
    ),
    replace(
        _STUDY,
        name="gems2019_neural_features",
        where="Tables 2, 7 and 8",
        about="The same for CIFAR-10 and HAM10000 with 2, 3 and 5 nodes.",
        cells=_neural_features,
        minutes=50,
    ),
    replace(
        _STUDY,
        name="gems2019_model_size",
        where="Tables 3, 9, 10 and 11",
        about="Hidden neurons against accuracy, with the ensemble beside; 5 nodes.",
        cells=_model_size,
        draw=None,
        minutes=26,
    ),
    replace(
        _STUDY,
        name="gems2019_tuning",
        experiment="",
        where="Figures 3 and 4, Section 4.4",
        about="What fine-tuning on a public sample adds, at equal learning rates and as released.",
        cells=_tuning,
        draw=partial(draw_curves, quantity="accuracy", log=True),
        minutes=39,
        derive=gains,
        differs="The paper's figures are pictures; its text has the mean gain with 100 samples.",
    ),
    replace(
        _STUDY,
        name="gems2019_epsilon_grid",
        experiment="gems2019_convex",
        where="Figure 6",
        about="Two nodes, an ε for each: where the balls do not meet, and how good the model is.",
        cells=_epsilon_grid,
        draw=None,
        seeds=1,
        minutes=1,
        quick=(),
        differs="",
    ),
)
