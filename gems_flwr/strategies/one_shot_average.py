"""One round of averaging: the "naive average" baseline of the GEMS papers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gems_flwr.strategies.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class OneShotAverage(FedAvg):
    """Let every node train to the end, then average once."""

    rounds_needed: ClassVar[int | None] = 1
