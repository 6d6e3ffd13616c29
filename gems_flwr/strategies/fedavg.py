"""Federated averaging (McMahan et al., 2017) on the shared round loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gems_flwr import wire
from gems_flwr.averaging import Arrays, weighted_mean
from gems_flwr.strategies.exchange import Answer
from gems_flwr.strategies.loop import RoundLoop


@dataclass(kw_only=True, eq=False)
class FedAvg(RoundLoop):
    """Average the models of a fraction of the nodes, round after round.

    On the same replies in the same order the result equals that of Flower's own FedAvg bit for
    bit, except that integer arrays stay integers.

    Parameters
    ----------
    weighted : bool, default True
        Whether a node counts by its number of examples, or all count the same.
    **loop
        See `RoundLoop`; McMahan's C is `fraction_train`.
    """

    weighted: bool = True

    def aggregate(self, answers: Sequence[Answer[wire.ModelReply]]) -> Arrays:
        """Return the (weighted) mean of the nodes' models."""
        weights = [a.value.num_examples if self.weighted else 1.0 for a in answers]
        return weighted_mean([a.value.arrays for a in answers], weights)
