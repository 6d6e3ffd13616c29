"""Checks of what Guha & Smith 2019 claim, and of why our numbers differ from theirs.

Each is the smallest experiment that shows one thing; `gems2019_claims` says in words what it found.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulations.reproduce.papers import gems2019_claims as claims
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.gems2019 import DATA, NODES, PAPER
from simulations.reproduce.papers.methods import convex_gems, neural_gems
from simulations.reproduce.papers.spec import Cell, DoneRun, Reproduction, Scope, options

_FEATURES = "CIFAR-10 and HAM10000 are features of EfficientNet-Lite0; the paper has others."
SPACES = {"GEMS ball": "ball", "GEMS ellipsoid": "ellipsoid"}
EPSILONS = (0.4, 0.6, 0.7, 0.8, 0.9)
RADII = (0.4, 0.7)
_CONVEX = "experiment=gems2019_convex"
_NEURAL = "experiment=gems2019_neural"
# Where the output layer starts, and how many epochs it is trained: ours first, then what differs.
OUTPUTS = {
    "from zero, 10 epochs": ("zero", 10),
    "common random start, 10 epochs": ("common", 10),
    "own random starts, 10 epochs": ("own", 10),
    "from zero, 40 epochs": ("zero", 40),
    "own random starts, 40 epochs": ("own", 40),
}


def _epsilons(scope: Scope) -> list[Cell]:
    """Return the paper's two spaces on MNIST, from lax to strict."""
    data = DATA[0]
    chosen = data.overrides(scope, 5)
    cells = []
    for epsilon in scope.pick(EPSILONS, (0.4, 0.7, 0.9)):
        methods = convex_gems(scope, epsilon)
        # The same runs as those of the radii below.
        methods["GEMS ball"] = (*methods["GEMS ball"], "strategy.verify=true")
        cells += [
            Cell(
                f"MNIST, 5 nodes, ε = {epsilon:g}",
                method,
                (_CONVEX, *chosen, *methods[method]),
                ("accuracy", "is average", "empty"),
                x=epsilon,
                group="MNIST",
            )
            for method in SPACES
        ]
    return cells


def _radii(scope: Scope) -> list[Cell]:
    """Return balls with sampled and with worst-direction radii, and what nodes get of them."""
    data = DATA[0]
    per_node = [f"{what} of node {n}" for what in ("radius", "accuracy") for n in range(5)]
    return [
        Cell(
            f"MNIST, 5 nodes, ε = {epsilon:g}",
            f"radii {radius}",
            (
                _CONVEX,
                *data.overrides(scope, 5),
                "strategy=gems",
                *options(
                    {
                        "/space": "ball",
                        "space.epsilon": epsilon,
                        "space.radius": radius,
                        "verify": "true",
                    }
                ),
            ),
            ("accuracy", "empty", *per_node),
            group="MNIST",
        )
        for epsilon in RADII
        for radius in ("sampled", "worst")
    ]


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
    """Return GEMS networks of five nodes that differ in the training of the output layer."""
    cells = []
    for data in DATA[:1] if scope.stand_in else DATA[1::-1]:
        hidden, clusters = data.merging[5]
        gems = neural_gems(scope, hidden=hidden, clusters=clusters, output=data.output_epsilon)
        chosen = data.overrides(scope, 5, f"model.hidden=[{data.hidden}]")
        cells += [
            Cell(
                f"{data.title}, 5 nodes",
                method,
                (
                    _NEURAL,
                    *chosen,
                    *gems["GEMS"],
                    f"train.output_start={start}",
                    f"train.output_epochs={epochs}",
                ),
                (data.measure, "hidden neurons"),
            )
            for method, (start, epochs) in OUTPUTS.items()
        ]
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
            name="gems2019_epsilons",
            paper=PAPER,
            where="Section 4.2, a check",
            about="At which ε is convex GEMS more than the average of the nodes' models?",
            cells=_epsilons,
            draw=claims.draw_average,
            seeds=3,
            minutes=3,
            quick=("train.epochs=2",),
        ),
        Reproduction(
            name="gems2019_radii",
            paper=PAPER,
            where="Algorithm 2, a check",
            about="Sampled radii beside worst-direction ones, and what each node gets.",
            cells=_radii,
            draw=claims.draw_radii,
            seeds=3,
            minutes=2,
            quick=("train.epochs=2",),
            derive=_factors,
        ),
        Reproduction(
            name="gems2019_ellipsoids",
            paper=PAPER,
            where="Table 5, a check",
            about="Which point of the ellipsoids: the average, ours, or the released descent's?",
            cells=_points,
            draw=claims.draw_points,
            seeds=3,
            minutes=8,
            quick=("train.epochs=2",),
            judge=_judge_points,
            scaled=_FEATURES,
        ),
        Reproduction(
            name="gems2019_output_layer",
            paper=PAPER,
            where="Tables 2 and 6, a check",
            about="What the start and the length of the output layer's training do to GEMS.",
            cells=_output_layers,
            draw=claims.draw_output_layers,
            seeds=3,
            minutes=20,
            quick=("train.epochs=2",),
            scaled=_FEATURES,
        ),
    )


REPRODUCTIONS = _checks()
