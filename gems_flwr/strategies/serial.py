"""The reference "serial": one learner on the streams of all nodes (Kamp et al. 2018, Section 5).

No message is sent, since it is no protocol but what protocols are measured against; how the data
got to one place is not asked. It is for simulations, which hand in the streams as `learn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from gems_flwr.server.learner_state import Tally
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import Arrays

# Gets the round, the model and what was kept; returns model, what to keep, and metrics.
Learn = Callable[[int, Arrays, Arrays], tuple[Arrays, Arrays, Mapping[str, float]]]


@dataclass(kw_only=True, eq=False)
class Serial(RoundLoop):
    """Learn from the batches that all nodes see in a round, one after the other.

    Parameters
    ----------
    learn : callable
        Gets the round, the model and the optimiser's state; returns the new model, the new state
        and the metrics that a node would report.
    **loop
        See `RoundLoop`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, Serial
    >>> def learn(server_round, model, memory):
    ...     trained = {name: array + 1 for name, array in model.items()}
    ...     return trained, memory, {"loss-sum": 0.5, "batches": 1}
    >>> grid = InProcessGrid(ClientApp(), nodes=2)  # asked for nothing
    >>> result = Serial(learn=learn).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=3)
    >>> result.arrays.to_numpy_ndarrays(), result.traffic.bytes_up
    ([array([3., 3.])], 0)
    """

    sends_models: ClassVar[bool] = False

    learn: Learn

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Train one model at the server."""
        arrays, memory, metrics = self.learn(server_round, state.arrays, state.memory)
        before = Tally.from_details(state.details)
        tally = before.with_losses({"serial": metrics})
        return RoundOutcome(
            arrays=arrays,
            train_metrics=tally.in_place(before),
            memory=memory,
            details=tally.to_details(),
        )
