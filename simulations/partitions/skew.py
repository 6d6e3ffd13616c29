"""The data skew of the multi-model slides, for one task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulations.partitions.partitioners import Indices


@dataclass(frozen=True)
class Skew:
    """Nodes hold some of the labels, and a few nodes hold most of the data.

    The slides: "each client: 30 % labels", "10 % clients hold 52.6 % data of each task", which is
    ten times as much as another client has. Decided here: which nodes are rich and which labels a
    node holds is drawn for each task by itself; labels are dealt so that each has about as many
    holders, among the rich and among the others; of each label the rich hold `rich_data` together,
    in equal parts.

    Parameters
    ----------
    label_share : float
        Share of the labels that a node holds, in (0, 1]; at least one label.
    rich_nodes : float
        Share of the nodes that are rich, in [0, 1); if above 0, at least one node.
    rich_data : float
        Share of the data that they hold together, in (0, 1).

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    label_share: float = 0.3
    rich_nodes: float = 0.1
    rich_data: float = 0.526

    def __post_init__(self) -> None:
        rules = {
            "label_share": (0 < self.label_share <= 1, "in (0, 1]"),
            "rich_nodes": (0 <= self.rich_nodes < 1, "in [0, 1)"),
            "rich_data": (0 < self.rich_data < 1, "in (0, 1)"),
        }
        for option, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(
                    f"partition.{option} must be {allowed}, got {getattr(self, option)}"
                )

    def __call__(
        self, labels: NDArray[Any], *, nodes: int, classes: int, seed: int
    ) -> list[Indices]:
        """Divide the examples; see `simulations.partitions.partitioners.Partition`."""
        if classes == 0:
            raise ValueError(
                "labels are numbers, and this partition goes by classes: take partition=iid, "
                "quantity, shards or groups"
            )
        rng = np.random.default_rng(seed)
        each = max(1, round(self.label_share * classes))
        if nodes * each < classes:
            raise ValueError(
                f"{nodes} nodes with {each} of {classes} labels each cannot hold all labels: "
                "raise partition.label_share or use more nodes"
            )
        count = max(1, round(self.rich_nodes * nodes)) if self.rich_nodes else 0
        rich = np.zeros(nodes, dtype=bool)
        rich[rng.permutation(nodes)[:count]] = True
        held = self._deal(rich, each, classes, rng)
        parts: list[list[Indices]] = [[] for _ in range(nodes)]
        for label in range(classes):
            positions = rng.permutation(np.flatnonzero(labels == label))
            groups = [rng.permutation(np.flatnonzero(held[:, label] & g)) for g in (rich, ~rich)]
            cut = round(self.rich_data * len(positions))
            if not len(groups[0]) or not len(groups[1]):
                cut = len(positions) if len(groups[0]) else 0
            for group, some in zip(groups, np.split(positions, [cut]), strict=True):
                if len(group):
                    for node, own in zip(group, np.array_split(some, len(group)), strict=True):
                        parts[node].append(own)
        whole = [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]
        empty = [node for node, part in enumerate(whole) if not len(part)]
        if empty:
            raise ValueError(
                f"node {empty[0]} of {nodes} gets no examples: use fewer nodes or more examples"
            )
        return whole

    @staticmethod
    def _deal(
        rich: NDArray[np.bool_], each: int, classes: int, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Return which node holds which label, as evenly as it goes in both groups."""
        held = np.zeros((len(rich), classes), dtype=bool)
        for group in (rich, ~rich):
            for node in rng.permutation(np.flatnonzero(group)):
                # Labels that nobody holds come first, then those with the fewest in the group.
                unheld = ~held.any(axis=0)
                order = np.lexsort((rng.random(classes), held[group].sum(axis=0), ~unheld))
                held[node, order[:each]] = True
        return held
