"""Learning rates for the slides' FedAvg table, searched as McMahan et al. did.

``python -m simulations.reproduce fedavg_rates``. They optimise the rate for every cell of their
tables on a multiplicative grid, and see to it that the best is not at the grid's edge. Here the
grid has three rates in a decade, and the search walks on it: from a common value towards what is
better, until the best has a worse neighbour on both sides. A candidate plays a fixed number of
rounds, a part of what the paper needs, and is judged by the best accuracy so far (their curves are
made monotone) on a tenth of the nodes' examples, which nobody trains on and which are no test
data. The seed is one that no result is made with.

The table that it writes is kept beside the published numbers, as ``papers/fedavg_rates.yaml``,
which is where `simulations.reproduce.papers.slides2025` reads the rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from gems_flwr.errors import RoundFailedError
from simulations.config import RunConfig, compose_config
from simulations.report.tables import TextTable, print_table
from simulations.reproduce.papers.fedavg_cells import RATES, TableCell, grid_rate
from simulations.run import run as run_one

SEED = 100
# What a search may cost: the best is then at the edge, and the table says so.
MOST_RATES = 7


@dataclass(frozen=True)
class Search:
    """A cell whose rate is searched.

    Parameters
    ----------
    setting, column : str
        Where it stands in the table.
    rounds : int
        What a candidate plays.
    start : int
        The grid's first step.
    looks : int
        How often a candidate is judged.
    """

    setting: str
    column: str
    rounds: int
    start: int
    looks: int = 50


# Larger C take the rate of C = 0.1, where the mean of ten clients has little noise left.
SEARCHES = (
    Search("2NN, C = 0", "IID, B = 10", 120, -3),
    Search("2NN, C = 0.1", "IID, B = 10", 40, -3),
    Search("2NN, C = 0", "IID, B = ∞", 300, -1),
    # Six rounds chose 0.2154, with which a run of the table was at 98.0 % after 35 rounds.
    Search("CNN, C = 0", "IID, B = 10", 12, -3, looks=4),
    Search("2NN, C = 0.1", "non-IID, B = 10", 120, -4),
    Search("2NN, C = 0.1", "IID, B = ∞", 120, -1),
    Search("2NN, C = 0", "non-IID, B = 10", 300, -5),
)


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Search all rates; return the path of the table."""
    path = output / RATES.name
    table: dict[str, dict[str, object]] = {}
    for search in SEARCHES:
        rounds = _config(search, search.start, overrides).rounds
        tried = climb(partial(_score, search, overrides, output), search.start)
        best = max(tried, key=tried.__getitem__)
        table[f"{search.setting} | {search.column}"] = {
            "rounds": rounds,
            "rate": _rounded(best),
            "bracketed": {best - 1, best + 1} <= set(tried),
            "validation accuracy": {_rounded(s): round(tried[s], 4) for s in sorted(tried)},
        }
        _show(f"{search.setting}, {search.column}, {rounds} rounds", tried, console)
        # After each, so that what is found is there if the rest is interrupted.
        path.write_text(_HEADER + OmegaConf.to_yaml(OmegaConf.create(table)))
    console.print(f"Rates: {path}; kept as {RATES}", soft_wrap=True)
    return path


_HEADER = """# Rates for slides_fedavg, by accuracy on validation data after some rounds; written by
#   python -m simulations.reproduce fedavg_rates
"""


def climb(score: Callable[[int], float], start: int, most: int = MOST_RATES) -> dict[int, float]:
    """Look for the best of a row of candidates that first gets better and then worse.

    Parameters
    ----------
    score : callable
        Gets a candidate's number, returns how good it is.
    start : int
        The first candidate.
    most : int
        How many may be tried, at least 1.

    Returns
    -------
    dict of int to float
        All that were tried, with their scores: the best with both its neighbours, unless ``most``
        came first.
    """
    tried = {start: score(start)}
    while len(tried) < most:
        best = max(tried, key=tried.__getitem__)
        new = [step for step in (best + 1, best - 1) if step not in tried]
        if not new:
            break
        tried[new[0]] = score(new[0])
    return tried


def _config(search: Search, step: int, overrides: Sequence[str]) -> RunConfig:
    """Return the run of a candidate."""
    cell = TableCell.at(search.setting, search.column)
    return compose_config(
        [
            "experiment=slides_fedavg",
            *cell.overrides(grid_rate(step)),
            f"rounds={search.rounds}",
            f"evaluate_every={max(1, search.rounds // search.looks)}",
            *overrides,
            f"seed={SEED}",
            "validation=0.1",
            "evaluate_on=validation",
            "stop.target=null",
            "progress=false",
        ]
    )


def _score(search: Search, overrides: Sequence[str], output: Path, step: int) -> float:
    """Return the best accuracy on validation data; 0 for a model that ran away."""
    config = _config(search, step, overrides)
    folder = output / config.run_name()
    try:
        run_one(config, folder, Console(quiet=True))
    except RoundFailedError:
        return 0.0
    records = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return max(float(each["server_metrics"].get("accuracy", 0.0)) for each in records)


def _rounded(step: int) -> float:
    return float(f"{grid_rate(step):.4g}")


def _show(title: str, tried: dict[int, float], console: Console) -> None:
    rows = [(f"{grid_rate(step):.3g}", f"{tried[step]:.4f}") for step in sorted(tried)]
    headings = ("learning rate", "best validation accuracy")
    print_table(TextTable.of(headings, rows), console, title=title)
