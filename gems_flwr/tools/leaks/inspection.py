"""A look at a space before it is sent: what each class gives away, and whether to send it.

Of a cone alone: counts, directions, and what follows from them (`exposure`). With the samples that
it was made of: how well members are told from others (`membership`), and how many samples can be
rebuilt (`rebuilding`). A class is

- *given away* if it holds the samples but for a rotation, if the attack rebuilt more samples than
  chance would, or if members are told with an AUC of 0.9 or more;
- *exposed* if members are told with an AUC of 0.75 or more, which is more than the automatic rule
  shows on the data that it was chosen on;
- *fine* else, as far as these attacks go. None of this is a proof; noise is.

Where there are many classes, the attacks are tried on those that show most by the formula of
`exposure`; an AUC counts as 0.9 only if 0.75 is two standard errors away.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.tools.leaks.exposure import Exposure, exposures
from gems_flwr.tools.leaks.membership import Membership, attack_membership
from gems_flwr.tools.leaks.rebuilding import (
    Rebuilt,
    main_directions,
    rebuilt_samples,
    sent_directions,
)
from gems_flwr.tools.leaks.recipes import (
    LayerSamples,
    Recipe,
    class_moments,
    releases,
    tried_recipe,
)

Level = Literal["fine", "exposed", "given away"]
LEVELS: tuple[Level, ...] = ("fine", "exposed", "given away")
# From these AUCs on a class is given away, or exposed. By formula, which is for one who knows more
# than any attacker that was tried, from more than the automatic rule can come to.
GIVEN_AWAY, EXPOSED, EXPOSED_BY_FORMULA = 0.9, 0.75, 0.81
MOST_CLASSES = 12  # classes on which attacks are tried by default


def share_text(value: float) -> str:
    """Return a number from 0 to 1 as the documentation writes it: .66, 1.00."""
    return f"{value:.2f}".removeprefix("0")


@dataclass(frozen=True)
class ClassFinding:
    """What a class gives away, as far as it was tried."""

    exposure: Exposure
    is_private: bool = False  # noise was promised: `exposure.mean_auc` bounds every attacker
    membership: Membership | None = None
    rebuilt: Rebuilt | None = None

    @property
    def label(self) -> int:
        """The class."""
        return self.exposure.label

    @property
    def reason(self) -> str | None:
        """Why the class is given away; None if it is not."""
        found, exact = self.rebuilt, self.exposure.exact
        half = found is not None and 2 * found.rebuilt >= self.exposure.total
        if found is not None and found.is_attack and (not exact or half):
            return f"{found.rebuilt} of {found.samples} were rebuilt within .1 of their range"
        if exact is not None:
            return exact
        if self.membership is not None:
            auc = self.membership.auc
            if auc.value >= GIVEN_AWAY and auc.value - 2 * auc.error > EXPOSED:
                return f"members are told from others with an AUC of {share_text(auc.value)}"
        elif not self.is_private and self.exposure.mean_auc >= GIVEN_AWAY:
            auc_text = share_text(self.exposure.mean_auc)
            return f"by the mean alone one who knows the class tells members with {auc_text}"
        return None

    @property
    def verdict(self) -> str:
        """What the class gives away and whether to send it, in plain words."""
        exposure, tried, rebuilt = self.exposure, self.membership, self.rebuilt
        parts = [f"class {self.label}: {exposure.total} samples of {exposure.features} features"]
        if self.reason is not None:
            parts.append(self.reason)
        elif rebuilt is not None:
            parts.append(f"{rebuilt.rebuilt} rebuilt")
        if tried is not None:
            auc = f"{share_text(tried.auc.value)} ± {share_text(tried.auc.error)}"
            parts.append(f"members are told from others with an AUC of {auc}")
        elif self.is_private:
            parts.append(f"no attacker exceeds an AUC of {share_text(exposure.mean_auc)}")
        elif self.reason is None:
            by_formula = share_text(exposure.mean_auc)
            parts.append(f"one who knows the class tells members with {by_formula} by its mean")
        ending = {"given away": "do not send", "exposed": "think twice", "fine": "no alarm"}
        return f"{', '.join(parts)}: {ending[self.level]}"

    @property
    def level(self) -> Level:
        """How bad it is."""
        if self.reason is not None:
            return "given away"
        if self.membership is not None:
            return "exposed" if self.membership.auc.value >= EXPOSED else "fine"
        shown = not self.is_private and self.exposure.mean_auc >= EXPOSED_BY_FORMULA
        return "exposed" if shown else "fine"


@dataclass(frozen=True)
class Inspection:
    """What a cone gives away."""

    classes: tuple[ClassFinding, ...]
    # How the cone was made, as far as data tell; whether that makes it to the last bit.
    recipe: Recipe | None = None
    is_reproduced: bool = False

    @property
    def given_away(self) -> tuple[ClassFinding, ...]:
        """Classes that should not be sent so."""
        return tuple(each for each in self.classes if each.level == "given away")


def _shown(finding: ClassFinding) -> tuple[int, float, float, int]:
    by_formula = finding.exposure.mean_auc
    auc = finding.membership.auc.value if finding.membership else by_formula
    return LEVELS.index(finding.level), auc, by_formula, -finding.exposure.count


def inspect_cone(
    cone: ClassMomentCone,
    data: LayerSamples | None = None,
    held_out: LayerSamples | None = None,
    *,
    most_classes: int = MOST_CLASSES,
    seed: int = 0,
) -> Inspection:
    """Look at what a cone gives away; with the `data` that it was made of, attack it.

    `held_out` are samples of the same kind that it was not made of: the more there are, the more
    the attacker knows, and the surer is the AUC. Attacks are tried on those `most_classes` that
    show most.
    """
    found = [ClassFinding(each, cone.privacy is not None) for each in exposures(cone)]
    if data is None:
        return Inspection(tuple(found))
    recipe, is_same = tried_recipe(cone, data)
    others = held_out or LayerSamples.none(cone.num_features)
    chosen = {each.label for each in sorted(found, key=_shown, reverse=True)[:most_classes]}
    for place, each in enumerate(found):
        if each.label in chosen:
            found[place] = _attacked(each, cone, recipe, data, others, seed)
    return Inspection(tuple(found), recipe, is_same)


def _attacked(
    finding: ClassFinding,
    cone: ClassMomentCone,
    recipe: Recipe,
    data: LayerSamples,
    held_out: LayerSamples,
    seed: int,
) -> ClassFinding:
    """Return a finding with what came of both attacks on its class."""
    label, sent = finding.label, class_moments(cone, finding.label)
    samples, entries = data.of(label), np.flatnonzero(cone.labels == label)
    if sent is None or len(samples) < 2:
        return finding
    is_mean = finding.exposure.directions is None
    release = releases(recipe, label, data, cone.num_classes, is_mean, seed)
    alone = len(entries) == 1
    directions = (
        sent_directions(cone, int(entries[0])) if alone else main_directions(sent[1], len(samples))
    )
    return dataclasses.replace(
        finding,
        membership=attack_membership(samples, held_out.of(label), sent, release, seed=seed),
        rebuilt=rebuilt_samples(sent[0], directions, samples, data.inputs, seed=seed),
    )
