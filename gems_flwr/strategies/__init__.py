"""Flower strategies for a fixed, tiny communication budget.

All take keyword arguments and are started like Flower's own::

    strategy = FedAvg(fraction_train=0.1, min_nodes=5, seed=1)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)
"""

from gems_flwr.strategies.callbacks import Callback
from gems_flwr.strategies.dynamic import DynamicAveraging
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.strategies.learners import LocalLearners
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.strategies.members import (
    Ensemble,
    LocalModels,
    join_members,
    join_models,
    split_members,
    split_models,
)
from gems_flwr.strategies.merged_models import MergedModels
from gems_flwr.strategies.multi_model import MultiModel
from gems_flwr.strategies.nosync import NoSync
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.strategies.periodic import PeriodicAveraging
from gems_flwr.strategies.pooled import Pooled
from gems_flwr.strategies.public_only import PublicOnly
from gems_flwr.strategies.records import RoundOutcome, RoundRecord, RunResult, ServerState
from gems_flwr.strategies.serial import Serial
from gems_flwr.strategies.stopping import PatienceExhausted, StopRule, TargetReached

__all__ = [
    "Callback",
    "DynamicAveraging",
    "Ensemble",
    "FedAvg",
    "Gems",
    "LayerwiseGems",
    "LocalLearners",
    "LocalModels",
    "MergedModels",
    "MultiModel",
    "NoSync",
    "OneShotAverage",
    "PatienceExhausted",
    "PeriodicAveraging",
    "Pooled",
    "PublicOnly",
    "RoundLoop",
    "RoundOutcome",
    "RoundRecord",
    "RunResult",
    "Serial",
    "ServerState",
    "StopRule",
    "TargetReached",
    "join_members",
    "join_models",
    "split_members",
    "split_models",
]
