"""What ``make demo`` shows: several ways of federated learning, compared on the same data.

Scikit-learn's digits on five nodes with two labels each; every strategy that there is; then the
table, the plots and the page. Finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from simulations.config import compose_config
from simulations.report.write_report import build_report
from simulations.run import run as run_one

# Label in the report, and how to get there.
METHODS = {
    "local": ["strategy=local"],
    "global": ["strategy=global"],
    "one_shot_average": ["strategy=one_shot_average"],
    "ensemble (majority)": ["strategy=ensemble"],
    "ensemble (softmax mean)": ["strategy=ensemble", "strategy.vote=softmax_mean"],
    "gems (ball)": ["strategy=gems", "strategy/space=ball"],
    "gems (cone)": ["strategy=gems", "strategy.verify=true"],
    "gems (cone, rank 5)": ["strategy=gems", "strategy.space.rank=5"],
    "gems, layer by layer": [
        "strategy=gems_layerwise",
        "model=mlp",
        "strategy.merge=verified",
        "train.epochs=10",
    ],
    "dynamic averaging": [
        "strategy=dynamic",
        "strategy.delta=2.0",
        "strategy.condition=total",
        "strategy.augmentation=all",
        "rounds=100",
        "stream.batches_per_round=5",
        "evaluate_every=10",
    ],
    "periodic averaging": [
        "strategy=periodic",
        "strategy.b=4",
        "rounds=100",
        "stream.batches_per_round=5",
        "evaluate_every=10",
    ],
    "fedavg": ["strategy=fedavg", "rounds=30", "train.epochs=5"],
}


def run(
    overrides: Sequence[str], output: Path, console: Console, seeds: Sequence[int] = (0, 1, 2)
) -> Path:
    """Run the demo; return the path of its report."""
    console.print(
        "[bold]Digits on five nodes with two labels each[/bold]. "
        "Each node sees a fifth of the classes; the model must know all ten.\n"
    )
    for label, words in METHODS.items():
        for seed in seeds:
            config = compose_config([*words, *overrides, f"seed={seed}", f"label='{label}'"])
            run_one(config, output / config.run_name(), console)
    console.print()
    return build_report([output], output / "report", console)
