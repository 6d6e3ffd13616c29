"""Federated learning on Flower with a fixed, tiny communication budget.

What most apps need can be imported from here::

    from gems_flwr import FedAvg, Gems, good_enough_mod

Each room has a face of its own with the rest: `gems_flwr.core` (rounds, questions, results),
`gems_flwr.errors`, `gems_flwr.spaces`, `gems_flwr.tools`. Names are looked up when they are first
used, so that importing the package is quick and needs neither torch nor Flower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

__version__ = "0.1.0"

_NAMES = {
    "averaging": "RobustRule",
    "carriers.in_process": "InProcessGrid",
    "carriers.metered": "MeteredGrid",
    "core.run": "Callback TargetReached Tolerance",
    "errors": "GemsError",
    "lifts": "RandomFilters RandomFourier",
    "networks": "resize_model",
    "neurons.question": "Neurons",
    "node.limits": "NodeLimits",
    "node.mod": "freeze_layers good_enough_mod",
    "node.task": "Report Task TaskSet task_client_app",
    "secure.secure_sum": "SecureSum",
    "spaces.ball.question": "Ball Ellipsoid",
    "spaces.cone.question": "Cone Means",
    "stages.refine": "Refine",
    "stages.stage": "Head",
    "stages.tune": "Tune",
    "strategies.dynamic_averaging": "DynamicAveraging NoSync PeriodicAveraging Serial",
    "strategies.fedavg": "FedAvg",
    "strategies.flower_strategy": "FlowerStrategy",
    "strategies.gems": "Gems",
    "strategies.layerwise_gems": "LayerwiseGems",
    "strategies.loop": "RoundLoop",
    "strategies.merged_models": "MergedModels",
    "strategies.multi_model": "MultiModel",
    "strategies.private_gems": "PrivateGems",
    "strategies.references": "Ensemble LocalModels OneShotAverage Pooled PublicOnly",
    "tools.offline": "aggregate_files",
}
_STRATEGIES = " ".join(names for room, names in _NAMES.items() if "strategies." in room).split()

if TYPE_CHECKING:
    from gems_flwr.averaging import RobustRule as RobustRule
    from gems_flwr.carriers.in_process import InProcessGrid as InProcessGrid
    from gems_flwr.carriers.metered import MeteredGrid as MeteredGrid
    from gems_flwr.core.run import Callback as Callback
    from gems_flwr.core.run import TargetReached as TargetReached
    from gems_flwr.core.run import Tolerance as Tolerance
    from gems_flwr.errors import GemsError as GemsError
    from gems_flwr.lifts import RandomFilters as RandomFilters
    from gems_flwr.lifts import RandomFourier as RandomFourier
    from gems_flwr.networks import resize_model as resize_model
    from gems_flwr.neurons.question import Neurons as Neurons
    from gems_flwr.node.limits import NodeLimits as NodeLimits
    from gems_flwr.node.mod import freeze_layers as freeze_layers
    from gems_flwr.node.mod import good_enough_mod as good_enough_mod
    from gems_flwr.node.task import Report as Report
    from gems_flwr.node.task import Task as Task
    from gems_flwr.node.task import TaskSet as TaskSet
    from gems_flwr.node.task import task_client_app as task_client_app
    from gems_flwr.secure.secure_sum import SecureSum as SecureSum
    from gems_flwr.spaces.ball.question import Ball as Ball
    from gems_flwr.spaces.ball.question import Ellipsoid as Ellipsoid
    from gems_flwr.spaces.cone.question import Cone as Cone
    from gems_flwr.spaces.cone.question import Means as Means
    from gems_flwr.stages.refine import Refine as Refine
    from gems_flwr.stages.stage import Head as Head
    from gems_flwr.stages.tune import Tune as Tune
    from gems_flwr.strategies.dynamic_averaging import DynamicAveraging as DynamicAveraging
    from gems_flwr.strategies.dynamic_averaging import NoSync as NoSync
    from gems_flwr.strategies.dynamic_averaging import PeriodicAveraging as PeriodicAveraging
    from gems_flwr.strategies.dynamic_averaging import Serial as Serial
    from gems_flwr.strategies.fedavg import FedAvg as FedAvg
    from gems_flwr.strategies.flower_strategy import FlowerStrategy as FlowerStrategy
    from gems_flwr.strategies.gems import Gems as Gems
    from gems_flwr.strategies.layerwise_gems import LayerwiseGems as LayerwiseGems
    from gems_flwr.strategies.loop import RoundLoop as RoundLoop
    from gems_flwr.strategies.merged_models import MergedModels as MergedModels
    from gems_flwr.strategies.multi_model import MultiModel as MultiModel
    from gems_flwr.strategies.private_gems import PrivateGems as PrivateGems
    from gems_flwr.strategies.references import Ensemble as Ensemble
    from gems_flwr.strategies.references import LocalModels as LocalModels
    from gems_flwr.strategies.references import OneShotAverage as OneShotAverage
    from gems_flwr.strategies.references import Pooled as Pooled
    from gems_flwr.strategies.references import PublicOnly as PublicOnly
    from gems_flwr.tools.offline import aggregate_files as aggregate_files
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
