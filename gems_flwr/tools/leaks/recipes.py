"""How a space was made, as far as its form shows, and what would be made of other samples.

A file holds moments, not the options that made them. Its form shows most of them: full moments, a
fixed rank, the automatic rule, means alone, eight bits or not. With the data at hand a recipe is
tried: if it makes the very arrays of the file, it is how the file was made. A private release is
made again with the median length of the samples as its clip, which the file does not show.

Attacks with somebody else's samples would find nothing, and say so: the worst kind of comfort. So
data that do not fit the file are refused, by the class that shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.cone import (
    MEAN_COUNT,
    MIN_COUNT,
    ClassMomentCone,
    CommonCovariance,
    FullCovariance,
    MeanRule,
    PartialCovariance,
    PrivateRelease,
    QuantizedArray,
    build_cone,
    build_means,
    mean_values,
)
from gems_flwr.typing import Float, Rank

Moments = tuple[Float, Float]
# How small means are shown is the node's own affair, of which the file says nothing.
_RULES = (MeanRule(), MeanRule(exact=True), MeanRule(least=2, exact=True))
# Deviations of a feature, on average, by which means of the same data may differ.
_NEAR_ENOUGH = 0.1


@dataclass(frozen=True, eq=False)
class LayerSamples:
    """Inputs of a layer and their classes, as arrays of shapes (n, D) and (n,)."""

    inputs: Float
    labels: NDArray[np.int64]

    def of(self, label: int) -> Float:
        """Return the inputs of one class."""
        return np.asarray(self.inputs[self.labels == label])

    @classmethod
    def none(cls, features: int) -> LayerSamples:
        """Return no samples."""
        return cls(np.zeros((0, features)), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Recipe:
    """How class moments, or means alone, are made of samples; options are those of `build_cone`.

    `pieces` are clusters or groups of a class at most.
    """

    kind: Literal["cone", "means"] = "cone"
    rank: Rank = "auto"
    int8: bool = True
    min_count: int | None = None
    pieces: int = 1
    private: PrivateRelease | None = None
    mean_rule: MeanRule = dataclasses.field(default_factory=MeanRule)

    def build(self, data: LayerSamples, num_classes: int, seed: int = 0) -> ClassMomentCone:
        """Return the space that it makes, or raise a SpaceError if nothing would be sent."""
        table, classes = torch.from_numpy(data.inputs).float(), torch.from_numpy(data.labels)
        how: dict[str, Any] = {"int8": self.int8, "seed": seed}
        if self.kind == "means":
            how |= {"groups": self.pieces, "rule": self.mean_rule}
            return build_means(table, classes, num_classes, **how)
        how |= {"rank": self.rank, "clusters": self.pieces, "min_count": self.min_count}
        how |= {"private": self.private, "noise_seed": seed, "mean_rule": self.mean_rule}
        return build_cone(table, classes, num_classes, **how)


def recipe_of(cone: ClassMomentCone, data: LayerSamples) -> Recipe:
    """Return how a cone was made of data, as far as its form shows."""
    pieces = int(np.unique(cone.labels, return_counts=True)[1].max())
    eight = isinstance(cone.means, QuantizedArray)
    if cone.privacy is not None:
        clip = float(np.median(np.linalg.norm(data.inputs, axis=1))) or 1.0
        return Recipe(rank="full", private=PrivateRelease(*cone.privacy, clip))
    covariance = cone.covariance
    if isinstance(covariance, PartialCovariance):
        if covariance.own is None:
            return Recipe("means", int8=eight, pieces=pieces)
        covariance = covariance.own
    smallest = int(cone.counts[~cone.lacking].min())
    least = None if smallest >= MIN_COUNT else max(2, smallest)
    if isinstance(covariance, FullCovariance):
        return Recipe(rank="full", pieces=pieces, min_count=least)
    if isinstance(covariance, CommonCovariance):
        return Recipe(pieces=pieces)
    return Recipe(rank=covariance.rank(0), int8=eight, pieces=pieces, min_count=least)


def tried_recipe(cone: ClassMomentCone, data: LayerSamples) -> tuple[Recipe, bool]:
    """Return how a cone was made of data, and whether that makes it to the last bit.

    Counts of classes must be the same, and the means of classes that have a covariance: a
    SpaceError names the first class that does not fit. Under differential privacy both have noise,
    and only the shapes are compared.
    """
    _check_counts(cone, data)
    recipe = recipe_of(cone, data)
    if cone.privacy is not None:
        return recipe, False
    made = None
    for rule in _RULES:
        attempt = replace(recipe, mean_rule=rule)
        try:
            made = attempt.build(data, cone.num_classes)
        except SpaceError:
            continue
        ours, theirs = made.to_arrays()[0], cone.to_arrays()[0]
        if ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours):
            return attempt, True
    for label in np.unique(cone.labels[~cone.lacking]).tolist():
        sent, again = class_moments(cone, label), made and class_moments(made, label)
        if sent is None or not again:
            continue
        spread = np.sqrt(np.diag(again[1]).mean()) or 1.0
        far = float(np.sqrt(((sent[0] - again[0]) ** 2).mean()) / spread)
        if far > _NEAR_ENOUGH:
            raise SpaceError(
                f"class {label} of the data",
                "samples with the mean that the file has (inputs of the layer that it is for)",
                f"a mean that is {far:.2g} deviations away",
            )
    return recipe, False


def _check_counts(cone: ClassMomentCone, data: LayerSamples) -> None:
    if data.inputs.shape[1] != cone.num_features:
        expected = f"{cone.num_features} features, as in the file"
        raise SpaceError("data", expected, data.inputs.shape[1])
    if not len(data.labels):
        raise SpaceError("data", "samples", "none")
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= cone.num_classes:
        raise SpaceError("data", f"classes 0 to {cone.num_classes - 1}", f"{low} to {high}")
    if cone.privacy is not None:
        return
    for label in range(cone.num_classes):
        own, count = len(data.of(label)), int(cone.counts[cone.labels == label].sum())
        if label in cone.withheld and not count:
            if not own:
                raise SpaceError(f"class {label} of the data", "some samples, too few to send", 0)
        elif own != count:
            raise SpaceError(f"class {label} of the data", f"{count} samples, as the file", own)


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
    recipe: Recipe, label: int, data: LayerSamples, classes: int, is_mean: bool, seed: int = 0
) -> Callable[[Float], Moments | None]:
    """Return what turns other samples of a class into what would be sent of them.

    Of a small class a mean is shown in directions of the node's other classes, and by default all
    is in coordinates of a covariance that is common to them. `is_mean`: the class
    is sent as a mean alone; if a space of other samples is of another form in this, it is no fair
    trial, and None is returned.
    """
    needs_others = recipe.kind == "cone" and (is_mean or recipe.rank == "auto")
    others = (data.labels != label) & needs_others
    if recipe.private is not None:
        # All other classes are noise of their own, which shows nothing of this one.
        recipe = replace(recipe, private=replace(recipe.private, classes=(label,)))
    elif not is_mean:
        recipe = replace(recipe, min_count=2)
    least = min(recipe.mean_rule.least, MEAN_COUNT)
    recipe = replace(recipe, mean_rule=replace(recipe.mean_rule, least=least))
    draws = iter(range(seed, 2**62))

    def release(samples: Float) -> Moments | None:
        labels = np.concatenate([np.full(len(samples), label), data.labels[others]])
        table = LayerSamples(np.concatenate([samples, data.inputs[others]]), labels)
        own = recipe
        if needs_others and recipe.rank != "auto":
            own = replace(recipe, min_count=len(samples) + 1)
        try:
            cone = own.build(table, classes, next(draws))
        except SpaceError:
            return None
        entries = cone.labels == label
        if not entries.any() or bool(cone.lacking[entries].any()) != is_mean:
            return None
        return class_moments(cone, label)

    return release
