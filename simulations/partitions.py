"""How the training examples are divided among the nodes.

A partition is a frozen set of options that is called with the labels::

    Dirichlet(alpha=0.1)(labels, nodes=50, classes=10, seed=0)

and returns one sorted array of positions per node: disjoint, together all positions, none empty.
The same arguments give the same division in every process. An option out of range, and a division
that cannot be made, is a ValueError that says what to change.

`Iid`, `Dirichlet` and `Shards` draw what the partitioners of ``flwr-datasets`` draw, as a test
shows, whose import takes seconds in every worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from simulations.data.splits import apportion

Indices = NDArray[np.int64]
Parts = Sequence[Sequence[Indices]]

TABLE_4: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {
    (10, 2): ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)),
    (10, 3): ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9)),
    (10, 5): ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),
    (7, 2): ((0, 1, 2, 3), (4, 5, 6)),
    (7, 3): ((0, 1), (2, 3), (4, 5, 6)),
    (7, 5): ((0, 5, 6), (1, 5, 6), (2, 5, 6), (3, 5, 6), (4, 5, 6)),
}
"""Label divisions of the GEMS paper by (classes, nodes): Appendix B.2, Table 4.

The printed row for 10 classes on 2 nodes names {0, …, 4} twice and 5 … 9 never; the text says that
nodes hold unique subsets, so the second set is read as {5, …, 9}.
"""


@dataclass(frozen=True)
class Partition:
    """What every partition is: options that can be called with labels."""

    takes_numbers: ClassVar[bool] = True
    remedy: ClassVar[str] = "use fewer nodes"

    def __call__(
        self,
        labels: NDArray[Any],
        *,
        nodes: int,
        classes: int,
        seed: int,
        groups: NDArray[Any] | None = None,
    ) -> list[Indices]:
        """Divide the positions of ``labels`` among the nodes.

        Parameters
        ----------
        labels : np.ndarray
            The class of every example, 0 … ``classes - 1``, or its number.
        nodes : int
            Number of nodes, 1 … ``len(labels)``.
        classes : int
            Number of classes; 0: labels are numbers.
        seed : int
            The source of chance; at least 0.
        groups : np.ndarray, optional
            The group of every example, 0 … ``nodes - 1``; None: the data set has none.
        """
        labels = _checked_labels(labels, nodes, classes, self.takes_numbers)
        parts = self._divide(labels, nodes, classes, seed, groups)
        for node, part in enumerate(parts):
            if not sum(map(len, part)):
                raise ValueError(f"node {node} of {nodes} gets no examples: {self.remedy}")
        return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
        raise NotImplementedError


@dataclass(frozen=True)
class LabelDivision(Partition):
    """Every node holds all examples of its own labels, as in the GEMS paper.

    Without an explicit ``division``, the paper's Table 4 is used where it has a row (10 or 7
    classes on 2, 3 or 5 nodes). Otherwise nodes get contiguous groups of labels with boundaries
    ``k * classes // nodes``, or, with more nodes than classes, node ``k`` gets a part of label
    ``k % classes``.

    Parameters
    ----------
    division : sequence of sequence of int, optional
        The labels of each node. The examples of a label that several nodes name are divided
        evenly among them, at random; every label must be named.
    """

    takes_numbers: ClassVar[bool] = False
    remedy: ClassVar[str] = "use fewer nodes, or give it a label that has enough examples"

    division: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for node, labels in enumerate(self.division or ()):
            if not labels or min(labels) < 0 or len(set(labels)) < len(labels):
                raise ValueError(
                    f"partition.division: node {node} must have one or more different labels of "
                    f"at least 0, got {list(labels)}"
                )

    def _labels_of(self, nodes: int, classes: int) -> Sequence[Sequence[int]]:
        if self.division is None:
            if (classes, nodes) in TABLE_4:
                return TABLE_4[classes, nodes]
            if nodes > classes:
                return [(node % classes,) for node in range(nodes)]
            bounds = [node * classes // nodes for node in range(nodes + 1)]
            return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
        if len(self.division) != nodes:
            raise ValueError(
                f"partition.division must have one list of labels for each of the {nodes} nodes, "
                f"got {len(self.division)} lists"
            )
        named, wanted = set(itertools.chain(*self.division)), set(range(classes))
        if named != wanted:
            raise ValueError(
                f"partition.division must name every label of 0 … {classes - 1} and no others: "
                f"missing {sorted(wanted - named)}, unknown {sorted(named - wanted)}"
            )
        return self.division

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
        division = self._labels_of(nodes, classes)
        rng = np.random.default_rng(seed)
        parts: list[list[Indices]] = [[] for _ in range(nodes)]
        for label in range(classes):
            owners = [node for node, held in enumerate(division) if label in held]
            _deal_out(parts, owners, rng.permutation(np.flatnonzero(labels == label)))
        return parts


@dataclass(frozen=True)
class Dirichlet(Partition):
    """For each label, the nodes' shares are drawn from a symmetric Dirichlet distribution.

    Decided where the literature differs: shares are not rebalanced, so node sizes are as skewed as
    the distribution makes them, and what ``alpha`` means does not depend on the order of the
    labels. Draws that leave a node with fewer than ``min_examples`` are repeated, up to 550 times.
    That serves 50 nodes with ``alpha=0.1`` on the ten-class sets, digits (1,238 examples) included;
    two classes need fewer nodes or more alpha.

    Parameters
    ----------
    alpha : float
        Concentration, greater than 0: small values give each node few labels, large ones all.
    min_examples : int
        The fewest examples of a node, at least 1. Two let a node both train and validate.
    """

    takes_numbers: ClassVar[bool] = False

    alpha: float = 0.1
    min_examples: int = 2

    def __post_init__(self) -> None:
        _check("alpha", self.alpha, 0 < self.alpha < float("inf"), "a number above 0")
        _check("min_examples", self.min_examples, self.min_examples >= 1, "at least 1")

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
        order = np.random.default_rng(seed).permutation(len(labels))
        by_label = [each for label in range(classes) if len(each := order[labels[order] == label])]
        # Flower's partitioner draws 11 times and gives up: then the next seed, derived from ours.
        attempts = 50 if len(labels) >= nodes * self.min_examples else 0
        for attempt in np.random.SeedSequence(seed).generate_state(attempts):
            rng = np.random.default_rng(int(attempt))
            for _ in range(11):
                parts: list[list[Indices]] = [[] for _ in range(nodes)]
                for positions in by_label:
                    shares = np.cumsum(rng.dirichlet([float(self.alpha)] * nodes))
                    cuts = (shares * len(positions)).astype(int)[:-1]
                    for part, some in zip(parts, np.split(positions, cuts), strict=True):
                        part.append(some)
                if min(sum(map(len, part)) for part in parts) >= self.min_examples:
                    return parts
        raise ValueError(
            f"no Dirichlet draw gave each of {nodes} nodes at least {self.min_examples} of "
            f"{len(labels)} examples: raise partition.alpha (now {self.alpha}), lower "
            f"partition.min_examples, or use fewer nodes"
        )


@dataclass(frozen=True)
class Shards(Partition):
    """Examples sorted by label are cut into equal shards, and nodes get random shards.

    This is the pathological division of McMahan et al. (2017, section 3). There are exactly
    ``nodes * shards_per_node`` shards, whose sizes differ by at most one, so nothing is left over.

    Parameters
    ----------
    shards_per_node : int
        At least 1; roughly the most labels that a node holds.
    """

    shards_per_node: int = 2

    def __post_init__(self) -> None:
        _check("shards_per_node", self.shards_per_node, self.shards_per_node >= 1, "at least 1")

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
        total = nodes * self.shards_per_node
        if total > len(labels):
            raise ValueError(
                f"{nodes} nodes with {self.shards_per_node} shards each need at least {total} "
                f"examples, got {len(labels)}: lower partition.shards_per_node or use fewer nodes"
            )
        order = np.random.default_rng(seed).permutation(len(labels))
        shards = np.array_split(order[np.argsort(labels[order], kind="stable")], total)
        hands = np.random.default_rng(seed).permutation(total).reshape(nodes, -1)
        return [[shards[number] for number in hand] for hand in hands]


@dataclass(frozen=True)
class Iid(Partition):
    """Every node gets an equal share, drawn at random."""

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
        order = np.random.default_rng(seed).permutation(len(labels))
        return [[part] for part in np.array_split(order, nodes)]


@dataclass(frozen=True)
class Quantity(Partition):
    """Node sizes follow a power law; labels are drawn at random.

    Node ``k`` gets a share in proportion to ``(k + 1) ** -skew``, so node 0 is the largest. Every
    node gets at least one example.

    Parameters
    ----------
    skew : float
        Exponent, at least 0: 0 gives equal sizes, 1 makes node 0 ten times as large as node 9.
    """

    skew: float = 1.0

    def __post_init__(self) -> None:
        _check("skew", self.skew, 0 <= self.skew < float("inf"), "a number of at least 0")

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
        order = np.random.default_rng(seed).permutation(len(labels))
        sizes = apportion(np.arange(1, nodes + 1, dtype=np.float64) ** -self.skew, len(labels))
        while sizes.min() == 0:
            sizes[sizes.argmin()] += 1
            sizes[sizes.argmax()] -= 1
        return [[part] for part in np.split(order, np.cumsum(sizes)[:-1])]


@dataclass(frozen=True)
class Groups(Partition):
    """Node k holds group k, mixed with the others' as far as wanted (Guha 2018, Section 6.1).

    Each example of group g goes to node g with probability ``mixing``, the paper's γ, otherwise to
    one of the other nodes at random.

    Parameters
    ----------
    mixing : float
        In [0, 1]: 1 gives every node one group, 1 / nodes divides at random.
    """

    remedy: ClassVar[str] = "set another partition.mixing, or use more examples"

    mixing: float = 1.0

    def __post_init__(self) -> None:
        _check("mixing", self.mixing, 0 <= self.mixing <= 1, "in [0, 1]")

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
        if groups is None:
            raise ValueError(
                "the data set has no groups: use permuted, parity, driving, glyphs, tweets with a "
                "group_share, or another partition"
            )
        own = np.asarray(groups, dtype=np.int64)
        if own.shape != labels.shape:
            raise ValueError(f"there must be one group per label, got {len(own)} groups")
        if nodes != (count := int(own.max()) + 1):
            raise ValueError(f"the data set has {count} groups: set nodes={count}, got {nodes}")
        rng = np.random.default_rng(seed)
        leaves = rng.random(len(own)) >= self.mixing
        # A step of 1 … nodes - 1 around the circle of nodes is a random other node.
        steps = rng.integers(1, nodes, size=len(own)) if nodes > 1 else 0
        owner = (own + leaves * steps) % nodes
        return [[np.flatnonzero(owner == node)] for node in range(nodes)]


@dataclass(frozen=True)
class Skew(Partition):
    """Nodes hold some of the labels, and a few nodes hold most of the data.

    The multi-model slides: "each client: 30 % labels", "10 % clients hold 52.6 % data of each
    task", which is ten times as much as another client has. Decided here: which nodes are rich and
    which labels a node holds is drawn for each task by itself; labels are dealt so that each has
    about as many holders, among the rich and among the others; of each label the rich hold
    `rich_data` together, in equal parts.

    Parameters
    ----------
    label_share : float
        Share of the labels that a node holds, in (0, 1]; at least one label.
    rich_nodes : float
        Share of the nodes that are rich, in [0, 1); if above 0, at least one node.
    rich_data : float
        Share of the data that they hold together, in (0, 1).
    """

    takes_numbers: ClassVar[bool] = False
    remedy: ClassVar[str] = "use fewer nodes or more examples"

    label_share: float = 0.3
    rich_nodes: float = 0.1
    rich_data: float = 0.526

    def __post_init__(self) -> None:
        _check("label_share", self.label_share, 0 < self.label_share <= 1, "in (0, 1]")
        _check("rich_nodes", self.rich_nodes, 0 <= self.rich_nodes < 1, "in [0, 1)")
        _check("rich_data", self.rich_data, 0 < self.rich_data < 1, "in (0, 1)")

    def _divide(
        self, labels: NDArray[Any], nodes: int, classes: int, seed: int, groups: Any
    ) -> Parts:
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
            owners = [rng.permutation(np.flatnonzero(held[:, label] & g)) for g in (rich, ~rich)]
            cut = round(self.rich_data * len(positions))
            if not len(owners[0]) or not len(owners[1]):
                cut = len(positions) if len(owners[0]) else 0
            for group, some in zip(owners, np.split(positions, [cut]), strict=True):
                _deal_out(parts, group.tolist(), some)
        return parts

    @staticmethod
    def _deal(
        rich: NDArray[np.bool_], each: int, classes: int, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Return which node holds which label, as evenly as possible in both groups."""
        held = np.zeros((len(rich), classes), dtype=bool)
        for group in (rich, ~rich):
            for node in rng.permutation(np.flatnonzero(group)):
                # Labels without a holder come first, then those with the fewest in the group.
                unheld = ~held.any(axis=0)
                order = np.lexsort((rng.random(classes), held[group].sum(axis=0), ~unheld))
                held[node, order[:each]] = True
        return held


def _check(option: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"partition.{option} must be {allowed}, got {value}")


def _checked_labels(
    labels: NDArray[Any], nodes: int, classes: int, takes_numbers: bool
) -> NDArray[Any]:
    """Return the labels after checking that they can be divided at all."""
    labels = np.asarray(labels)
    is_number = classes == 0 and labels.dtype.kind == "f"
    if is_number and not takes_numbers:
        raise ValueError(
            "labels are numbers, and this partition goes by classes: take partition=iid, "
            "quantity, shards or groups"
        )
    if labels.ndim != 1 or not len(labels) or not (is_number or labels.dtype.kind in "iu"):
        raise ValueError(
            f"labels must be a non-empty vector of whole numbers, got shape {labels.shape} "
            f"of {labels.dtype}"
        )
    if not 1 <= nodes <= len(labels):
        raise ValueError(f"nodes must be 1 … {len(labels)} (one example each), got {nodes}")
    if is_number:
        return labels
    if classes < 1 or labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"labels must be 0 … {classes - 1} for {classes} classes, "
            f"got {labels.min()} … {labels.max()}"
        )
    return labels.astype(np.int64, copy=False)


def _deal_out(parts: list[list[Indices]], owners: Sequence[int], positions: Indices) -> None:
    """Give each owner an equal part of some positions."""
    for node, share in zip(owners, np.array_split(positions, max(1, len(owners))), strict=False):
        parts[node].append(share)
