"""Learning rates for the multi-model experiment, chosen without a look at the test data.

A rule's rate is the one with the highest accuracy on the nodes' own validation parts, pooled, on a
seed that no result is made with; the same grid for all rules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from simulations.config import compose_config
from simulations.report.tables import TextTable, print_table
from simulations.reproduce.papers.multi_model_names import RULES
from simulations.run import run as run_one

RATES = (0.01, 0.03, 0.1, 0.3)
SEED = 100


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the grid, print the accuracies on validation data; return the path of the numbers."""
    found = {rule: [_score(rule, rate, overrides, output) for rate in RATES] for rule in RULES}
    lines = [
        (f"{rate:g}", *(f"{found[rule][index]:.4f}" for rule in RULES))
        for index, rate in enumerate(RATES)
    ]
    best = [f"{RATES[scores.index(max(scores))]:g}" for scores in found.values()]
    table = TextTable.of(("learning rate", *RULES), [*lines, ("best", *best)])
    print_table(table, console, title="accuracy on the nodes' validation data")
    path = output / "multi-model-rates.json"
    path.write_text(json.dumps({"rates": RATES, **found}, indent=1))
    return path


def _score(rule: str, rate: float, overrides: Sequence[str], output: Path) -> float:
    """Return the mean over the models of their accuracy on all nodes' validation parts."""
    config = compose_config(
        [
            "experiment=multi_model_slides",
            "backend=silent",
            *overrides,
            f"seed={SEED}",
            f"train.lr={rate}",
            f"strategy.sampling={rule}",
            "progress=false",
            "evaluate_on=validation",
            f"evaluate_every={10**6}",
        ]
    )
    result = run_one(config, output / config.run_name(), Console(quiet=True))
    return float(result["accuracy"])
