"""A look at a space before it is sent: what each class gives away, and whether to send it.

Of a cone alone: counts, directions, and what follows from them (`disclosure`). With the samples
that it was made of: how well members are told from others (`own_membership`), and how many samples
can be rebuilt (`rebuilt_samples`). A class is

- *given away* if it holds the samples but for a rotation, if the attack rebuilt more samples than
  chance would, or if members are told with an AUC of 0.9 or more;
- *told of* if members are told with an AUC of 0.75 or more, which is more than the automatic rule
  tells on the data that it was chosen on;
- *fine* else, as far as these attacks go. None of this is a proof; noise is.

Decided here: where there are many classes, the attacks are tried on those that show most by the
formula of `disclosure`; an AUC counts as 0.9 only if 0.75 is two standard errors away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gems_flwr.leaks.auc import share_text
from gems_flwr.leaks.disclosure import Exposure, exposures
from gems_flwr.leaks.made_of import LayerSamples, check_made_of
from gems_flwr.leaks.own_membership import Membership, own_membership
from gems_flwr.leaks.rebuilt_samples import Rebuilt, rebuilt_samples
from gems_flwr.leaks.recipes import Recipe, class_moments, releases, tried_recipe
from gems_flwr.leaks.reconstruction import sent_directions
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.typing import Float

Level = Literal["fine", "told of", "given away"]
# From these AUCs on a class is given away, or told of. By formula, which is for one who knows more
# than any attacker that was tried, from more than the automatic rule can come to.
GIVEN_AWAY, TOLD_OF, TOLD_BY_FORMULA = 0.9, 0.75, 0.81
# Classes on which attacks are tried, unless told otherwise.
MOST_CLASSES = 12

Progress = Callable[[str], None]


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
        exact = self.exposure.exact
        if found is not None and found.is_attack and (not exact or 2 * found.rebuilt >= count):
            return f"{found.rebuilt} of {found.samples} were rebuilt within .1 of their range"
        if exact is not None:
            return exact
        if self.membership is not None:
            auc = self.membership.auc
            if auc.value >= GIVEN_AWAY and auc.value - 2 * auc.error > TOLD_OF:
                return f"members are told from others with an AUC of {share_text(auc.value)}"
        elif not self.is_private and self.exposure.mean_auc >= GIVEN_AWAY:
            return (
                "by the mean alone one who knows the class tells members from others "
                f"with an AUC of {share_text(self.exposure.mean_auc)}"
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


def shown_most(findings: Sequence[ClassFinding]) -> list[ClassFinding]:
    """Return findings, those that show most first."""
    return sorted(findings, key=_shown, reverse=True)


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
    chosen = {each.label for each in shown_most(known)[:most_classes]}
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
