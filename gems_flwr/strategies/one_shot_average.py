"""One round of averaging: the "naive average" baseline of the GEMS papers, tuned or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gems_flwr.server.exchange import Answer
from gems_flwr.server.public_tuning import TunesOnPublicData
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.typing import Arrays
from gems_flwr.wire.model_replies import ModelReply


@dataclass(kw_only=True, eq=False)
class OneShotAverage(TunesOnPublicData, FedAvg):
    """Let every node train to the end, average once, and fine-tune the average if asked to.

    Parameters
    ----------
    weighted, robust, liars, trim
        See `FedAvg`.
    **tuning
        See `TunesOnPublicData`.
    """

    rounds_needed: ClassVar[int | None] = 1

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Return the mean of the nodes' models, fine-tuned."""
        return self.tuned(super().aggregate(answers))
