"""McMahan et al. 2016 (the slides of 2025, Table 1): how many rounds FedAvg needs on MNIST.

Rates were searched on validation data with a grid of three to a decade, for C = 0 and C = 0.1; a
larger C has the rate of C = 0.1.
"""

from __future__ import annotations

from functools import partial

from simulations.reproduce.findings import published
from simulations.reproduce.pictures import draw_methods
from simulations.reproduce.study import Cell, Scope, Study

NAME = "slides_fedavg"
# What was run, with how many seeds: three where a run takes at most a minute of a core.
SEEDS = {
    "2NN, C = 0": {"IID, B = ∞": 3, "IID, B = 10": 3, "non-IID, B = 10": 1},
    "2NN, C = 0.1": {"IID, B = ∞": 1, "IID, B = 10": 3, "non-IID, B = 10": 3},
    "2NN, C = 0.2": {"IID, B = 10": 3},
    "2NN, C = 0.5": {"IID, B = 10": 1},
    "2NN, C = 1": {"IID, B = 10": 1},
}
# The best of the search, by column: for C = 0, and for C = 0.1 and above.
RATES = {
    "IID, B = ∞": (0.4642, 1.0),
    "IID, B = 10": (0.1, 0.2154),
    "non-IID, B = 10": (0.02154, 0.2154),
}
# Rounds between two looks at the test images. With all examples in a batch of a random division the
# curve is smooth and a thousand rounds long, and a look takes four times as long as a client.
LOOKS = {"IID, B = ∞": 10}
# More than any client has: one batch of all.
_WHOLE = 100000


def _cells(scope: Scope) -> list[Cell]:
    settings = scope.pick([*SEEDS], ("2NN, C = 0", "2NN, C = 0.1"))
    return [
        Cell(setting, column, _overrides(scope, setting, column), ("rounds",), seeds=seeds)
        for setting in settings
        for column, seeds in SEEDS[setting].items()
        if not (scope.quick and column.startswith("non-IID"))
    ]


def _overrides(scope: Scope, setting: str, column: str) -> tuple[str, ...]:
    fraction = setting.partition(", C = ")[2]
    rate = RATES[column][0 if fraction == "0" else 1]
    # Twice the published number is enough to see that it is not reached.
    most = 2 * int(published(NAME)[setting, column, "rounds"].mean)
    return (
        *(scope.data("mnist") if scope.stand_in else ()),
        f"partition={'iid' if column.startswith('IID') else 'shards'}",
        f"strategy.fraction_train={fraction}",
        f"train.batch_size={10 if column.endswith('10') else _WHOLE}",
        f"train.lr={rate:g}",
        f"rounds={min(most, 150) if scope.quick else most}",
        f"evaluate_every={LOOKS.get(column, 1)}",
    )


STUDIES = (
    Study(
        name=NAME,
        experiment=NAME,
        paper="FedAvg 2016",
        where="Table 1",
        about="Rounds that FedAvg needs to 97 % on MNIST with 100 clients, a 2NN.",
        cells=_cells,
        draw=partial(draw_methods, quantities=("rounds",)),
        seeds=3,
        minutes=50,
        quick=("stop.target=0.9",),
        differs=(
            "A client trains on 599 of its 600 examples; with B = ∞ and a random division every "
            "tenth round is looked at; some cells have one seed. Not run: the other cells of the "
            "2NN, and the CNN, of which one takes from an hour to days on one core."
        ),
    ),
)
