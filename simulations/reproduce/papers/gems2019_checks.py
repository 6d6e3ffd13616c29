"""Checks of what Guha & Smith 2019 claim, and of why our numbers differ from theirs.

Each is the smallest experiment that shows one thing; `gems2019_claims` says in words what it found.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulations.reproduce.papers import gems2019_check_figures as figures
from simulations.reproduce.papers import gems2019_claims as claims
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.gems2019 import DATA, NODES, PAPER, SIZES
from simulations.reproduce.papers.methods import convex_gems, neural_gems
from simulations.reproduce.papers.spec import Cell, DoneRun, Reproduction, Scope

_FEATURES = "CIFAR-10 and HAM10000 are features of EfficientNet-Lite0; the paper has others."
EPSILONS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
RADII = (0.4, 0.7)
_CONVEX = "experiment=gems2019_convex"
_NEURAL = "experiment=gems2019_neural"
# Nodes, method and deviations of a neuron's output: the paper's, then others towards its sizes.
# A cone head needs no training of the output layer, so that only the merging differs.
DEVIATIONS = {
    "MNIST": ((5, "GEMS, cone head", (1.0, 0.1)),),
    "CIFAR-10": ((5, "GEMS, cone head", (0.3, 0.1, 0.03)),),
    "HAM10000": ((5, "GEMS, cone head", (0.07, 0.3, 1.0)),),
}
# Where the output layer starts, and how many epochs it is trained: ours first, then others.
STARTS = {
    "from zero, 10 epochs": ("zero", 10),
    "common random start, 10 epochs": ("common", 10),
    "own random starts, 10 epochs": ("own", 10),
}
# From zero it is a row of gems2019_neural.
OWN = {"own random starts, 10 epochs": ("own", 10)}
TUNED = {"from zero, tuned": ("zero", 10), "own random starts, tuned": ("own", 10)}


def _nodes_models(scope: Scope) -> list[Cell]:
    """Return the one run around whose models all spaces are built."""
    data = DATA[0]
    ball = convex_gems(scope, data.convex_epsilon)["GEMS ball"]
    overrides = (_CONVEX, *data.overrides(scope, 5), *ball)
    return [Cell("MNIST, 5 nodes", "GEMS ball", overrides)]


def _judge_spaces(runs: Sequence[DoneRun], scope: Scope, jobs: int) -> list[Finding]:
    # Not before: the list of experiments needs neither Flower nor Torch.
    from simulations.reproduce.papers.space_sweep import sweep

    return [each for run in runs for each in sweep(run.folder, EPSILONS, RADII)]


def _factors(found: Findings) -> None:
    """Add by what factor sampled radii are larger than those in the worst directions."""
    for setting in found.settings():
        for node in range(5):
            name = f"radius of node {node}"
            sampled = found.get(setting, "radii sampled", name)
            worst = found.get(setting, "radii worst", name)
            if sampled and worst:
                pairs = zip(sampled.by_seed, worst.by_seed, strict=True)
                ratios = [a / b if a and b else None for a, b in pairs]
                found.add(Finding(setting, "sampled / worst", name, ratios))


def _output_layers(scope: Scope) -> list[Cell]:
    """Return GEMS networks that differ in the training of the output layer."""
    first, second = DATA[0], DATA[0 if scope.stand_in else 1]
    (few, wide) = SIZES[second.title][0]
    sized = f"{second.title}, m_ε = {few}, ε_j = {wide:g}"
    settings = [
        (f"{second.title}, 5 nodes", "GEMS", second, 5, second.merging[5], STARTS),
        (f"{second.title}, 2 nodes", "GEMS", second, 2, second.merging[2], STARTS),
        (sized, "GEMS, tuned", second, 5, (wide, few), TUNED),
    ]
    if not scope.stand_in:
        settings.append((f"{first.title}, 5 nodes", "GEMS", first, 5, first.merging[5], OWN))
    cells = []
    for setting, method, data, nodes, (hidden, clusters), variants in settings:
        gems = neural_gems(scope, hidden=hidden, clusters=clusters, output=data.output_epsilon)
        chosen = data.overrides(scope, nodes, f"model.hidden=[{data.hidden}]")
        cells += [
            Cell(
                setting,
                variant,
                (
                    _NEURAL,
                    *chosen,
                    *gems[method],
                    f"train.output_start={start}",
                    f"train.output_epochs={epochs}",
                ),
                (data.measure, "hidden neurons"),
            )
            for variant, (start, epochs) in variants.items()
        ]
    return cells


def _neuron_sizes(scope: Scope) -> list[Cell]:
    """Return merged networks at deviations ε_j around the paper's."""
    cells = []
    for data in DATA[:1] if scope.stand_in else DATA[1:]:
        for nodes, method, deviations in DEVIATIONS[data.title]:
            _, clusters = data.merging[nodes]
            for hidden in deviations:
                output = data.output_epsilon
                gems = neural_gems(scope, hidden=hidden, clusters=clusters, output=output)
                cells.append(
                    Cell(
                        f"{data.title}, {nodes} nodes, ε_j = {hidden:g}",
                        method,
                        (
                            _NEURAL,
                            *data.overrides(scope, nodes, f"model.hidden=[{data.hidden}]"),
                            *gems[method],
                        ),
                        ("hidden neurons", data.measure),
                        x=hidden,
                        group=f"{data.title}, {nodes} nodes",
                    )
                )
    return cells


def _points(scope: Scope) -> list[Cell]:
    """Return the runs of Table 5 with ellipsoids on features: where the average lies outside."""
    cells = []
    for data in DATA[:1] if scope.stand_in else DATA[1:]:
        for nodes in NODES:
            method = "GEMS ellipsoid"
            overrides = convex_gems(scope, data.convex_epsilon)[method]
            cells.append(
                Cell(
                    f"{data.title}, {nodes} nodes",
                    method,
                    (_CONVEX, *data.overrides(scope, nodes), *overrides),
                    (data.measure, "is average", "empty"),
                )
            )
    return cells


def _judge_points(runs: Sequence[DoneRun], scope: Scope, jobs: int) -> list[Finding]:
    # Not before: the list of experiments needs neither Flower nor Torch.
    from simulations.reproduce.papers.ellipsoid_points import judge_points

    return judge_points(runs, scope, jobs)


def _checks() -> Sequence[Reproduction]:
    return (
        Reproduction(
            name="gems2019_spaces",
            paper=PAPER,
            where="Section 4.2, a check",
            about="From which ε on is convex GEMS more than the average? Do radii keep their word?",
            cells=_nodes_models,
            draw=claims.draw_average,
            seeds=3,
            minutes=2,
            quick=("train.epochs=2",),
            derive=_factors,
            judge=_judge_spaces,
        ),
        Reproduction(
            name="gems2019_ellipsoids",
            paper=PAPER,
            where="Table 5, a check",
            about="Which point of the ellipsoids: the average, ours, or the released descent's?",
            cells=_points,
            draw=figures.draw_points,
            seeds=3,
            minutes=8,
            quick=("train.epochs=2",),
            judge=_judge_points,
            scaled=_FEATURES,
        ),
        Reproduction(
            name="gems2019_neuron_sizes",
            paper=PAPER,
            where="Tables 10 and 11, a check",
            about="At which ε_j does the merged layer have as many neurons as in the paper?",
            cells=_neuron_sizes,
            draw=figures.draw_neuron_sizes,
            seeds=3,
            minutes=8,
            quick=("train.epochs=2",),
            scaled=_FEATURES,
        ),
        Reproduction(
            name="gems2019_output_layer",
            paper=PAPER,
            where="Tables 2, 6 and 7, a check",
            about="What the start and the length of the output layer's training do to GEMS.",
            cells=_output_layers,
            draw=figures.draw_output_layers,
            seeds=3,
            minutes=20,
            quick=("train.epochs=2",),
            scaled=_FEATURES,
        ),
    )


REPRODUCTIONS = _checks()
