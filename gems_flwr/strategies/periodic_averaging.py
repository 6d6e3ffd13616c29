"""Periodic averaging of local models, the yardstick of dynamic averaging (Kamp et al. 2018).

With ``b=1`` it is the paper's continuous averaging, which equals mini-batch SGD on all data
(Proposition 3). With a `fraction` below 1 it is what the paper compares with as FedAvg: only a
random part of the nodes is averaged, and the others go on with their own models. (In McMahan's
FedAvg, our `FedAvg`, only the chosen nodes train at all.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gems_flwr.averaging.synchronisation import Synchronisation
from gems_flwr.errors import OptionError
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.learner_state import LearnerState
from gems_flwr.server.local_learners import AskForModels, LocalLearners, Replies


@dataclass(kw_only=True, eq=False)
class PeriodicAveraging(LocalLearners):
    """Average the local models every b rounds.

    Parameters
    ----------
    b : int, default 1
        Rounds between two averagings, at least 1.
    fraction : float, default 1.0
        Share of the nodes whose models are averaged, in (0, 1]; at least one node.
    **learners
        See `LocalLearners`.

    Examples
    --------
    Learners that drift apart, averaged in every second round:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, PeriodicAveraging, dynamic_averaging_mod
    >>> app = ClientApp(mods=[dynamic_averaging_mod()])
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> grid = InProcessGrid(app, nodes=3)
    >>> result = PeriodicAveraging(b=2).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=4)
    >>> result.arrays.to_numpy_ndarrays()
    [array([4., 4.])]
    """

    sums_replies: ClassVar[bool] = True
    sums_in_round: ClassVar[int] = 3

    b: int = 1
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise OptionError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.secure is not None and self.fraction < 1:
            raise OptionError("fraction must be 1 with secure sums: all nodes are in each of them")

    @property
    def period(self) -> int:
        """The b of the paper."""
        return self.b

    def request(
        self, server_round: int, nodes: Sequence[str], learners: LearnerState
    ) -> Mapping[str, Mapping[str, Any]]:
        """Ask the chosen nodes for their models, if an averaging is due."""
        if server_round % self.b:
            return {name: {} for name in nodes}
        count = max(1, int(self.fraction * len(nodes) + 1e-9))
        rng = generator(self.seed, "average", server_round)
        chosen = {nodes[i] for i in rng.choice(len(nodes), size=count, replace=False)}
        return {name: {"send": "always"} if name in chosen else {} for name in nodes}

    def synchronise(
        self, server_round: int, learners: LearnerState, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Average the models that came."""
        sent = {name: r.arrays for name, r in replies.items() if r.arrays is not None}
        if not sent:
            return Synchronisation(learners.coordinator)
        weights = [self.weight(replies[name]) for name in sent]
        full = len(sent) == len(replies)
        return Synchronisation.of_models(self.rule, learners.coordinator, sent, weights, full=full)
