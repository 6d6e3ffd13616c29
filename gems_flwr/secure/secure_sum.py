"""The option that strategies take: how a sum over nodes is made secure."""

from __future__ import annotations

from dataclasses import dataclass

from gems_flwr.errors import check_options
from gems_flwr.secure.keys import FEWEST_NEIGHBOURS


@dataclass(frozen=True)
class SecureSum:
    """How sums over nodes are made so that no one sees a single summand.

    Parameters
    ----------
    threshold : float, default 2/3
        Part of the nodes that must be left to open a sum, above a half and at most 1. With n nodes
        it takes t = threshold · n, and fewer than 2 t - n that collude with the server open no
        summand; a larger threshold protects against more, and bears fewer drop-outs. Nodes have
        limits of their own (`NodeLimits.least_threshold`).
    neighbours : int, optional
        With how many others each node shares masks and seeds, at least 20; by default all of them
        up to 64 nodes, and 64 among more. Whom, follows from all nodes' keys.
    clip : float, default 8.0
        Farthest that a weight may move in training, above 0, where models are summed; what moves
        farther is clipped, which only the node's log says. A larger one rounds more coarsely.
    bits : int, default 40
        Of the ring of a model's weights, 8 to 64; 40 are as exact as single precision.

    Examples
    --------
    >>> from gems_flwr import FedAvg, SecureSum
    >>> FedAvg(secure=SecureSum(threshold=0.8)).secure.threshold
    0.8
    """

    threshold: float = 2 / 3
    neighbours: int | None = None
    clip: float = 8.0
    bits: int = 40

    def __post_init__(self) -> None:
        near, least = self.neighbours, FEWEST_NEIGHBOURS
        rules = {
            "threshold": (0.5 < self.threshold <= 1, "above 0.5 and at most 1"),
            "neighbours": (near is None or near >= least, f"at least {least}"),
            "clip": (self.clip > 0, "above 0"),
            "bits": (8 <= self.bits <= 64, "from 8 to 64"),
        }
        check_options(self, rules)
