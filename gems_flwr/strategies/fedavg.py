"""Federated averaging (McMahan et al., 2017) on the shared round loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from gems_flwr.averaging.robust_rules import combine
from gems_flwr.server.exchange import Answer
from gems_flwr.server.model_averaging import AveragesModels, Outvoted
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import Arrays
from gems_flwr.wire.model_replies import ModelReply


@dataclass(kw_only=True, eq=False)
class FedAvg(AveragesModels):
    """Average the models of a fraction of the nodes, round after round.

    On the same replies in the same order the result equals that of Flower's own FedAvg bit for
    bit, except that integer arrays stay integers; with `robust` that of Flower's FedMedian,
    FedTrimmedAvg, Krum, MultiKrum or Bulyan (see `averaging.robust_rules` for what differs).

    Parameters
    ----------
    weighted : bool, default True
        Whether a node counts by its number of examples, or all count the same.
    **averaging
        See `AveragesModels`; McMahan's C is `fraction_train`.

    Examples
    --------
    Nodes whose training adds their number to each weight:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import FedAvg, InProcessGrid
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> strategy = FedAvg(min_nodes=3, seed=1)
    >>> grid = InProcessGrid(app, nodes=3)
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    >>> result.arrays.to_numpy_ndarrays()
    [array([2., 2.])]
    >>> result.traffic.messages_up
    6
    """

    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._outvoted = Outvoted()

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Play one round, and tell whom the rule did not believe."""
        self._outvoted = Outvoted.from_details(state.details)
        outcome = super().play_round(server_round, state, grid, train_config, evaluate_config)
        return dataclasses.replace(outcome, details=self._outvoted.to_details(self.rule))

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Return the (weighted) mean of the nodes' models, or what the rule makes of them."""
        weights = [a.value.num_examples if self.weighted else 1.0 for a in answers]
        combined = combine(self.rule, [a.value.arrays for a in answers], weights)
        self._outvoted = self._outvoted.after(
            self._exchange.server_round,
            self.rule,
            applied=combined.applied,
            left_out=[answers[index].node for index in combined.left_out],
            checked=combined.checked,
        )
        return combined.arrays
