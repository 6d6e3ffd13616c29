"""Hidden layers: the neurons of many nodes merged into one layer."""

from gems_flwr.neurons.budget import Budget, prune, shrink
from gems_flwr.neurons.layer import Member, MergedLayer, MergeMethod
from gems_flwr.neurons.merge import merge_neurons

__all__ = [
    "Budget",
    "Member",
    "MergeMethod",
    "MergedLayer",
    "merge_neurons",
    "prune",
    "shrink",
]
