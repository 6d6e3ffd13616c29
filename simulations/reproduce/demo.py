"""What ``make demo`` shows: several ways of federated learning, compared on the same data.

Scikit-learn's digits on five nodes with two labels each; every strategy that there is; then the
table, the plots and the page, and the small sister of the frontier (`studies.frontier`): accuracy
against bytes, below the best model that pooled data allow. Finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.errors import HydraException
from rich.console import Console

from simulations.config import ConfigError, compose_config
from simulations.report.byte_curves import curve_of
from simulations.report.runs import Run, read_runs
from simulations.report.write_report import build_report
from simulations.reproduce.studies.frontier import Frontier, write_picture
from simulations.reproduce.studies.frontier_methods import (
    CONES,
    FLOWER,
    LAYERS,
    LIFTED,
    PEERS,
    REFINED,
)
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
    # Rates that the quick frontier chose on the digits' validation data.
    "fedadam": [
        "strategy=fedadam",
        "rounds=30",
        "train.lr=1",
        "train.batch_size=4096",
        "strategy.inner.eta=0.1",
    ],
}
# What has options that may not be there, or a model of its own: run if they are.
FURTHER = {
    "gems (cone, refined)": ["strategy=gems", "strategy.refine=5"],
    "gems (cone on filters)": ["strategy=gems", "model=random_filters"],
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
}


def run(
    overrides: Sequence[str], output: Path, console: Console, seeds: Sequence[int] = (0, 1, 2)
) -> Path:
    """Run the demo; return the path of its report."""
    console.print(
        "[bold]Digits on five nodes with two labels each[/bold]. "
        "Each node sees a fifth of the classes; the model must know all ten.\n"
    )
    firsts: dict[str, Run] = {}
    for label, words in (METHODS | FURTHER).items():
        for seed in seeds:
            try:
                config = compose_config([*words, *overrides, f"seed={seed}", f"label='{label}'"])
            except (ConfigError, HydraException):
                if label in METHODS:
                    raise
                continue
            folder = output / config.run_name()
            run_one(config, folder, console)
            [done] = read_runs([folder]).runs
            firsts.setdefault(label, done)
    console.print()
    report = build_report([output], output / "report", console)
    picture = write_picture(_frontier(firsts), output / "report")
    console.print(f"Accuracy against bytes: {picture}", soft_wrap=True, highlight=False)
    return report


def _frontier(firsts: Mapping[str, Run]) -> Frontier:
    """Return the curves of every method's first run."""
    curves = []
    for label, family in IN_PICTURE.items():
        run = firsts.get(label)
        curve = None if run is None else curve_of(run, label, family)
        if curve is not None:
            curves.append(curve.at_its_end() if family == LAYERS else curve)
    pooled = firsts["global"]
    levels = {} if pooled.accuracy is None else {"pooled optimum": pooled.accuracy}
    setting = pooled.setting
    where = f"{setting.dataset} · {setting.partition} · {setting.nodes} nodes"
    return Frontier(tuple(curves), levels, {}, f"{where} · seed {pooled.seed}")
