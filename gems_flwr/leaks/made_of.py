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
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.leaks.disclosure import mean_steps
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.typing import Float


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
    means = mean_values(cone)
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
            _check_mean(label, own, means[entry], _slack(cone, int(entry)))


def _slack(cone: ClassMomentCone, entry: int) -> Float | None:
    """Return by how much each feature of a mean may be off; None if a mean was sent in part."""
    if cone.lacking[entry] and not mean_steps(cone, entry).any():
        return None
    return mean_steps(cone, entry) / 2


def _check_mean(label: int, samples: Float, sent: Float, slack: Float | None) -> None:
    if slack is None:
        return
    deviation = np.sqrt(samples.var(axis=0).mean()) or 1.0
    # A tenth of a deviation beyond rounding, on average: another sample of the class is further.
    off = np.maximum(np.abs(samples.mean(axis=0) - sent) - slack, 0)
    far = float(np.sqrt((off**2).mean()) / deviation)
    if far > 0.1 and not _is_in_units(samples, off):
        raise SpaceError(
            f"class {label} of the data",
            "samples with the mean that the file has (inputs of the layer that it is for)",
            f"a mean that is {far:.2g} deviations away",
        )


def _is_in_units(samples: Float, off: Float) -> bool:
    """Return whether a mean is no further off than features of different orders are rounded."""
    spread = samples.std(axis=0)
    there = spread > 0
    return bool(there.any()) and float(np.median(off[there] / spread[there])) < 0.1
