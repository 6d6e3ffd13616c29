"""The reference "nosync": every node learns alone from its stream, and nothing is averaged.

At the end the models are collected side by side, so that their mean accuracy can be told; that is
the only time that models cross the network besides the first, and it is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gems_flwr import scoring
from gems_flwr.averaging.synchronisation import Synchronisation
from gems_flwr.server.learner_state import LearnerState
from gems_flwr.server.local_learners import AskForModels, LearnerRound, LocalLearners, Replies
from gems_flwr.server.members import join_members


@dataclass(kw_only=True, eq=False)
class NoSync(LocalLearners):
    """Never average.

    Parameters
    ----------
    report_every : int, default 1
        Rounds between two reports of the nodes' losses, at least 1.
    **learners
        See `LocalLearners`; `final_sync` here means to collect all models at the end.

    Examples
    --------
    Learners that never hear of each other:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, NoSync, dynamic_averaging_mod, split_models
    >>> app = ClientApp(mods=[dynamic_averaging_mod()])
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> grid = InProcessGrid(app, nodes=3)
    >>> result = NoSync().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=4)
    >>> models = split_models({key: array.numpy() for key, array in result.arrays.items()})
    >>> [float(models[node]["0"][0]) for node in ("0", "1", "2")]
    [0.0, 4.0, 8.0]
    """

    report_every: int = 1

    @property
    def period(self) -> int:
        """Messages only carry reports."""
        return self.report_every

    def request(
        self, server_round: int, nodes: Sequence[str], learners: LearnerState
    ) -> Mapping[str, Mapping[str, Any]]:
        """Ask for nothing."""
        return {name: {} for name in nodes}

    def synchronise(
        self, server_round: int, learners: LearnerState, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Change nothing."""
        return Synchronisation(learners.coordinator)

    def close(self, current: LearnerRound) -> None:
        """Collect the models, side by side."""
        if self.final_sync:
            current.arrays = join_members(current.all_models())

    def score(
        self, members: Sequence[NDArray], labels: NDArray, one: scoring.Score = scoring.score
    ) -> dict[str, float]:
        """Return the mean over the models of each one's score."""
        return scoring.mean_score(members, labels, one)
