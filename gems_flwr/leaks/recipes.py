"""How a space was made, as far as it tells, and how it would be made otherwise.

A file holds moments, not the options that made them. Its form says most of it: full moments, a
fixed rank, the automatic rule, means alone, eight bits or not. With the data at hand a recipe can
be tried: if it makes the very arrays of the file, it is how the file was made.

Decided here: a private release is made again with a clip that the file does not tell; the
median length of the samples stands in for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.moments.cone_building import MIN_COUNT, build_cone
from gems_flwr.moments.group_means import build_means
from gems_flwr.moments.private_release import PrivateRelease
from gems_flwr.moments.small_means import MEAN_COUNT, MeanRule
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance, QuantizedArray
from gems_flwr.spaces.partial_covariance import PartialCovariance
from gems_flwr.typing import Float, Rank

Moments = tuple[Float, Float]


@dataclass(frozen=True)
class Recipe:
    """How class moments are made of samples.

    Parameters
    ----------
    kind : {"cone", "means"}
        Moments, or means alone.
    rank, int8, min_count, private
        See `gems_flwr.moments.cone_building.build_cone`.
    pieces : int
        Clusters or groups of a class at most, from 1.
    mean_rule : MeanRule
        How small classes are shown.
    """

    kind: Literal["cone", "means"] = "cone"
    rank: Rank = "auto"
    int8: bool = True
    min_count: int | None = None
    pieces: int = 1
    private: PrivateRelease | None = None
    mean_rule: MeanRule = dataclasses.field(default_factory=MeanRule)

    def __str__(self) -> str:
        """Return how a server asks for it."""
        if self.kind == "means":
            return f"Means(groups={self.pieces})" if self.pieces > 1 else "Means()"
        options = [] if self.private else [f"rank={self.rank!r}"]
        if self.private is not None:
            options.append(f"dp_epsilon={self.private.epsilon:g}")
        if self.pieces > 1:
            options.append(f"clusters={self.pieces}")
        if self.min_count not in (None, MIN_COUNT):
            options.append(f"min_count={self.min_count}")
        if not self.int8 and self.rank != "full" and not self.private:
            options.append("int8=False")
        return f"Cone({', '.join(options)})"

    def build(
        self, inputs: Float, labels: NDArray[np.int64], num_classes: int, seed: int = 0
    ) -> ClassMomentCone:
        """Return the space that it makes; `seed` is that of clusters, groups and noise.

        Raises
        ------
        SpaceError
            If nothing would be sent.
        """
        table, classes = torch.from_numpy(inputs).float(), torch.from_numpy(labels)
        if self.kind == "means":
            return build_means(
                table,
                classes,
                num_classes,
                groups=self.pieces,
                int8=self.int8,
                rule=self.mean_rule,
                seed=seed,
            )
        return build_cone(
            table,
            classes,
            num_classes,
            rank=self.rank,
            int8=self.int8,
            clusters=self.pieces,
            min_count=self.min_count,
            private=self.private,
            seed=seed,
            noise_seed=seed,
            mean_rule=self.mean_rule,
        )


def recipe_of(cone: ClassMomentCone, clip: float = 1.0) -> Recipe:
    """Return how a cone was made, as far as its form tells.

    Parameters
    ----------
    cone : ClassMomentCone
        What was made.
    clip : float
        Length of samples under differential privacy, above 0.
    """
    pieces = int(np.unique(cone.labels, return_counts=True)[1].max())
    eight = isinstance(cone.means, QuantizedArray)
    if cone.privacy is not None:
        private = PrivateRelease(*cone.privacy, clip)
        return Recipe(rank="full", private=private)
    covariance = cone.covariance
    if isinstance(covariance, PartialCovariance):
        if covariance.own is None:
            return Recipe("means", int8=eight, pieces=pieces)
        covariance = covariance.own
    smallest = int(cone.counts[~cone.lacking].min())
    least = None if smallest >= MIN_COUNT else max(2, smallest)
    if isinstance(covariance, FullCovariance):
        return Recipe(rank="full", pieces=pieces, min_count=least)
    if covariance.ranks is None:
        return Recipe(rank=covariance.rank(0), int8=eight, pieces=pieces, min_count=least)
    return Recipe(int8=_is_eight(covariance), pieces=pieces)


def _is_eight(covariance: LowRankCovariance) -> bool:
    return isinstance(covariance.deviations, QuantizedArray)


def tried_recipe(
    cone: ClassMomentCone, inputs: Float, labels: NDArray[np.int64]
) -> tuple[Recipe, bool]:
    """Return how a cone was made of samples, and whether that makes it to the last bit."""
    recipe = recipe_of(cone, typical_length(inputs))
    if cone.privacy is not None or recipe.pieces > 1:
        return recipe, False
    rules = [MeanRule(), MeanRule(exact=True), MeanRule(least=2, exact=True)]
    for rule in rules:
        attempt = dataclasses.replace(recipe, mean_rule=rule)
        try:
            made = attempt.build(inputs, labels, cone.num_classes)
        except SpaceError:
            continue
        if _same(made, cone):
            return attempt, True
        if not cone.lacking.any() and not cone.withheld:
            break
    return recipe, False


def _same(one: ClassMomentCone, other: ClassMomentCone) -> bool:
    ours, theirs = one.to_arrays()[0], other.to_arrays()[0]
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[key], theirs[key]) for key in ours
    )


def typical_length(inputs: Float) -> float:
    """Return the median length of samples, above 0."""
    return float(np.median(np.linalg.norm(inputs, axis=1))) or 1.0


def class_moments(cone: ClassMomentCone, label: int) -> Moments | None:
    """Return mean and covariance of a class, over all its components; None if it was not sent."""
    entries = np.flatnonzero(cone.labels == label)
    if not len(entries):
        return None
    means, counts = mean_values(cone)[entries], cone.counts[entries].astype(np.float64)
    if len(entries) == 1:
        return means[0], cone.covariance.dense_matrix(int(entries[0]))
    shares = counts / counts.sum()
    mean = shares @ means
    covariance = ((means - mean).T * shares) @ (means - mean)
    for share, entry in zip(shares, entries.tolist(), strict=True):
        covariance += share * cone.covariance.dense_matrix(entry)
    return mean, covariance


def releases(
    recipe: Recipe,
    label: int,
    inputs: Float,
    labels: NDArray[np.int64],
    num_classes: int,
    is_mean: bool,
    seed: int = 0,
) -> Callable[[Float], Moments | None]:
    """Return what turns other samples of a class into what would be sent of them.

    Parameters
    ----------
    recipe : Recipe
        How spaces are made.
    label : int
        The class.
    inputs, labels : arrays of shapes (n, D) and (n,)
        All samples of the node. Of a small class a mean is shown in directions of the others.
    num_classes : int
        Classes of the task.
    is_mean : bool
        Whether the class is sent as a mean alone; if a space of other samples is of another form
        in this, it is no fair trial, and None is returned.
    seed : int
        Of clusters, groups and noise.
    """
    others = labels != label if is_mean and recipe.kind == "cone" else np.zeros(len(labels), bool)
    if recipe.private is not None:
        # All other classes are noise of their own, which tells nothing about this one.
        private = dataclasses.replace(recipe.private, classes=(label,))
        recipe = dataclasses.replace(recipe, private=private)
    elif not is_mean:
        recipe = dataclasses.replace(recipe, min_count=2)
    rule = dataclasses.replace(recipe.mean_rule, least=min(recipe.mean_rule.least, MEAN_COUNT))
    recipe = dataclasses.replace(recipe, mean_rule=rule)
    draws = iter(range(seed, 2**62))

    def release(samples: Float) -> Moments | None:
        table = np.concatenate([samples, inputs[others]])
        classes = np.concatenate([np.full(len(samples), label), labels[others]])
        own = recipe
        if is_mean and recipe.kind == "cone" and recipe.rank != "auto":
            own = dataclasses.replace(recipe, min_count=len(samples) + 1)
        try:
            cone = own.build(table, classes.astype(np.int64), num_classes, next(draws))
        except SpaceError:
            return None
        entries = cone.labels == label
        if not entries.any() or bool(cone.lacking[entries].any()) != is_mean:
            return None
        return class_moments(cone, label)

    return release
