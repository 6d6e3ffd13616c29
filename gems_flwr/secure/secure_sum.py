"""The option that strategies take: how a sum over nodes is made secure."""

from __future__ import annotations

from dataclasses import dataclass

from gems_flwr.errors import check_options


@dataclass(frozen=True)
class SecureSum:
    """How sums over nodes are made so that no one sees a single summand.

    Parameters
    ----------
    threshold : float, default 2/3
        Part of the nodes that must be left to open a sum, above a half and at most 1. As long as
        fewer than 2 · threshold - 1 of a neighbourhood collude with the server, no summand can be
        opened; a larger threshold protects against more, and bears fewer drop-outs.
    neighbours : int, optional
        With how many others each node shares masks and secrets, at least 2; by default all of them
        up to 64 nodes, and 64 among more.
    signed : bool, default False
        Whether nodes sign the list of those who are in a sum, with the ``signing-key`` of their
        ``--node-config``: one more exchange for each sum.
    clip : float, default 8.0
        Farthest that a weight may move in training, above 0, where models are summed; a node whose
        model moves farther refuses. A larger one rounds more coarsely.
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
    signed: bool = False
    clip: float = 8.0
    bits: int = 40

    def __post_init__(self) -> None:
        rules = {
            "threshold": (0.5 < self.threshold <= 1, "above 0.5 and at most 1"),
            "neighbours": (self.neighbours is None or self.neighbours >= 2, "at least 2"),
            "clip": (self.clip > 0, "above 0"),
            "bits": (8 <= self.bits <= 64, "from 8 to 64"),
        }
        check_options(self, rules)
