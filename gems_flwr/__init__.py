"""Federated learning on Flower with a fixed, tiny communication budget.

Everything that is public can be imported from here::

    from gems_flwr import FedAvg, Gems, good_enough_mod

What is not exported here is private: it may move or change with any version. Names are looked up
when they are first used, so that importing the package costs nothing and needs neither torch nor
Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gems_flwr.client.compression_mod import compression_mod as compression_mod
    from gems_flwr.client.dynamic_averaging_mod import (
        dynamic_averaging_mod as dynamic_averaging_mod,
    )
    from gems_flwr.client.fault_reply_mod import fault_reply_mod as fault_reply_mod
    from gems_flwr.client.freezing import freeze_layers as freeze_layers
    from gems_flwr.client.good_enough_mod import good_enough_mod as good_enough_mod
    from gems_flwr.client.limits import NodeLimits as NodeLimits
    from gems_flwr.client.multi_model_mod import multi_model_mod as multi_model_mod
    from gems_flwr.client.secure_sum_mod import secure_sum_mod as secure_sum_mod
    from gems_flwr.client.statistics_mod import statistics_mod as statistics_mod
    from gems_flwr.client.task import Report as Report
    from gems_flwr.client.task import Task as Task
    from gems_flwr.client.task import TaskSet as TaskSet
    from gems_flwr.client.task_app import task_client_app as task_client_app
    from gems_flwr.errors import BadReplyError as BadReplyError
    from gems_flwr.errors import BypassedPrivacyError as BypassedPrivacyError
    from gems_flwr.errors import CheckpointError as CheckpointError
    from gems_flwr.errors import DiskError as DiskError
    from gems_flwr.errors import EmptyIntersectionError as EmptyIntersectionError
    from gems_flwr.errors import Failure as Failure
    from gems_flwr.errors import FlowerCliError as FlowerCliError
    from gems_flwr.errors import FolderInUseError as FolderInUseError
    from gems_flwr.errors import GemsError as GemsError
    from gems_flwr.errors import MissingModError as MissingModError
    from gems_flwr.errors import ModelError as ModelError
    from gems_flwr.errors import MultiModelError as MultiModelError
    from gems_flwr.errors import NotEnoughNodesError as NotEnoughNodesError
    from gems_flwr.errors import NotGoodEnoughError as NotGoodEnoughError
    from gems_flwr.errors import NotInstalledError as NotInstalledError
    from gems_flwr.errors import OfflineError as OfflineError
    from gems_flwr.errors import OptionError as OptionError
    from gems_flwr.errors import OutdatedMessageError as OutdatedMessageError
    from gems_flwr.errors import RefusedError as RefusedError
    from gems_flwr.errors import RoundFailedError as RoundFailedError
    from gems_flwr.errors import SecureSumError as SecureSumError
    from gems_flwr.errors import SpaceError as SpaceError
    from gems_flwr.errors import StateNotSavedError as StateNotSavedError
    from gems_flwr.leaks.feature_files import save_features as save_features
    from gems_flwr.model_card import CardModel as CardModel
    from gems_flwr.model_card import ModelCard as ModelCard
    from gems_flwr.moments.cone_building import build_cone as build_cone
    from gems_flwr.networks.random_filters import RandomFilters as RandomFilters
    from gems_flwr.networks.random_fourier import RandomFourier as RandomFourier
    from gems_flwr.networks.subclasses import other_output_layer as other_output_layer
    from gems_flwr.networks.subclasses import split_classes as split_classes
    from gems_flwr.networks.surgery import resize_model as resize_model
    from gems_flwr.neuron_merging.outgoing_head import Outgoing as Outgoing
    from gems_flwr.offline import OfflineResult as OfflineResult
    from gems_flwr.offline import aggregate_files as aggregate_files
    from gems_flwr.offline_totals import write_difference as write_difference
    from gems_flwr.receipts import Receipt as Receipt
    from gems_flwr.receipts import load_receipts as load_receipts
    from gems_flwr.runtime.inprocess_grid import InProcessGrid as InProcessGrid
    from gems_flwr.runtime.metered_grid import MeteredGrid as MeteredGrid
    from gems_flwr.runtime.metered_grid import Traffic as Traffic
    from gems_flwr.secure.secure_sum import SecureSum as SecureSum
    from gems_flwr.server.exchange import Answer as Answer
    from gems_flwr.server.loop import RoundLoop as RoundLoop
    from gems_flwr.server.members import join_models as join_models
    from gems_flwr.server.members import split_models as split_models
    from gems_flwr.server.model_export import ExportedModel as ExportedModel
    from gems_flwr.server.model_export import export_model as export_model
    from gems_flwr.server.refine_options import Refine as Refine
    from gems_flwr.server.run_card import write_model_card as write_model_card
    from gems_flwr.server.settings import Callback as Callback
    from gems_flwr.server.state import RoundOutcome as RoundOutcome
    from gems_flwr.server.state import RoundRecord as RoundRecord
    from gems_flwr.server.state import RunResult as RunResult
    from gems_flwr.server.state import ServerState as ServerState
    from gems_flwr.server.stopping import PatienceExhausted as PatienceExhausted
    from gems_flwr.server.stopping import StopRule as StopRule
    from gems_flwr.server.stopping import TargetReached as TargetReached
    from gems_flwr.spaces.space_files import load_space as load_space
    from gems_flwr.spaces.space_files import save_space as save_space
    from gems_flwr.strategies.dynamic_averaging import DynamicAveraging as DynamicAveraging
    from gems_flwr.strategies.ensemble import Ensemble as Ensemble
    from gems_flwr.strategies.fedavg import FedAvg as FedAvg
    from gems_flwr.strategies.flower_strategy import FlowerStrategy as FlowerStrategy
    from gems_flwr.strategies.gems import Gems as Gems
    from gems_flwr.strategies.layerwise_gems import LayerwiseGems as LayerwiseGems
    from gems_flwr.strategies.local_models import LocalModels as LocalModels
    from gems_flwr.strategies.merged_models import MergedModels as MergedModels
    from gems_flwr.strategies.multi_model.multi_model import MultiModel as MultiModel
    from gems_flwr.strategies.multi_model.sampling_base import SamplingRule as SamplingRule
    from gems_flwr.strategies.multi_model.sampling_rules import FedVarp as FedVarp
    from gems_flwr.strategies.multi_model.sampling_rules import (
        FullParticipation as FullParticipation,
    )
    from gems_flwr.strategies.multi_model.sampling_rules import LossSampling as LossSampling
    from gems_flwr.strategies.multi_model.sampling_rules import Mifa as Mifa
    from gems_flwr.strategies.multi_model.sampling_rules import NormSampling as NormSampling
    from gems_flwr.strategies.multi_model.sampling_rules import ResidualSampling as ResidualSampling
    from gems_flwr.strategies.multi_model.sampling_rules import Scaffold as Scaffold
    from gems_flwr.strategies.multi_model.sampling_rules import UniformSampling as UniformSampling
    from gems_flwr.strategies.nosync import NoSync as NoSync
    from gems_flwr.strategies.one_shot_average import OneShotAverage as OneShotAverage
    from gems_flwr.strategies.periodic_averaging import PeriodicAveraging as PeriodicAveraging
    from gems_flwr.strategies.pooled import Pooled as Pooled
    from gems_flwr.strategies.private_gems import PrivateGems as PrivateGems
    from gems_flwr.strategies.public_only import PublicOnly as PublicOnly
    from gems_flwr.strategies.serial import Serial as Serial
    from gems_flwr.targets import Classes as Classes
    from gems_flwr.targets import Numbers as Numbers
    from gems_flwr.targets import Target as Target
    from gems_flwr.tracking.live_view import LiveView as LiveView
    from gems_flwr.tracking.mlflow_tracker import MLflow as MLflow
    from gems_flwr.tracking.tensorboard_tracker import TensorBoard as TensorBoard
    from gems_flwr.tracking.wandb_tracker import WandB as WandB
    from gems_flwr.wire.model_replies import ModelReply as ModelReply
    from gems_flwr.wire.requests import Neurons as Neurons
    from gems_flwr.wire.space_requests import Ball as Ball
    from gems_flwr.wire.space_requests import Cone as Cone
    from gems_flwr.wire.space_requests import Ellipsoid as Ellipsoid
    from gems_flwr.wire.space_requests import Means as Means

# Where each public name is defined; the same as above, for the interpreter.
# The strategies, and where each is; `gems_flwr.strategies` has the same names.
_STRATEGIES = {
    "DynamicAveraging": "strategies.dynamic_averaging",
    "Ensemble": "strategies.ensemble",
    "FedAvg": "strategies.fedavg",
    "FlowerStrategy": "strategies.flower_strategy",
    "Gems": "strategies.gems",
    "LayerwiseGems": "strategies.layerwise_gems",
    "LocalModels": "strategies.local_models",
    "MergedModels": "strategies.merged_models",
    "MultiModel": "strategies.multi_model.multi_model",
    "NoSync": "strategies.nosync",
    "OneShotAverage": "strategies.one_shot_average",
    "PeriodicAveraging": "strategies.periodic_averaging",
    "Pooled": "strategies.pooled",
    "PrivateGems": "strategies.private_gems",
    "PublicOnly": "strategies.public_only",
    "Serial": "strategies.serial",
}
_HOMES = {
    **_STRATEGIES,
    # What a node can be asked for.
    "Ball": "wire.space_requests",
    "Cone": "wire.space_requests",
    "Ellipsoid": "wire.space_requests",
    "Means": "wire.space_requests",
    "Neurons": "wire.requests",
    "Outgoing": "neuron_merging.outgoing_head",
    "Refine": "server.refine_options",
    # How MultiModel draws clients.
    "FedVarp": "strategies.multi_model.sampling_rules",
    "FullParticipation": "strategies.multi_model.sampling_rules",
    "LossSampling": "strategies.multi_model.sampling_rules",
    "Mifa": "strategies.multi_model.sampling_rules",
    "NormSampling": "strategies.multi_model.sampling_rules",
    "ResidualSampling": "strategies.multi_model.sampling_rules",
    "SamplingRule": "strategies.multi_model.sampling_base",
    "Scaffold": "strategies.multi_model.sampling_rules",
    "UniformSampling": "strategies.multi_model.sampling_rules",
    # On a node.
    "Classes": "targets",
    "NodeLimits": "client.limits",
    "Numbers": "targets",
    "RandomFilters": "networks.random_filters",
    "RandomFourier": "networks.random_fourier",
    "Report": "client.task",
    "Target": "targets",
    "Task": "client.task",
    "TaskSet": "client.task",
    "compression_mod": "client.compression_mod",
    "dynamic_averaging_mod": "client.dynamic_averaging_mod",
    "fault_reply_mod": "client.fault_reply_mod",
    "freeze_layers": "client.freezing",
    "good_enough_mod": "client.good_enough_mod",
    "multi_model_mod": "client.multi_model_mod",
    "other_output_layer": "networks.subclasses",
    "resize_model": "networks.surgery",
    "split_classes": "networks.subclasses",
    "secure_sum_mod": "client.secure_sum_mod",
    "SecureSum": "secure.secure_sum",
    "statistics_mod": "client.statistics_mod",
    "task_client_app": "client.task_app",
    # Running, watching and stopping.
    "Callback": "server.settings",
    "InProcessGrid": "runtime.inprocess_grid",
    "LiveView": "tracking.live_view",
    "MLflow": "tracking.mlflow_tracker",
    "MeteredGrid": "runtime.metered_grid",
    "PatienceExhausted": "server.stopping",
    "RunResult": "server.state",
    "StopRule": "server.stopping",
    "TensorBoard": "tracking.tensorboard_tracker",
    "TargetReached": "server.stopping",
    "Traffic": "runtime.metered_grid",
    "WandB": "tracking.wandb_tracker",
    "join_models": "server.members",
    "split_models": "server.members",
    # What one does with the model.
    "ExportedModel": "server.model_export",
    "export_model": "server.model_export",
    "CardModel": "model_card",
    "ModelCard": "model_card",
    "write_model_card": "server.run_card",
    # Writing a strategy.
    "Answer": "server.exchange",
    "ModelReply": "wire.model_replies",
    "RoundLoop": "server.loop",
    "RoundOutcome": "server.state",
    "RoundRecord": "server.state",
    "ServerState": "server.state",
    # Spaces as files.
    "OfflineResult": "offline",
    "aggregate_files": "offline",
    "write_difference": "offline_totals",
    "Receipt": "receipts",
    "load_receipts": "receipts",
    "build_cone": "moments.cone_building",
    "load_space": "spaces.space_files",
    "save_features": "leaks.feature_files",
    "save_space": "spaces.space_files",
    # Errors.
    "BadReplyError": "errors",
    "BypassedPrivacyError": "errors",
    "CheckpointError": "errors",
    "DiskError": "errors",
    "EmptyIntersectionError": "errors",
    "Failure": "errors",
    "FlowerCliError": "errors",
    "FolderInUseError": "errors",
    "GemsError": "errors",
    "MissingModError": "errors",
    "ModelError": "errors",
    "MultiModelError": "errors",
    "NotEnoughNodesError": "errors",
    "NotGoodEnoughError": "errors",
    "NotInstalledError": "errors",
    "OfflineError": "errors",
    "OptionError": "errors",
    "OutdatedMessageError": "errors",
    "RefusedError": "errors",
    "RoundFailedError": "errors",
    "SecureSumError": "errors",
    "SpaceError": "errors",
    "StateNotSavedError": "errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gems_flwr' has no attribute '{name}'")
    value: object = getattr(importlib.import_module(f"gems_flwr.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
