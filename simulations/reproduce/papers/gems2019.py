"""Guha & Smith 2019: Tables 1 to 3 and 5 to 11, Figures 3, 4 and 6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from simulations.reproduce.papers import curve_figures, table_figures
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.methods import (
    ENSEMBLES,
    FULL_HEAD,
    PEERS,
    POOLED,
    REFERENCES,
    RELEASED_RATE,
    convex_gems,
    heads,
    neural_gems,
    peers,
)
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope, options

PAPER = "GEMS 2019"
NODES = (2, 3, 5)
SAMPLES = (100, 300, 1000)
EQUAL_RATE = 0.001
NODES_ALONE = {name: REFERENCES[name] for name in ("Local", "Averaged")}
# Up to what every node's own model reaches: without that it is left out, and the other's ball alone
# would count as the intersection.
EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Data:
    """A data set of the paper, with its settings (Appendix B and C)."""

    title: str
    config: str
    convex_epsilon: float
    output_epsilon: float
    hidden: int
    # Deviation of a neuron and clusters, by number of nodes.
    merging: dict[int, tuple[float, int]]
    measure: str = "accuracy"
    options: tuple[str, ...] = ()

    def overrides(self, scope: Scope, nodes: int, *more: str) -> tuple[str, ...]:
        """Return the overrides that choose the data."""
        own = () if scope.stand_in else self.options
        return (f"dataset={scope.dataset(self.config)}", *own, f"nodes={nodes}", *more)


DATA = (
    Data("MNIST", "mnist", 0.4, 0.7, 50, {2: (0.01, 1), 3: (1.0, 100), 5: (1.0, 100)}),
    Data(
        "CIFAR-10", "cifar10_features", 0.2, 0.2, 100, {2: (0.1, 1), 3: (0.3, 150), 5: (0.3, 200)}
    ),
    Data(
        "HAM10000",
        "ham10000_features",
        0.2,
        0.25,
        50,
        {2: (0.01, 1), 3: (0.07, 100), 5: (0.07, 100)},
        "balanced accuracy",
        ("dataset.balance=2000",),
    ),
)
SIZES = {
    "MNIST": ((75, 0.5), (100, 1.0), (50, 1.0), (75, 1.0)),
    "CIFAR-10": ((150, 0.7), (150, 0.5), (200, 0.3), (100, 0.3)),
    "HAM10000": ((75, 0.07), (100, 0.07), (50, 0.07)),
}


def data_sets(scope: Scope) -> Sequence[Data]:
    """Return the data sets; the digits can stand in for one only."""
    return DATA[:1] if scope.stand_in else DATA


def _pooled(data: Data, scope: Scope, setting: str, *more: str) -> Cell:
    """Return the reference on all data: one run, whatever the number of nodes."""
    overrides = (*data.overrides(scope, 5, *more), *POOLED)
    return Cell(setting, "Global", overrides, (data.measure,), group=f"{data.title}, pooled")


def _convex(scope: Scope) -> list[Cell]:
    cells = []
    for data in data_sets(scope):
        for nodes in NODES:
            methods = {
                **NODES_ALONE,
                **convex_gems(scope, data.convex_epsilon),
                **ENSEMBLES,
                **peers("RegMean", "Fisher, diagonal", "Fisher, K-FAC"),
                **heads(),
            }
            chosen = data.overrides(scope, nodes)
            setting = f"{data.title}, {nodes} nodes"
            cells.append(_pooled(data, scope, setting))
            cells += [
                Cell(setting, method, (*chosen, *overrides), (data.measure,))
                for method, overrides in methods.items()
            ]
    return cells


def _neural(scope: Scope) -> list[Cell]:
    """Table 6 for MNIST, and Table 2, which has 5 nodes."""
    features = data_sets(scope)[1:]
    return [*_networks(scope, DATA[:1], NODES), *_networks(scope, features, (5,))]


def _neural_features(scope: Scope) -> list[Cell]:
    """Tables 7 and 8."""
    return _networks(scope, data_sets(scope)[0 if scope.stand_in else 1 :], NODES)


def _networks(scope: Scope, chosen_data: Sequence[Data], numbers: Sequence[int]) -> list[Cell]:
    cells = []
    for data in chosen_data:
        for nodes in numbers:
            hidden, clusters = data.merging[nodes]
            methods = {
                **NODES_ALONE,
                **neural_gems(scope, hidden=hidden, clusters=clusters, output=data.output_epsilon),
                "GEMS, all neurons, cone head": (
                    "strategy=gems_layerwise",
                    *options({"merge": "concat"} | FULL_HEAD),
                ),
                **ENSEMBLES,
                **peers(*PEERS, network=True),
            }
            chosen = data.overrides(scope, nodes, f"model.hidden=[{data.hidden}]")
            setting = f"{data.title}, {nodes} nodes"
            cells.append(_pooled(data, scope, setting, f"model.hidden=[{data.hidden}]"))
            cells += [
                Cell(setting, method, (*chosen, *overrides), (data.measure,))
                for method, overrides in methods.items()
            ]
    return cells


def _model_size(scope: Scope) -> list[Cell]:
    cells = []
    for data in data_sets(scope):
        chosen = data.overrides(scope, 5, f"model.hidden=[{data.hidden}]")
        for clusters, hidden in SIZES[data.title]:
            methods = neural_gems(
                scope, hidden=hidden, clusters=clusters, output=data.output_epsilon
            )
            setting = f"{data.title}, m_ε = {clusters}, ε_j = {hidden:g}"
            cells += [
                Cell(
                    setting,
                    method,
                    (*chosen, *methods[method]),
                    (data.measure, "hidden neurons"),
                    group=data.title,
                )
                for method in ("GEMS, tuned", "GEMS, cone head")
            ]
        cells += [
            Cell(
                f"{data.title}, ensemble",
                method,
                (*chosen, *chosen_overrides),
                (data.measure,),
                x=5.0 * data.hidden,
                group=data.title,
            )
            for method, chosen_overrides in ENSEMBLES.items()
        ]
    return cells


def _tuning(scope: Scope) -> list[Cell]:
    """Both figures in one experiment: logistic regression, and networks."""
    cells = []
    for model in ("convex", "network"):
        for data in data_sets(scope):
            chosen = data.overrides(scope, 5, *_model(model, data))
            for method, (overrides, rates) in _tuned(scope, model, data).items():
                for rate in rates:
                    for samples in scope.pick(SAMPLES, (100, 1000)):
                        tune: dict[str, float] = {"tune": scope.public(samples)}
                        if rate:
                            tune["tune_rate"] = rate
                        cells.append(
                            Cell(
                                f"{data.title}, {model}, {samples} samples",
                                f"{method}, rate {rate:g}" if rate else method,
                                (*chosen, *overrides, *options(tune)),
                                (data.measure,),
                                x=float(samples),
                                group=f"{data.title}, {model}",
                            )
                        )
    return cells


def _model(model: str, data: Data) -> tuple[str, ...]:
    if model == "convex":
        return ("model=logistic",)
    own = ("own_initial_weights=true", "train.patience=3")
    return ("model=mlp", f"model.hidden=[{data.hidden}]", *own)


def _tuned(
    scope: Scope, model: str, data: Data
) -> dict[str, tuple[tuple[str, ...], tuple[float, ...]]]:
    """Return what is fine-tuned, and Adam's rates for it."""
    both = (EQUAL_RATE, RELEASED_RATE)
    average, local = REFERENCES["Averaged"], REFERENCES["Local"]
    if model == "convex":
        gems = convex_gems(scope, data.convex_epsilon)
        ours, cone = gems["GEMS ellipsoid"], gems["GEMS cone"]
        cones = {"GEMS cone, joint objective": (cone, (0.0,))}
    else:
        hidden, clusters = data.merging[5]
        gems = neural_gems(scope, hidden=hidden, clusters=clusters, output=data.output_epsilon)
        ours = gems["GEMS"]
        cones = {"GEMS, cone head, joint objective": (gems["GEMS, cone head"], (0.0,))}
    return {
        "GEMS": (ours, both),
        "average": (average, both),
        "local": (local, both),
        "raw": (("strategy=public_only",), both),
        **cones,
    }


def _gains(found: Findings) -> None:
    """Add the paper's summary: what GEMS gains with 100 samples, over data sets and models."""
    first = [f for f in found.findings if f.setting.endswith(" 100 samples")]
    settings = list(dict.fromkeys(f.setting for f in first))
    cases = {
        "all, as released": (RELEASED_RATE, RELEASED_RATE, EQUAL_RATE),
        "all, equal rates of 0.001": (EQUAL_RATE,) * 3,
        "all, equal rates of 0.01": (RELEASED_RATE,) * 3,
    }
    for case, (ours, averages, others) in cases.items():
        for title, method, rate in (
            ("over raw", "raw", others),
            ("over tuned average", "average", averages),
            ("over tuned local", "local", others),
        ):
            by_seed: list[float | None] = []
            for index in range(len(found.seeds)):
                gains = []
                for setting in settings:
                    a = _value(first, setting, f"GEMS, rate {ours:g}", index)
                    b = _value(first, setting, f"{method}, rate {rate:g}", index)
                    if a is not None and b is not None:
                        gains.append(a - b)
                by_seed.append(fmean(gains) if gains else None)
            found.add(Finding(case, title, "gain with 100 samples", by_seed))


def _value(findings: Sequence[Finding], setting: str, method: str, index: int) -> float | None:
    for each in findings:
        if (each.setting, each.method) == (setting, method):
            return each.by_seed[index]
    return None


def _epsilon_grid(scope: Scope) -> list[Cell]:
    data = DATA[0]
    grid = scope.pick(EPSILONS, (0.3, 0.6, 0.9))
    chosen = data.overrides(scope, 2)
    return [
        Cell(
            f"ε = {first:g} and {second:g}",
            f"radii {radius}",
            (
                *chosen,
                "strategy=gems",
                "strategy/space=ball",
                f"strategy.space.radius={radius}",
                f"strategy.epsilon={{0:{first},1:{second}}}",
            ),
            ("accuracy", "empty"),
            group=f"{radius}, {first:g}",
        )
        for radius in ("sampled", "worst")
        for first in grid
        for second in grid
    ]


_FEATURES = (
    "CIFAR-10 and HAM10000 are features of EfficientNet-Lite0; the paper has others. HAM10000 is "
    "balanced by repetition, tested on all of its test images, and scored by balanced accuracy."
)

REPRODUCTIONS = (
    Reproduction(
        name="gems2019_convex",
        paper=PAPER,
        where="Tables 1 and 5",
        about="Logistic regression, nodes with different labels, one round.",
        cells=_convex,
        draw=table_figures.method_panels,
        seeds=5,
        minutes=25,
        quick=("train.epochs=2",),
        scaled=_FEATURES,
        quick_minutes=4.0,
    ),
    Reproduction(
        name="gems2019_neural",
        paper=PAPER,
        where="Tables 2 and 6",
        about="Networks with one hidden layer, merged layer by layer.",
        cells=_neural,
        draw=table_figures.method_panels,
        seeds=5,
        minutes=40,
        quick=("train.epochs=2", "train.output_epochs=2"),
        scaled=_FEATURES,
        quick_minutes=2.5,
    ),
    Reproduction(
        name="gems2019_neural_features",
        paper=PAPER,
        where="Tables 7 and 8",
        about="The same for CIFAR-10 and HAM10000 with 2, 3 and 5 nodes.",
        cells=_neural_features,
        draw=table_figures.method_panels,
        seeds=5,
        minutes=25,
        quick=("train.epochs=2", "train.output_epochs=2"),
        scaled=_FEATURES,
        quick_minutes=3,
    ),
    Reproduction(
        name="gems2019_model_size",
        paper=PAPER,
        where="Tables 3, 9, 10 and 11",
        about="Hidden neurons against accuracy, with the ensemble beside; 5 nodes.",
        cells=_model_size,
        draw=table_figures.size_panels,
        seeds=5,
        minutes=30,
        quick=("train.epochs=2", "train.output_epochs=2"),
        scaled=_FEATURES,
        quick_minutes=1.0,
    ),
    Reproduction(
        name="gems2019_tuning",
        paper=PAPER,
        where="Figures 3 and 4",
        about="What fine-tuning on a public sample adds, at equal learning rates and as released.",
        cells=_tuning,
        draw=curve_figures.tuning_panels,
        seeds=5,
        minutes=45,
        quick=("train.epochs=2", "train.output_epochs=2"),
        derive=_gains,
        scaled="The paper's figures are pictures; its text gives the mean gain with 100 samples.",
        quick_minutes=2.5,
    ),
    Reproduction(
        name="gems2019_epsilon_grid",
        paper=PAPER,
        where="Figure 6",
        about="Two nodes, an ε for each: where the balls do not meet, and how good the model is.",
        cells=_epsilon_grid,
        draw=curve_figures.epsilon_grid,
        seeds=1,
        minutes=8,
        # Nodes that train less do not reach the higher ε at all.
        quick=(),
        quick_minutes=0.9,
    ),
)
