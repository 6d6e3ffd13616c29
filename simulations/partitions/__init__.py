"""Who holds which samples: by label, at random, by size, by natural groups, skewed."""

from simulations.partitions.groups import Groups
from simulations.partitions.partitioners import (
    Dirichlet,
    Iid,
    LabelDivision,
    Partition,
    Quantity,
    Shards,
)
from simulations.partitions.skew import Skew

__all__ = [
    "Dirichlet",
    "Groups",
    "Iid",
    "LabelDivision",
    "Partition",
    "Quantity",
    "Shards",
    "Skew",
]
