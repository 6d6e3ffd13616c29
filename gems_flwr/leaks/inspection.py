"""A look at a space before it is sent: what each class gives away, and whether to send it.

Of a cone alone: counts, directions, and what follows from them (`disclosure`). With the samples
that it was made of: how well members are told from others (`own_membership`), and how many samples
can be rebuilt (`rebuilt_samples`). A class is

- *given away* if it holds the samples but for a rotation, if the attack rebuilt more samples than
  chance would, or if members are told with an AUC of 0.9 or more;
- *told of* if members are told with an AUC of 0.75 or more, above what the automatic rule is
  made for;
- *fine* else, as far as these attacks go. None of this is a proof; noise is.

Decided here: where there are many classes, the attacks are tried on those that show most by the
formula of `disclosure`; an AUC counts as 0.9 only if 0.75 is two standard errors away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.leaks.disclosure import Exposure, exposures, mean_steps
from gems_flwr.leaks.own_membership import Membership, own_membership
from gems_flwr.leaks.rebuilt_samples import Rebuilt, rebuilt_samples
from gems_flwr.leaks.recipes import Recipe, class_moments, releases, tried_recipe
from gems_flwr.leaks.reconstruction import sent_directions
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.typing import Float

Level = Literal["fine", "told of", "given away"]
# From these AUCs on a class is given away, or told of. By formula, which is for one who knows more
# than any attacker that was tried, from more than the automatic rule can come to.
GIVEN_AWAY, TOLD_OF, TOLD_BY_FORMULA = 0.9, 0.75, 0.81
# Classes on which attacks are tried, unless told otherwise.
MOST_CLASSES = 12

Progress = Callable[[str], None]


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
class ClassFinding:
    """What a class gives away.

    Parameters
    ----------
    exposure : Exposure
        What the file alone tells.
    is_private : bool
        Whether noise was promised; then `exposure.mean_auc` bounds every attacker.
    membership : Membership or None
        What came of telling members from others; None if it was not tried.
    rebuilt : Rebuilt or None
        What came of rebuilding; None if it was not tried.
    """

    exposure: Exposure
    is_private: bool = False
    membership: Membership | None = None
    rebuilt: Rebuilt | None = None

    @property
    def label(self) -> int:
        """The class."""
        return self.exposure.label

    @property
    def reason(self) -> str | None:
        """Why the class is given away; None if it is not."""
        found, count = self.rebuilt, self.exposure.total
        if found is not None and found.is_attack:
            return f"{found.rebuilt} of {count} were rebuilt"
        if self.exposure.exact is not None:
            return self.exposure.exact
        if self.membership is not None:
            auc = self.membership.auc
            if auc.value >= GIVEN_AWAY and auc.value - 2 * auc.error > TOLD_OF:
                return f"members are told from others (AUC {auc.value:.2f})"
        elif not self.is_private and self.exposure.mean_auc >= GIVEN_AWAY:
            return (
                "by the mean alone one who knows the class tells members from others "
                f"(AUC {self.exposure.mean_auc:.2f})"
            )
        return None

    @property
    def level(self) -> Level:
        """How bad it is."""
        if self.reason is not None:
            return "given away"
        if self.membership is not None:
            return "told of" if self.membership.auc.value >= TOLD_OF else "fine"
        told = not self.is_private and self.exposure.mean_auc >= TOLD_BY_FORMULA
        return "told of" if told else "fine"


@dataclass(frozen=True)
class Inspection:
    """What a cone gives away.

    Parameters
    ----------
    classes : tuple of ClassFinding
        In the order of classes.
    recipe : Recipe or None
        How the cone was made; None without data.
    is_reproduced : bool
        Whether that recipe makes the cone of the data to the last bit.
    """

    classes: tuple[ClassFinding, ...]
    recipe: Recipe | None = None
    is_reproduced: bool = False

    @property
    def given_away(self) -> tuple[ClassFinding, ...]:
        """Classes that should not be sent so."""
        return tuple(each for each in self.classes if each.level == "given away")

    @property
    def worst(self) -> ClassFinding:
        """The class that shows most."""
        return max(self.classes, key=_shown)


def _shown(finding: ClassFinding) -> tuple[int, float, float, int]:
    rank = ("fine", "told of", "given away").index(finding.level)
    auc = finding.membership.auc.value if finding.membership else finding.exposure.mean_auc
    return rank, auc, finding.exposure.mean_auc, -finding.exposure.count


def inspect_cone(
    cone: ClassMomentCone,
    data: LayerSamples | None = None,
    held_out: LayerSamples | None = None,
    *,
    most_classes: int = MOST_CLASSES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Inspection:
    """Look at what a cone gives away.

    Parameters
    ----------
    cone : ClassMomentCone
        What is to be sent.
    data : LayerSamples, optional
        What it was made of.
    held_out : LayerSamples, optional
        Samples of the same kind that it was not made of; the more there are of a class, the more
        the attacker knows, and the surer is the AUC.
    most_classes : int
        On how many classes attacks are tried, at least 0: those that show most.
    seed : int
        Of everything that is random.
    progress : callable, optional
        Told what is being done.

    Raises
    ------
    SpaceError
        If the cone was not made of these data; names the class.
    """
    known = [ClassFinding(each, cone.privacy is not None) for each in exposures(cone)]
    if data is None:
        return Inspection(tuple(known))
    check_made_of(cone, data)
    recipe, is_same = tried_recipe(cone, data.inputs, data.labels)
    others = held_out or LayerSamples.none(cone.num_features)
    chosen = {each.label for each in sorted(known, key=_shown, reverse=True)[:most_classes]}
    found = []
    for each in known:
        if each.label in chosen:
            if progress is not None:
                progress(f"class {each.label}: attacking {each.exposure.total} samples")
            each = attacked(each, cone, recipe, data, others, seed=seed)
        found.append(each)
    return Inspection(tuple(found), recipe, is_same)


def attacked(
    finding: ClassFinding,
    cone: ClassMomentCone,
    recipe: Recipe,
    data: LayerSamples,
    held_out: LayerSamples,
    *,
    seed: int = 0,
    iterations: int | None = None,
) -> ClassFinding:
    """Return a finding with what came of both attacks on its class."""
    label, sent = finding.label, class_moments(cone, finding.label)
    samples = data.of(label)
    if sent is None or len(samples) < 2:
        return finding
    is_mean = finding.exposure.directions is None
    release = releases(recipe, label, data.inputs, data.labels, cone.num_classes, is_mean, seed)
    return dataclasses.replace(
        finding,
        membership=own_membership(samples, held_out.of(label), sent, release, seed=seed),
        rebuilt=rebuilt_samples(
            sent[0],
            _directions(cone, label, sent[1], len(samples)),
            samples,
            data.inputs,
            iterations=iterations,
            seed=seed,
        ),
    )


def _directions(cone: ClassMomentCone, label: int, covariance: Float, count: int) -> Float:
    entries = np.flatnonzero(cone.labels == label)
    if len(entries) == 1:
        return sent_directions(cone, int(entries[0]))
    values, vectors = np.linalg.eigh(covariance)
    most = min(count - 1, len(values))
    return np.asarray((vectors[:, -most:] * np.sqrt(np.maximum(values[-most:], 0))).T)


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
