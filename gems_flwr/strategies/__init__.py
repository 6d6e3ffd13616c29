"""Flower strategies for a fixed, tiny communication budget.

All take keyword arguments and are started like Flower's own::

    strategy = FedAvg(fraction_train=0.1, min_nodes=5, seed=1)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)
"""

from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.strategies.ensemble import Ensemble
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.strategies.local_models import LocalModels
from gems_flwr.strategies.merged_models import MergedModels
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.strategies.nosync import NoSync
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.strategies.pooled import Pooled
from gems_flwr.strategies.public_only import PublicOnly
from gems_flwr.strategies.serial import Serial

__all__ = [
    "DynamicAveraging",
    "Ensemble",
    "FedAvg",
    "Gems",
    "LayerwiseGems",
    "LocalModels",
    "MergedModels",
    "MultiModel",
    "NoSync",
    "OneShotAverage",
    "PeriodicAveraging",
    "Pooled",
    "PublicOnly",
    "Serial",
]
