"""The reference "local": every node trains alone, and keeps its own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from numpy.typing import NDArray

from gems_flwr import scoring
from gems_flwr.errors import OptionError
from gems_flwr.server.exchange import Answer
from gems_flwr.server.members import join_members
from gems_flwr.server.public_tuning import TunesOnPublicData
from gems_flwr.typing import Arrays
from gems_flwr.wire.model_replies import ModelReply


@dataclass(kw_only=True, eq=False)
class LocalModels(TunesOnPublicData):
    """The reference "local": every node trains alone; scores are means over the nodes.

    Parameters
    ----------
    **tuning
        See `TunesOnPublicData`; the server tunes each node's model by itself.

    Examples
    --------
    Nodes whose training adds their number to each weight:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, LocalModels, split_models
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> result = LocalModels().start(InProcessGrid(app, nodes=2), ArrayRecord([np.zeros(2)]))
    >>> models = split_models({key: array.numpy() for key, array in result.arrays.items()})
    >>> models["1"]["0"]
    array([1., 1.])
    """

    rounds_needed: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction_evaluate != 0:
            raise OptionError(
                "fraction_evaluate must be 0: the result is a model of every node, which no node's "
                "handler can load; evaluate at the server (evaluate_fn)"
            )

    def aggregate(self, answers: Sequence[Answer[ModelReply]]) -> Arrays:
        """Return all models, each fine-tuned, side by side."""
        return join_members({answer.node: self.tuned(answer.value.arrays) for answer in answers})

    def score(
        self, members: Sequence[NDArray], labels: NDArray, one: scoring.Score = scoring.score
    ) -> dict[str, float]:
        """Return the mean over the models of each one's score."""
        return scoring.mean_score(members, labels, one)
