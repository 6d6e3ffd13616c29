"""What ``make demo`` shows: several ways of federated learning, compared on the same data.

Scikit-learn's digits on five nodes with two labels each; every kind of strategy that there is; then
the table, an HTML report with plots, and the small sister of the frontier: accuracy against bytes,
below the best model that pooled data allow. Finished runs are not repeated.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console

from simulations.report import build_report
from simulations.report.plotting import save
from simulations.reproduce.findings import Findings
from simulations.reproduce.studies.frontier import (
    CONES,
    FLOWER,
    LAYERS,
    LIFTED,
    PEERS,
    POOLED,
    REFINED,
    curve_of,
    draw,
    run_one,
)
from simulations.reproduce.study import Scope

_STREAM = ("rounds=100", "stream.batches_per_round=5", "evaluate_every=10")
# Label in the report, and how to get there.
METHODS: dict[str, tuple[str, ...]] = {
    "local": ("strategy=local",),
    "global": ("strategy=global",),
    "one_shot_average": ("strategy=one_shot_average",),
    "ensemble (majority)": ("strategy=ensemble",),
    "ensemble (softmax mean)": ("strategy=ensemble", "strategy.vote=softmax_mean"),
    "gems (ball)": ("strategy=gems", "strategy/space=ball"),
    "gems (cone)": ("strategy=gems", "strategy.verify=true"),
    "gems (cone, rank 5)": ("strategy=gems", "strategy.space.rank=5"),
    "gems (cone, refined)": ("strategy=gems", "strategy.refine=5"),
    "gems (cone on filters)": ("strategy=gems", "model=random_filters"),
    "gems, layer by layer": ("strategy=gems_layerwise", "model=mlp", "train.epochs=10"),
    "dynamic averaging": (
        *("strategy=dynamic", "strategy.delta=2.0", "strategy.condition=total"),
        *("strategy.augmentation=all", *_STREAM),
    ),
    "periodic averaging": ("strategy=periodic", "strategy.b=4", *_STREAM),
    "fedavg": ("strategy=fedavg", "rounds=30", "train.epochs=5"),
    # Rates that the quick frontier chose on the digits' validation data.
    "fedadam": (
        *("strategy=fedadam", "rounds=30", "train.lr=1", "train.batch_size=4096"),
        "strategy.inner.eta=0.1",
    ),
}
# Which of them are in the picture of accuracy against bytes, and among whom.
IN_PICTURE = {
    "one_shot_average": PEERS,
    "gems (cone)": CONES,
    "gems (cone, rank 5)": CONES,
    "gems (cone, refined)": REFINED,
    "gems (cone on filters)": LIFTED,
    "gems, layer by layer": LAYERS,
    "fedavg": FLOWER,
    "fedadam": FLOWER,
    "global": POOLED,
}
SEEDS = 3


def run_demo(scope: Scope, console: Console) -> Path:
    """Run the demo; return the path of its report."""
    console.print(
        "[bold]Digits on five nodes with two labels each[/bold]. "
        "Each node sees a fifth of the classes; the model must know all ten.\n"
    )
    output = scope.output / "demo"
    found = Findings("demo", scope.quick, False, [0], [])
    for label, words in METHODS.items():
        for seed in range(scope.seeds or (1 if scope.quick else SEEDS)):
            chosen = (*words, *scope.common, f"seed={seed}", f"label='{label}'")
            done = run_one(chosen, output, console)
            if seed == 0 and label in IN_PICTURE:
                # In the picture the pooled model goes by what it is.
                run = dataclasses.replace(
                    done, label="pooled optimum" if label == "global" else label
                )
                found.findings += curve_of(run, IN_PICTURE[label], run.method)
    console.print()
    report = build_report([output], output / "report", console)
    picture = output / "report" / "frontier.png"
    save(draw(found), picture)
    console.print(f"Accuracy against bytes: {picture}", soft_wrap=True, highlight=False)
    return report
