"""How the training examples are divided among the nodes.

A partition is a frozen set of options that is called with the labels::

    Dirichlet(alpha=0.1)(labels, nodes=50, classes=10, seed=0)

and returns one sorted array of positions per node: disjoint, together all positions, none empty.
The same arguments give the same division in every process.

`Dirichlet`, `Shards`, `Iid` and `Quantity` use the partitioners of ``flwr-datasets``; explicit
label divisions (`LabelDivision`) have no counterpart there.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simulations.data.splits import apportion

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

Indices = NDArray[np.int64]

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


class Partition(Protocol):
    """What every partition is: options that can be called with labels."""

    def __call__(
        self, labels: NDArray[Any], *, nodes: int, classes: int, seed: int
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

        Returns
        -------
        list of np.ndarray
            Sorted positions, one array per node.

        Raises
        ------
        ValueError
            If the examples cannot be divided like this; the message says what to change.
        """


@dataclass(frozen=True)
class LabelDivision:
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

    Raises
    ------
    ValueError
        If a node has no label, a negative one, or the same one twice.
    """

    division: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if self.division is None:
            return
        # Tuples, so that options can be compared, hashed and not changed behind our back.
        division = tuple(tuple(int(label) for label in node) for node in self.division)
        for node, labels in enumerate(division):
            if not labels or min(labels) < 0 or len(set(labels)) < len(labels):
                raise ValueError(
                    f"partition.division: node {node} must have one or more different labels of "
                    f"at least 0, got {list(labels)}"
                )
        object.__setattr__(self, "division", division)

    def labels_of(self, *, nodes: int, classes: int) -> tuple[tuple[int, ...], ...]:
        """Return the labels that each node holds.

        Raises
        ------
        ValueError
            If an explicit division does not fit the number of nodes or classes.
        """
        if self.division is None:
            return _default_division(nodes, classes)
        if len(self.division) != nodes:
            raise ValueError(
                f"partition.division must have one list of labels for each of the {nodes} nodes, "
                f"got {len(self.division)} lists"
            )
        named = {label for labels in self.division for label in labels}
        if unknown := sorted(named - set(range(classes))):
            raise ValueError(
                f"partition.division names the labels {unknown}, but labels are 0 … {classes - 1}"
            )
        if absent := sorted(set(range(classes)) - named):
            raise ValueError(
                f"partition.division gives the labels {absent} to no node; every label of "
                f"0 … {classes - 1} must be named"
            )
        return tuple(tuple(labels) for labels in self.division)

    def __call__(
        self, labels: NDArray[Any], *, nodes: int, classes: int, seed: int
    ) -> list[Indices]:
        """Divide the examples; see `Partition`."""
        labels = checked_labels(labels, nodes, classes)
        division = self.labels_of(nodes=nodes, classes=classes)
        rng = np.random.default_rng(seed)
        parts: list[list[Indices]] = [[] for _ in range(nodes)]
        for label in range(classes):
            owners = [node for node, held in enumerate(division) if label in held]
            positions = rng.permutation(np.flatnonzero(labels == label))
            for node, share in zip(owners, np.array_split(positions, len(owners)), strict=True):
                parts[node].append(share)
        return finished(
            [np.concatenate(shares) for shares in parts],
            "use fewer nodes, or give this node a label that has enough examples",
        )


@dataclass(frozen=True)
class Dirichlet:
    """For each label, the nodes' shares are drawn from a symmetric Dirichlet distribution.

    Decided where the literature differs: shares are not rebalanced (``self_balancing=False``), so
    node sizes are as skewed as the distribution makes them, and what ``alpha`` means does not
    depend on the order of the labels. Draws that leave a node with fewer than ``min_examples``
    are thrown away and repeated, up to 550 times. That serves 50 nodes with ``alpha=0.1`` on the
    ten-class sets, digits (1,238 examples) included; two classes need fewer nodes or more alpha.

    Parameters
    ----------
    alpha : float
        Concentration, greater than 0: small values give each node few labels, large ones all.
    min_examples : int
        The fewest examples of a node, at least 1. Two let a node both train and validate.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    alpha: float = 0.1
    min_examples: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"partition.alpha must be a number above 0, got {self.alpha}")
        if self.min_examples < 1:
            raise ValueError(f"partition.min_examples must be at least 1, got {self.min_examples}")

    def __call__(
        self, labels: NDArray[Any], *, nodes: int, classes: int, seed: int
    ) -> list[Indices]:
        """Divide the examples; see `Partition`."""
        from flwr_datasets.partitioner import DirichletPartitioner

        labels = checked_labels(labels, nodes, classes)
        # The partitioner cuts each label's examples in their order, so give it a random order.
        order = np.random.default_rng(seed).permutation(len(labels))
        # One partitioner draws 11 times and gives up; take a new seed, derived from ours.
        attempts = 50 if len(labels) >= nodes * self.min_examples else 0
        for attempt_seed in np.random.SeedSequence(seed).generate_state(attempts):
            partitioner = DirichletPartitioner(
                num_partitions=nodes,
                partition_by="label",
                alpha=float(self.alpha),
                min_partition_size=self.min_examples,
                self_balancing=False,
                shuffle=False,
                seed=int(attempt_seed),
            )
            try:
                return finished(_load(partitioner, order, labels, nodes))
            except ValueError:
                continue
        raise ValueError(
            f"no Dirichlet draw gave each of {nodes} nodes at least {self.min_examples} of "
            f"{len(labels)} examples: raise partition.alpha (now {self.alpha}), lower "
            f"partition.min_examples, or use fewer nodes"
        )


@dataclass(frozen=True)
class Shards:
    """Examples sorted by label are cut into equal shards, and nodes get random shards.

    This is the pathological division of McMahan et al. (2017, section 3). There are exactly
    ``nodes * shards_per_node`` shards, whose sizes differ by at most one, so nothing is left over.

    Parameters
    ----------
    shards_per_node : int
        At least 1; roughly the most labels that a node holds.

    Raises
    ------
    ValueError
        If ``shards_per_node`` is below 1.
    """

    shards_per_node: int = 2

    def __post_init__(self) -> None:
        if self.shards_per_node < 1:
            raise ValueError(
                f"partition.shards_per_node must be at least 1, got {self.shards_per_node}"
            )

    def __call__(
        self, labels: NDArray[Any], *, nodes: int, classes: int, seed: int
    ) -> list[Indices]:
        """Divide the examples; see `Partition`."""
        from flwr_datasets.partitioner import ShardPartitioner

        labels = checked_labels(labels, nodes, classes, numbers=True)
        total = nodes * self.shards_per_node
        if total > len(labels):
            raise ValueError(
                f"{nodes} nodes with {self.shards_per_node} shards each need at least {total} "
                f"examples, got {len(labels)}: lower partition.shards_per_node or use fewer nodes"
            )
        order = np.random.default_rng(seed).permutation(len(labels))
        by_label = order[np.argsort(labels[order], kind="stable")]
        shards = np.array_split(by_label, total)
        # The partitioner drops what does not fill a whole shard. So it deals out whole shards here:
        # one row per shard, numbered in the order of their labels.
        partitioner = ShardPartitioner(
            num_partitions=nodes,
            partition_by="label",
            num_shards_per_partition=self.shards_per_node,
            shard_size=1,
            shuffle=False,
            seed=seed,
        )
        numbers = np.arange(total)
        dealt = _load(partitioner, numbers, numbers, nodes)
        return finished([np.concatenate([shards[i] for i in hand]) for hand in dealt])


@dataclass(frozen=True)
class Iid:
    """Every node gets an equal share, drawn at random."""

    def __call__(
        self, labels: NDArray[Any], *, nodes: int, classes: int, seed: int
    ) -> list[Indices]:
        """Divide the examples; see `Partition`."""
        labels = checked_labels(labels, nodes, classes, numbers=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        # The runs that the IidPartitioner of flwr_datasets makes (a test compares them), which
        # takes seconds to import, and 3 ms for every node.
        return finished(np.array_split(order, nodes))


@dataclass(frozen=True)
class Quantity:
    """Node sizes follow a power law; labels are drawn at random.

    Node ``k`` gets a share in proportion to ``(k + 1) ** -skew``, so node 0 is the largest. Every
    node gets at least one example.

    Parameters
    ----------
    skew : float
        Exponent, at least 0: 0 gives equal sizes, 1 makes node 0 ten times as large as node 9.

    Raises
    ------
    ValueError
        If ``skew`` is negative or not finite.
    """

    skew: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.skew < float("inf"):
            raise ValueError(f"partition.skew must be a number of at least 0, got {self.skew}")

    def sizes(self, examples: int, nodes: int) -> list[int]:
        """Return the number of examples of each node; they sum to ``examples``."""
        sizes = apportion(np.arange(1, nodes + 1, dtype=np.float64) ** -self.skew, examples)
        while sizes.min() == 0:
            sizes[sizes.argmin()] += 1
            sizes[sizes.argmax()] -= 1
        return [int(size) for size in sizes]

    def __call__(
        self, labels: NDArray[Any], *, nodes: int, classes: int, seed: int
    ) -> list[Indices]:
        """Divide the examples; see `Partition`."""
        from flwr_datasets.partitioner import SizePartitioner

        labels = checked_labels(labels, nodes, classes, numbers=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        partitioner = SizePartitioner(self.sizes(len(labels), nodes))
        return finished(_load(partitioner, order, labels, nodes))


def _default_division(nodes: int, classes: int) -> tuple[tuple[int, ...], ...]:
    """Return the paper's label division, or the obvious one where the paper has none."""
    if (classes, nodes) in TABLE_4:
        return TABLE_4[classes, nodes]
    if nodes > classes:
        return tuple((node % classes,) for node in range(nodes))
    bounds = [node * classes // nodes for node in range(nodes + 1)]
    return tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise(bounds))


def checked_labels(
    labels: NDArray[Any], nodes: int, classes: int, *, numbers: bool = False
) -> NDArray[Any]:
    """Return the labels as int64 after checking that they can be divided at all.

    Parameters
    ----------
    labels, nodes, classes
        As in `Partition`.
    numbers : bool
        Whether labels may also be numbers, which there are where there are no classes; these
        are returned as they are.
    """
    labels = np.asarray(labels)
    if classes == 0 and labels.dtype.kind == "f" and labels.ndim == 1:
        if not numbers:
            raise ValueError(
                "labels are numbers, and this partition goes by classes: take partition=iid, "
                "quantity, shards or groups"
            )
        if not 1 <= nodes <= len(labels):
            raise ValueError(f"nodes must be 1 … {len(labels)} (one example each), got {nodes}")
        return labels
    if labels.ndim != 1 or len(labels) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels must be a non-empty vector of whole numbers, got shape {labels.shape} "
            f"of {labels.dtype}"
        )
    if not 1 <= nodes <= len(labels):
        raise ValueError(f"nodes must be 1 … {len(labels)} (one example each), got {nodes}")
    if classes < 1 or labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"labels must be 0 … {classes - 1} for {classes} classes, "
            f"got {labels.min()} … {labels.max()}"
        )
    return labels.astype(np.int64, copy=False)


def finished(parts: list[Indices], remedy: str = "use fewer nodes") -> list[Indices]:
    """Sort each node's positions; refuse a division that leaves a node without any."""
    for node, part in enumerate(parts):
        if len(part) == 0:
            raise ValueError(f"node {node} of {len(parts)} gets no examples: {remedy}")
    return [np.sort(part).astype(np.int64) for part in parts]


@functools.cache
def _table_class() -> Any:
    """Return a `datasets.Dataset` that hands out a column as an array.

    From version 4 on, indexing a `datasets.Dataset` by name gives a lazy column, which the
    Dirichlet partitioner turns into an array row by row: 7 s for 55,000 rows, instead of 0.04 s.

    Made on first use, because importing ``datasets`` takes seconds that label divisions, and Ray
    workers that use them, need not spend.
    """
    from datasets import Dataset

    class Table(Dataset):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                return super().__getitem__(slice(None))[key]
            return super().__getitem__(key)

    return Table


def _load(
    partitioner: Partitioner, positions: Indices, labels: NDArray[Any], nodes: int
) -> list[Indices]:
    """Run a partitioner over the rows at ``positions``, in this order; return theirs per node."""
    columns = {"label": labels[positions], "position": positions}
    with warnings.catch_warnings():
        # The Dirichlet partitioner warns on every repeated draw, pyarrow about its caller's style.
        warnings.simplefilter("ignore")
        partitioner.dataset = _table_class().from_dict(columns).with_format("numpy")
        # [:] reads all rows at once; a column by name would be read row by row.
        return [np.asarray(partitioner.load_partition(n)[:]["position"]) for n in range(nodes)]
