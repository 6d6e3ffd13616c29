"""Hidden layers: the neurons of many nodes merged into one layer."""

from gems_flwr.neurons.budget import Budget, prune, shrink
from gems_flwr.neurons.layer import Member, MergedLayer, MergeMethod
from gems_flwr.neurons.merge import merge_neurons
from gems_flwr.neurons.scale import oversized_layers

__all__ = [
    "Budget",
    "Member",
    "MergeMethod",
    "MergedLayer",
    "merge_neurons",
    "oversized_layers",
    "prune",
    "shrink",
]
