"""What ``make demo`` shows: several ways of federated learning, compared on the same data.

Scikit-learn's digits on five nodes with two labels each; every strategy that there is; then the
table, the plots and the page. Finished runs are not repeated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from gems_flwr.errors import GemsError
from simulations.config import compose_config, explain
from simulations.report.write_report import build_report
from simulations.run import leave, run

FOLDER = Path("runs/demo")

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
SEEDS = (0, 1, 2)


def main() -> int:
    """Run the demo; return the exit status."""
    console = Console()
    console.print(
        "[bold]Digits on five nodes with two labels each[/bold], three seeds. "
        "Each node sees a fifth of the classes; the model must know all ten.\n"
    )
    try:
        for label, overrides in METHODS.items():
            for seed in SEEDS:
                config = compose_config([*overrides, f"seed={seed}", f"label='{label}'"])
                run(config, FOLDER / config.run_name(), console)
        console.print()
        build_report([FOLDER], FOLDER / "report", console)
    except KeyboardInterrupt:
        leave(console, "Interrupted; `make demo` goes on from here.")
    except (GemsError, OSError) as error:
        console.print(explain(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
