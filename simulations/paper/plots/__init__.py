"""The pictures of the reproductions, from findings alone, so that they can be drawn again."""

from simulations.paper.plots.curves import (
    epsilon_grid,
    initialisation_curves,
    loss_curves,
    neuron_curves,
    tuning_panels,
)
from simulations.paper.plots.streams import frontier_and_timeline, frontier_panels
from simulations.paper.plots.tables import method_panels, rounds_bars, size_panels

__all__ = [
    "epsilon_grid",
    "frontier_and_timeline",
    "frontier_panels",
    "initialisation_curves",
    "loss_curves",
    "method_panels",
    "neuron_curves",
    "rounds_bars",
    "size_panels",
    "tuning_panels",
]
