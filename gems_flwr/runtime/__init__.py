"""What runs are made of: grids, byte counting, checkpoints, seeds."""

from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid, Traffic
from gems_flwr.runtime.seeding import derive_seed, generator

__all__ = ["InProcessGrid", "MeteredGrid", "Traffic", "derive_seed", "generator"]
