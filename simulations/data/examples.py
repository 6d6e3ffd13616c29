"""The two values that all experiments pass around: labelled examples, and a data set of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gems_flwr.targets import Classes, Numbers, Target
from simulations.data.splits import balanced_sample, stratified_sample


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled examples, kept as they are stored (pixels stay bytes) to save memory.

    Both arrays are read-only views, because all nodes of a process share one data set.

    Parameters
    ----------
    features : np.ndarray
        One row per example: uint8 pixels, or float16 / float32 feature vectors.
    labels : np.ndarray
        One class (int64) or one number (float32) per example.
    """

    features: NDArray[Any]
    labels: NDArray[Any]

    def __post_init__(self) -> None:
        features = np.asarray(self.features).view()
        given = np.asarray(self.labels)
        kind = np.float32 if given.dtype.kind == "f" else np.int64
        labels = given.astype(kind, copy=False).view()
        if labels.ndim != 1 or features.ndim < 2 or len(features) != len(labels):
            raise ValueError(
                f"examples need one row of features per label, got features of shape "
                f"{features.shape} and labels of shape {labels.shape}"
            )
        features.flags.writeable = False
        labels.flags.writeable = False
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64] | Sequence[int]) -> Self:
        """Return the examples at these positions, in this order, as a copy."""
        chosen = np.asarray(indices, dtype=np.int64)
        return type(self)(self.features[chosen], self.labels[chosen])

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Join several parts to one, in the order given."""
        if not parts:
            raise ValueError("there must be at least one part to concatenate, got none")
        shapes = {part.features.shape[1:] for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"parts differ in the shape of an example: {sorted(shapes)}")
        return cls(
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.labels for part in parts]),
        )

    def class_counts(self, classes: int) -> NDArray[np.int64]:
        """Return how many examples each of the classes 0 … ``classes - 1`` has."""
        if self.labels.dtype.kind == "f":
            raise ValueError(f"labels must be classes 0 … {classes - 1}, got {self.labels.dtype}")
        if len(self) and not 0 <= self.labels.min() <= self.labels.max() < classes:
            raise ValueError(
                f"labels must be 0 … {classes - 1}, got {self.labels.min()} … {self.labels.max()}"
            )
        return np.bincount(self.labels, minlength=classes).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set, split into what nodes get, what the server has, and what is tested.

    Parameters
    ----------
    name : str
        The name of the configuration, such as ``"mnist"``.
    classes : int
        Number of classes; labels are 0 … ``classes - 1``. 0: there are none, and labels are
        numbers.
    input_shape : tuple of int
        Shape of one example: ``(channels, height, width)`` or ``(features,)``.
    scale : float
        A model sees ``features.astype(float32) * scale``. One constant per data set: statistics
        of the pooled data are not to be had in a federation without communication.
    train : Examples
        Divided among the nodes; each node later keeps a part of its share for validation.
    public : Examples
        The server's own sample; never part of a node's data.
    test : Examples
        Held out from everybody.
    groups : np.ndarray, optional
        Where each training example comes from, 0 … number of groups - 1: what ``partition=groups``
        divides by. None: the data set knows no groups.
    """

    name: str
    classes: int
    input_shape: tuple[int, ...]
    scale: float
    train: Examples
    public: Examples
    test: Examples
    groups: NDArray[np.int64] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for part in ("train", "public", "test"):
            examples: Examples = getattr(self, part)
            if examples.features.shape[1:] != self.input_shape:
                raise ValueError(
                    f"{self.name}: {part} examples have shape {examples.features.shape[1:]}, "
                    f"expected {self.input_shape}"
                )
            if self.classes:
                examples.class_counts(self.classes)  # refuses labels out of range
            elif examples.labels.dtype.kind != "f" or not np.isfinite(examples.labels).all():
                raise ValueError(
                    f"{self.name}: without classes labels are finite numbers, got "
                    f"{examples.labels.dtype} with "
                    f"{int((~np.isfinite(examples.labels)).sum())} that are not finite"
                )
        if self.groups is not None:
            groups = _checked_groups(self.groups, len(self.train), f"{self.name}: train")
            groups.flags.writeable = False
            object.__setattr__(self, "groups", groups)

    @property
    def target(self) -> Target:
        """What is to be predicted of an example."""
        return Classes() if self.classes else Numbers()


def strata(labels: NDArray[Any]) -> NDArray[np.int64]:
    """Return what samples keep the proportions of: classes; numbers are all alike."""
    return np.zeros(len(labels), np.int64) if labels.dtype.kind == "f" else labels


def assemble(
    name: str,
    *,
    classes: int,
    scale: float,
    pool: Examples,
    test: Examples,
    public: int,
    seed: int,
    groups: NDArray[Any] | None = None,
) -> Dataset:
    """Take the server's public sample out of the training pool and build the data set.

    The sample keeps the pool's proportions of classes, and of groups within them (of groups alone
    where labels are numbers). The rest stays in stored order.

    Parameters
    ----------
    name, classes, scale, test
        As in `Dataset`.
    pool : Examples
        All training examples; `groups` has the group of each.
    public : int
        Size of the public sample, 0 … ``len(pool) - 1``; the seed decides who is in it.
    """
    if not isinstance(public, int) or not 0 <= public < len(pool):
        raise ValueError(
            f"dataset.public must be a whole number from 0 to {len(pool) - 1} "
            f"for {name}, got {public!r}"
        )
    layers = strata(pool.labels)
    if groups is not None:
        groups = _checked_groups(groups, len(pool), f"{name}: pool")
        layers = layers + max(1, classes) * groups
    chosen = stratified_sample(layers, public, np.random.default_rng(seed))
    rest = np.setdiff1d(np.arange(len(pool)), chosen, assume_unique=True)
    return Dataset(
        name=name,
        classes=classes,
        input_shape=tuple(pool.features.shape[1:]),
        scale=scale,
        train=pool.take(rest),
        public=pool.take(chosen),
        test=test,
        groups=None if groups is None else groups[rest],
    )


def _checked_groups(groups: NDArray[Any], count: int, whose: str) -> NDArray[np.int64]:
    """Return the groups as a view in int64 after checking that there is one per example."""
    found = np.asarray(groups)
    if found.shape != (count,) or found.dtype.kind not in "iub" or found.min(initial=0) < 0:
        raise ValueError(
            f"{whose} examples need one group of at least 0 each, {count} whole numbers, "
            f"got shape {found.shape} of {found.dtype}"
        )
    return found.astype(np.int64, copy=False).view()


def balance_classes(dataset: Dataset, per_class: int, seed: int) -> Dataset:
    """Return a data set whose training part has the same number of every class.

    The public sample keeps its size and is balanced, too; the test part stays as it is, so that
    balanced accuracy is to be reported. Examples of rare classes repeat, and a node may then have
    the same one for training and for validation.
    """
    if not dataset.classes:
        raise ValueError(f"{dataset.name} has no classes to balance: set dataset.balance=null")
    rng = np.random.default_rng([seed, per_class])
    public = dataset.public
    if len(public):
        each = -(-len(public) // dataset.classes)
        chosen = balanced_sample(public.labels, each, rng)
        # In random order and to the size that was asked for, since a prefix may be used.
        public = public.take(rng.permutation(chosen)[: len(public)])
    rows = balanced_sample(dataset.train.labels, per_class, rng)
    groups = None if dataset.groups is None else dataset.groups[rows]
    return replace(dataset, train=dataset.train.take(rows), public=public, groups=groups)
