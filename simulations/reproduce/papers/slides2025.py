"""The slides of 2025: how many rounds FedAvg needs (McMahan et al., Table 1)."""

from __future__ import annotations

from simulations.reproduce.papers import table_figures
from simulations.reproduce.papers.fedavg_cells import TableCell, chosen_rate
from simulations.reproduce.papers.findings import published
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope

PAPER = "Slides 2025"
NAME = "slides_fedavg"
# What was run, with how many seeds: three where a run takes at most a minute of a core.
SEEDS = {
    "2NN, C = 0": {"IID, B = ∞": 3, "IID, B = 10": 3, "non-IID, B = 10": 1},
    "2NN, C = 0.1": {"IID, B = ∞": 1, "IID, B = 10": 3, "non-IID, B = 10": 3},
    "2NN, C = 0.2": {"IID, B = 10": 3},
    "2NN, C = 0.5": {"IID, B = 10": 1},
    "2NN, C = 1": {"IID, B = 10": 1},
}
# Rounds between two looks at the test images. With all examples in a batch of a random division the
# curve is smooth and a thousand rounds long, and a look takes four times as long as a client.
LOOKS = {"IID, B = ∞": 10}


def _rows(scope: Scope) -> list[Cell]:
    cells = []
    for setting, columns in SEEDS.items():
        if scope.quick and setting not in ("2NN, C = 0", "2NN, C = 0.1"):
            continue
        for column, seeds in columns.items():
            if scope.quick and column.startswith("non-IID"):
                continue
            overrides = _overrides(scope, setting, column)
            group = f"{setting}, {column}"
            cells.append(Cell(setting, column, overrides, ("rounds",), group=group, seeds=seeds))
    return cells


def _overrides(scope: Scope, setting: str, column: str) -> tuple[str, ...]:
    cell = TableCell.at(setting, column)
    known = published(NAME)[setting, column, "rounds"]
    # Twice the published number is enough to see that it is not reached.
    most = 2 * int(known.mean)
    return (
        f"dataset={scope.dataset('mnist')}",
        *cell.overrides(chosen_rate(cell)),
        f"rounds={min(most, 150) if scope.quick else most}",
        f"evaluate_every={LOOKS.get(column, 1)}",
    )


def not_run() -> list[str]:
    """Return the published cells that are not run, with what one run would take on a core."""
    left = []
    for (setting, column, _), known in published(NAME).items():
        if column not in SEEDS.get(setting, ()):
            minutes = TableCell.at(setting, column).minutes(known.mean)
            length = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.0f} hours"
            left.append(f"{setting}, {column} ({length})")
    return left


REPRODUCTIONS = (
    Reproduction(
        name=NAME,
        paper=PAPER,
        where="Table 1 (McMahan et al.)",
        about="Rounds that FedAvg needs to 97 % (2NN) or 99 % (CNN) on MNIST, 100 clients.",
        cells=_rows,
        draw=table_figures.rounds_bars,
        seeds=3,
        minutes=6,
        quick_minutes=0.3,
        quick=("stop.target=0.9",),
        scaled=(
            "a client trains on 599 of its 600 examples; rates are searched for C = 0 and C = 0.1, "
            "and larger C have that of C = 0.1; with B = ∞ and a random division every tenth round "
            "is looked at. Some cells have one seed. Not run, with what the published rounds would "
            f"take on one core: {'; '.join(not_run())}. The five that the paper did not reach are "
            "not run either. The CNN with C = 0, IID, B = 10 was begun with the rate 0.2154, which "
            "a search of six rounds had chosen, and given up after 35 rounds at 98.0 %; the kept "
            "search has twelve."
        ),
        remembers=False,
    ),
)
