"""The samples that a space is said to be made of, and whether it can be.

Attacks that are tried with somebody else's samples would find nothing, and say so: the worst kind
of comfort. So a file and data that do not fit together are refused, by the class that shows it.

Decided here: counts must be equal, means within what they were rounded to and a tenth of a
deviation, for a file does not say how it was made. Under differential privacy both have noise, and
only the shapes can be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.leaks.disclosure import is_automatic, mean_steps, sent_rank
from gems_flwr.moments.automatic_rank import PUSHES, coarseness, feature_units
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.partial_covariance import PartialCovariance
from gems_flwr.typing import Float

# Deviations of a feature, on average, by which a mean may be off beyond its rounding.
NEAR_ENOUGH = 0.1


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


def check_made_of(cone: ClassMomentCone, data: LayerSamples) -> None:
    """Refuse data that a cone was not made of.

    Counts must be the same; means must be, within what they were rounded to. Under differential
    privacy both have noise, and only the shapes are looked at.

    Raises
    ------
    SpaceError
        Names the first class that does not fit.
    """
    if data.inputs.shape[1] != cone.num_features:
        raise SpaceError(
            "data", f"{cone.num_features} features, as in the file", data.inputs.shape[1]
        )
    if not len(data.labels):
        raise SpaceError("data", "samples", "none")
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= cone.num_classes:
        raise SpaceError("data", f"classes 0 to {cone.num_classes - 1}", f"{low} to {high}")
    if cone.privacy is not None:
        return
    means, units = mean_values(cone), feature_units(torch.from_numpy(data.inputs))
    for label in range(cone.num_classes):
        own, entries = data.of(label), np.flatnonzero(cone.labels == label)
        count = int(cone.counts[entries].sum())
        if not len(entries) and label in cone.withheld:
            if not len(own):
                raise SpaceError(f"class {label} of the data", "some samples, too few to send", 0)
            continue
        if len(own) != count:
            raise SpaceError(
                f"class {label} of the data", f"{count} samples, as the file", len(own)
            )
        for entry in entries if len(entries) == 1 else []:
            _check_mean(label, own, means[entry], _slack(cone, int(entry), own, units))


def _slack(cone: ClassMomentCone, entry: int, samples: Float, units: Float) -> Float | None:
    """Return by how much each feature of a mean may be off; None if it may be shown in part."""
    steps = mean_steps(cone, entry)
    if bool(cone.lacking[entry]):
        is_whole = isinstance(cone.covariance, PartialCovariance) and cone.covariance.own is None
        return steps / 2 if is_whole else None
    if is_automatic(cone):
        # Steps of the rule, which a file does not show where features have units of their own.
        count, rank = len(samples), sent_rank(cone, entry) or 0
        length = np.sqrt((samples.var(axis=0) / units**2).sum())
        step = coarseness(count, cone.num_features, rank) * PUSHES * length / count
        steps = np.maximum(steps, step * units)
    return np.asarray(steps / 2)


def _check_mean(label: int, samples: Float, sent: Float, slack: Float | None) -> None:
    if slack is None:
        return
    spread = samples.std(axis=0)
    # Beyond rounding, in deviations of each feature; constant ones have that of the others.
    spread = np.where(spread > 0, spread, np.median(spread[spread > 0]) if spread.any() else 1.0)
    off = np.maximum(np.abs(samples.mean(axis=0) - sent) - slack, 0) / spread
    far = float(np.sqrt((off**2).mean()))
    if far > NEAR_ENOUGH:
        raise SpaceError(
            f"class {label} of the data",
            "samples with the mean that the file has (inputs of the layer that it is for)",
            f"a mean that is {far:.2g} deviations away",
        )
