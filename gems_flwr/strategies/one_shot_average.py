"""One round of averaging: the "naive average" baseline of the GEMS papers, tuned or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gems_flwr.server.exchange import Answer
from gems_flwr.server.model_averaging import AveragesReplies
from gems_flwr.server.public_tuning import TunesOnPublicData
from gems_flwr.typing import Arrays
from gems_flwr.wire.model_replies import ModelReply


@dataclass(kw_only=True, eq=False)
class OneShotAverage(TunesOnPublicData, AveragesReplies):
    """Let every node train to the end, average once, and fine-tune the average if asked to.

    Parameters
    ----------
    weighted, robust, liars, trim
        See `AveragesReplies`.
    **tuning
        See `TunesOnPublicData`.

    Examples
    --------
    Nodes whose training adds their number to each weight:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, OneShotAverage
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> result = OneShotAverage().start(InProcessGrid(app, nodes=3), ArrayRecord([np.zeros(2)]))
    >>> result.arrays.to_numpy_ndarrays()
    [array([1., 1.])]
    """

    rounds_needed: ClassVar[int | None] = 1

    def finished(self, mean: Arrays) -> Arrays:
        """Return a mean that was made of a sum, fine-tuned."""
        return self.tuned(mean)

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Return the mean of the nodes' models, fine-tuned."""
        return self.tuned(super().aggregate(answers))
