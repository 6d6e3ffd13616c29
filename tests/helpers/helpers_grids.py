"""Grids that know less than the one in this process does."""

from __future__ import annotations

from gems_flwr.runtime.inprocess_grid import InProcessGrid


class Nameless(InProcessGrid):
    """As on Ray: the grid does not know its nodes' names."""

    def get_nodes(self):
        nodes = list(super().get_nodes())
        for node in nodes:
            node.name = ""
        return nodes
