"""The option that strategies take: how a sum over nodes is made secure."""

from __future__ import annotations

from dataclasses import dataclass

from gems_flwr.errors import OptionError


@dataclass(frozen=True)
class SecureSum:
    """How sums over nodes are made so that nobody sees a single summand.

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
        Whether nodes must sign their keys and the list of those who are in a sum, with the keys
        that their ``secure_sum_mod`` has: one more exchange for each sum. What a node does not
        trust it refuses, whatever stands here.
    clip : float, default 8.0
        Farthest that a weight of a model may move in training, above 0, where models are summed;
        a node whose model moves farther refuses. A larger one rounds more coarsely.
    bits : int, default 40
        Of the ring of a model's weights, 8 to 64: as exact as single precision with 40, for nodes
        with a thousand examples and more.

    Examples
    --------
    >>> from gems_flwr import FedAvg, SecureSum
    >>> FedAvg(secure=SecureSum(threshold=0.8)).secure.threshold
    0.8
    >>> SecureSum(threshold=0.5)
    Traceback (most recent call last):
        ...
    gems_flwr.errors.OptionError: threshold must be above 0.5 and at most 1, got 0.5
    """

    threshold: float = 2 / 3
    neighbours: int | None = None
    signed: bool = False
    clip: float = 8.0
    bits: int = 40

    def __post_init__(self) -> None:
        if not 0.5 < self.threshold <= 1:
            raise OptionError(f"threshold must be above 0.5 and at most 1, got {self.threshold}")
        if self.neighbours is not None and self.neighbours < 2:
            raise OptionError(f"neighbours must be at least 2, got {self.neighbours}")
        if not self.clip > 0:
            raise OptionError(f"clip must be above 0, got {self.clip}")
        if not 8 <= self.bits <= 64:
            raise OptionError(f"bits must be from 8 to 64, got {self.bits}")
