"""The baseline "raw": a model trained on the public sample alone (GEMS 2019, Section 4.4).

No node is asked for anything: what the nodes add is the distance to this. The released code trains
it at another rate than the methods that are compared with it; here it is tuned as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from gems_flwr.errors import OptionError
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.public_tuning import (
    BuildModel,
    check_tuning,
    first_samples,
    tune_network,
)
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.typing import ArrayPair


@dataclass(kw_only=True, eq=False)
class PublicOnly(RoundLoop):
    """Train the initial model, all layers, on the server's public sample.

    Parameters
    ----------
    public_data : pair of arrays
        Public inputs of the network, and their classes; needed unless `tune` is 0.
    build_model : callable
        Returns the torch module.
    tune : int, optional
        How many of the samples to train on; all by default, and 0 leaves the initial model.
    tune_rate : float, default 0.001
        Adam's rate, above 0.
    **loop
        See `RoundLoop`.

    Examples
    --------
    >>> import torch
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, PublicOnly
    >>> def build_model():
    ...     return torch.nn.Linear(2, 2)
    >>> public = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).numpy(), torch.tensor([0, 1]).numpy()
    >>> strategy = PublicOnly(build_model=build_model, public_data=public)
    >>> grid = InProcessGrid(ClientApp(), nodes=2)  # asked for nothing
    >>> result = strategy.start(grid, ArrayRecord(build_model().state_dict()))
    >>> result.details["tuned_on"], result.traffic.messages_down
    (2, 0)
    """

    build_model: BuildModel
    public_data: ArrayPair | None = None
    tune: int | None = None
    tune_rate: float = 1e-3

    needs_classes: ClassVar[bool] = True
    rounds_needed: ClassVar[int | None] = 1
    sends_models: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tuning(self.tune or 0, self.tune_rate, self.public_data)
        if self.tune is None and (self.public_data is None or not len(self.public_data[1])):
            raise OptionError("there are no public samples to train on: give public_data")

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Train at the server, without a message."""
        if self.public_data is None or self.tune == 0:
            return RoundOutcome(arrays=state.arrays, details={"tuned_on": 0})
        count = len(self.public_data[1]) if self.tune is None else self.tune
        data = first_samples(self.public_data, count)
        arrays = tune_network(
            state.arrays,
            self.build_model(),
            data,
            rate=self.tune_rate,
            seed=self.seed,
            device=self.device,
        )
        return RoundOutcome(arrays=arrays, details={"tuned_on": count})
