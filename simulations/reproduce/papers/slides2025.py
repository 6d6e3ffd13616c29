"""The slides of 2025: how many rounds FedAvg needs (McMahan et al., Table 1)."""

from __future__ import annotations

from simulations.reproduce.papers import table_figures
from simulations.reproduce.papers.findings import published
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope

PAPER = "Slides 2025"
NAME = "slides_fedavg"
# Rows that two cores run in an hour: the published rounds times the clients and their batches.
TWO_CORES = {
    "2NN, C = 0": ("IID, B = 10", "IID, B = ∞", "non-IID, B = 10", "non-IID, B = ∞"),
    "2NN, C = 0.1": ("IID, B = 10", "IID, B = ∞", "non-IID, B = 10", "non-IID, B = ∞"),
    "2NN, C = 0.2": ("IID, B = 10",),
    "2NN, C = 0.5": ("IID, B = 10",),
    "2NN, C = 1": ("IID, B = 10",),
    "CNN, C = 0": ("IID, B = 10",),
}
# The slides do not say which were used; these are common values, not tuned.
RATES = {"2NN, B = 10": 0.1, "2NN, B = ∞": 0.3, "CNN, B = 10": 0.05}


def _rows(scope: Scope) -> list[Cell]:
    cells = []
    for setting, columns in TWO_CORES.items():
        if scope.quick and setting not in ("2NN, C = 0", "2NN, C = 0.1"):
            continue
        for column in columns:
            if scope.quick and column.startswith("non-IID"):
                continue
            cells.append(Cell(setting, column, _overrides(scope, setting, column), ("rounds",)))
    return cells


def _overrides(scope: Scope, setting: str, column: str) -> tuple[str, ...]:
    model, _, fraction = setting.partition(", C = ")
    batch = column.partition("B = ")[2]
    chosen = [
        f"dataset={scope.dataset('mnist')}",
        f"partition={'iid' if column.startswith('IID') else 'shards'}",
        f"strategy.fraction_train={fraction}",
        # A share has 495 training examples, so that this is the whole of it.
        f"train.batch_size={10 if batch == '10' else 100000}",
        f"train.lr={RATES[f'{model}, B = {batch}']}",
    ]
    if model == "CNN":
        chosen += ["model=cnn", "train.epochs=5", "stop.target=0.99"]
    known = published(NAME).get((setting, column, "rounds"))
    # Twice the published number is enough to see that it is not reached.
    most = 2 * int(known.mean) if known else 200
    most = min(most, 150) if scope.quick else most
    return (*chosen, f"rounds={most}")


def not_run() -> list[str]:
    """Return the published cells that are not run on two cores."""
    return [
        f"{setting}, {column}"
        for setting, column, _ in published(NAME)
        if column not in TWO_CORES.get(setting, ())
    ]


REPRODUCTIONS = (
    Reproduction(
        name=NAME,
        paper=PAPER,
        where="Table 1 (McMahan et al.)",
        about="Rounds that FedAvg needs to 97 % (2NN) or 99 % (CNN) on MNIST, 100 clients.",
        cells=_rows,
        draw=table_figures.rounds_bars,
        seeds=1,
        minutes=60,
        quick=("stop.target=0.9",),
        scaled=(
            "The CNN is that of Kamp et al. (1.2 million weights instead of 1.7). Not run, as it "
            f"does not fit two cores: {'; '.join(not_run())}."
        ),
    ),
)
