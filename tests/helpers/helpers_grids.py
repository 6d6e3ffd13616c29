"""Grids that know less than the one in this process does."""

from __future__ import annotations

from gems_flwr import InProcessGrid


class Nameless(InProcessGrid):
    """As on Ray: the grid does not know its nodes' names."""

    def get_nodes(self):
        nodes = list(super().get_nodes())
        for node in nodes:
            node.name = ""
        return nodes


class Impatient(InProcessGrid):
    """Only some partitions must answer in time; the others may wait for a busy processor."""

    def __init__(self, app, nodes, hurried):
        super().__init__(app, nodes)
        self.hurried = hurried

    def _deliver(self, message, timeout):
        partition = self._configs[message.metadata.dst_node_id]["partition-id"]
        return super()._deliver(message, timeout if partition in self.hurried else None)


def kind_of(content, default="train"):
    """Return the kind of the question in a message, or what an ordinary one is."""
    question = content.get("question")
    return question["kind"] if question else default
