"""Hidden layers: the neurons of many nodes merged into one layer."""

from gems_flwr.neurons.budget import Budget, limit_each, prune, shrink
from gems_flwr.neurons.layer import Member, MergedLayer, MergeMethod
from gems_flwr.neurons.merge import merge_neurons
from gems_flwr.neurons.scale import oversized_layers
from gems_flwr.neurons.screen import ScreenedNeurons, screen_neurons

__all__ = [
    "Budget",
    "Member",
    "MergeMethod",
    "MergedLayer",
    "ScreenedNeurons",
    "limit_each",
    "merge_neurons",
    "oversized_layers",
    "prune",
    "screen_neurons",
    "shrink",
]
