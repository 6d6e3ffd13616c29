"""Why FedAvg needs other numbers of rounds than published: one thing changed at a time.

``python -m simulations.reproduce fedavg_causes``: the rounds to 97 % of McMahan's 2NN with a random
division, batches of 10 and ten clients a round. Changed are the learning rate, the initial weights,
and the examples of a client. Behind sentences of ``papers/explanations.yaml``; what is changed here
is no choice for the table.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from simulations.config import compose_config
from simulations.report.tables import TextTable, print_table
from simulations.reproduce.papers.fedavg_cells import TableCell, chosen_rate, grid_rate
from simulations.reproduce.papers.run_measures import MEASURES
from simulations.run import run as run_one

COLUMN = "IID, B = 10"
SETTING = "2NN, C = 0.1"
# Twice the published rounds.
MOST_ROUNDS = 174
# Steps of the grid below the rate that was searched.
SLOWER = (1, 2, 3)


def variants() -> dict[str, tuple[str, ...]]:
    """Return what is changed, by name, as overrides of the cell's run."""
    rate = chosen_rate(TableCell.at(SETTING, COLUMN))
    changed: dict[str, tuple[str, ...]] = {
        f"as in the table, rate {rate:g}": (),
        "PyTorch's initial weights": ("model.initial=torch",),
        "495 examples a client": ("validation=0.175",),
    }
    for steps in SLOWER:
        slower = rate * grid_rate(-steps)
        changed[f"rate {slower:.3g}"] = (f"train.lr={slower:.4g}",)
    return changed


def run(overrides: Sequence[str], output: Path, console: Console, seeds: Sequence[int]) -> Path:
    """Run the study; return the path of its numbers."""
    found: dict[str, list[float | None]] = {}
    path = output / "fedavg-causes.json"
    cell = TableCell.at(SETTING, COLUMN)
    common = [
        "experiment=slides_fedavg",
        *cell.overrides(chosen_rate(cell)),
        f"rounds={MOST_ROUNDS}",
        "progress=false",
    ]
    for name, changed in variants().items():
        words = [*common, *changed, *overrides]
        found[name] = [_rounds([*words, f"seed={seed}"], output) for seed in seeds]
        # After each, so that what is found is there if the rest is interrupted.
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    _show(found, console)
    return path


def _rounds(overrides: Sequence[str], output: Path) -> float | None:
    """Return the round in which the target was met on test data; nothing if it never was."""
    config = compose_config(overrides)
    folder = output / config.run_name()
    return MEASURES["rounds"](run_one(config, folder, Console(quiet=True)), folder)


def _show(found: dict[str, list[float | None]], console: Console) -> None:
    rows = []
    for name, values in found.items():
        reached = [each for each in values if each is not None]
        mean = f"{statistics.fmean(reached):.0f}" if reached else "–"
        each = ", ".join("not reached" if v is None else f"{v:.0f}" for v in values)
        rows.append((name, mean, each))
    headings = ("changed", "rounds", "seed by seed")
    print_table(TextTable.of(headings, rows), console, title=f"{SETTING}, {COLUMN}: rounds to 97 %")
