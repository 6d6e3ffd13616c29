"""The cells of the slides' Table 1 (McMahan et al. 2017): their options, rates and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

# What `python -m simulations.reproduce fedavg_rates` found, on validation data.
RATES = Path(__file__).with_name("fedavg_rates.yaml")
# Steps of the grid of rates in a decade: McMahan et al. have 3, or 6.
STEPS_PER_DECADE = 3
_WHOLE = 100000
_CLIENTS = 100
# Measured on one core of two, in seconds: a client's pass over its data, and the 10,000 test
# images once.
_PASS = {"2NN, B = 10": 0.023, "2NN, B = ∞": 0.0125, "CNN, B = 10": 0.9, "CNN, B = ∞": 0.72}
_EVALUATION = {"2NN": 0.065, "CNN": 4.2}
_EPOCHS = {"2NN": 1, "CNN": 5}


@dataclass(frozen=True)
class TableCell:
    """One cell of the table.

    Parameters
    ----------
    network : str
        ``"2NN"`` or ``"CNN"``.
    fraction : str
        C, the share of the 100 clients that train in a round; 0 is one of them.
    iid : bool
        Whether the examples are divided at random, or sorted by label into 200 shards.
    batch : str
        B: ``"10"``, or ``"∞"`` for all examples of a client.
    """

    network: str
    fraction: str
    iid: bool
    batch: str

    @classmethod
    def at(cls, setting: str, column: str) -> TableCell:
        """Return the cell of a row and a column: ``2NN, C = 0.1`` and ``IID, B = 10``, say."""
        network, _, fraction = setting.partition(", C = ")
        batch = column.partition("B = ")[2]
        return cls(network, fraction, column.startswith("IID"), batch)

    @property
    def setting(self) -> str:
        """The row."""
        return f"{self.network}, C = {self.fraction}"

    @property
    def column(self) -> str:
        """The column."""
        return f"{'IID' if self.iid else 'non-IID'}, B = {self.batch}"

    @property
    def clients(self) -> int:
        """How many train in a round."""
        return max(1, round(float(self.fraction) * _CLIENTS))

    def overrides(self, rate: float) -> tuple[str, ...]:
        """Return what a run of the cell has beside ``experiment=slides_fedavg``."""
        chosen: tuple[str, ...] = (
            f"partition={'iid' if self.iid else 'shards'}",
            f"strategy.fraction_train={self.fraction}",
            f"train.batch_size={10 if self.batch == '10' else _WHOLE}",
            f"train.lr={rate:.4g}",
        )
        if self.network == "CNN":
            chosen += ("model=mcmahan_cnn", "train.epochs=5", "stop.target=0.99")
        return chosen

    def minutes(self, rounds: float, evaluations: float | None = None) -> float:
        """Return what a run takes on one core: an estimate from measured steps."""
        training = self.clients * _EPOCHS[self.network] * _PASS[f"{self.network}, B = {self.batch}"]
        judged = rounds if evaluations is None else evaluations
        return (rounds * training + judged * _EVALUATION[self.network]) / 60


def grid_rate(step: int) -> float:
    """Return a rate of the grid: 10 to the power of a third of a whole number."""
    return 10 ** (step / STEPS_PER_DECADE)


def chosen_rate(cell: TableCell) -> float:
    """Return the rate that the search found for a cell, or for the nearest that was searched.

    Of cells with the same network, division and batch size it is the one with the largest C that
    is no larger than the cell's; without any, one of the same network and batch size.

    Raises
    ------
    KeyError
        If nothing like it was searched.
    """
    searched = [(TableCell.at(*name.split(" | ")), entry["rate"]) for name, entry in kept().items()]
    for divided_alike in (True, False):
        near = [
            (float(other.fraction), float(rate))
            for other, rate in searched
            if (other.network, other.batch) == (cell.network, cell.batch)
            and float(other.fraction) <= float(cell.fraction)
            and (other.iid == cell.iid or not divided_alike)
        ]
        if near:
            return max(near)[1]
    raise KeyError(f"no rate was searched for {cell.setting}, {cell.column} or a cell like it")


@cache
def kept() -> Mapping[str, Mapping[str, Any]]:
    """Return the kept table of the search: what was tried for each cell, and what was chosen."""
    content: Any = OmegaConf.to_container(OmegaConf.load(RATES))
    return content  # type: ignore[no-any-return]
