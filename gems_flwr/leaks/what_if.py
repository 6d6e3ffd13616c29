"""What other options would change: bytes, what the worst class gives away, and accuracy.

The space is made again from the same data under other options, and the class that shows most is
attacked in each, as in `gems_flwr.leaks.inspection`. If there are held-out samples, the layer that
follows from the space alone is scored on them: what the protection costs, before other nodes help.

Decided here: noise is tried at delta 1e-5 with inputs clipped to the median length of the samples;
for a real release the clip should be chosen without looking at the data. A secure summation is
not tried, for the other nodes' samples are not here: what is said of it follows from counts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from gems_flwr.errors import SpaceError
from gems_flwr.intersect.aggregate import aggregate_spaces
from gems_flwr.leaks.disclosure import exposures, known_auc
from gems_flwr.leaks.inspection import ClassFinding, Inspection, Progress, attacked
from gems_flwr.leaks.made_of import LayerSamples
from gems_flwr.leaks.recipes import Recipe, typical_length
from gems_flwr.moments.private_release import PrivateRelease
from gems_flwr.scoring import accuracy
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.output_layer import unflatten_linear
from gems_flwr.typing import Float

EPSILONS, DELTA = (10.0, 3.0, 1.0), 1e-5
RANKS = (20, 5)
# Nodes that a secure summation is said to add up, and bytes of a number in it.
NODES, RING_BYTES = 10, 4


@dataclass(frozen=True)
class Outcome:
    """What an option comes to.

    Parameters
    ----------
    option : str
        How a server asks for it.
    size_bytes : int or None
        Of the whole space; None if nothing would be sent.
    finding : ClassFinding or None
        Of the class that shows most; None if it would not be sent, or was not tried.
    accuracy : float or None
        Of the node's own layer on held-out samples.
    note : str
        What else there is to say; empty if nothing.
    """

    option: str
    size_bytes: int | None
    finding: ClassFinding | None
    accuracy: float | None = None
    note: str = ""


def what_if(
    cone: ClassMomentCone,
    inspection: Inspection,
    data: LayerSamples,
    held_out: LayerSamples | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Return what each option would change, the space as it is first.

    Parameters
    ----------
    cone : ClassMomentCone
        What is to be sent.
    inspection : Inspection
        What was found, with data.
    data, held_out : LayerSamples
        See `inspect_cone`.
    seed : int
        Of everything that is random.
    progress : callable, optional
        Told what is being done.
    """
    worst, own = inspection.worst, inspection.recipe or Recipe()
    others = held_out or LayerSamples.none(cone.num_features)
    outcomes = [Outcome("as it is", cone.size_bytes, worst, _score(cone, held_out), str(own))]
    for name, recipe in _options(own, worst.exposure.total, data.inputs).items():
        if recipe == own:
            continue
        if progress is not None:
            progress(f"trying {name}")
        try:
            made = recipe.build(data.inputs, data.labels, cone.num_classes, seed)
        except SpaceError:
            outcomes.append(Outcome(name, None, None, note="nothing would be sent"))
            continue
        score = _score(made, held_out)
        shown = [each for each in exposures(made) if each.label == worst.label]
        if not shown:
            note = f"class {worst.label} would not be sent"
            outcomes.append(Outcome(name, made.size_bytes, None, score, note))
            continue
        finding = ClassFinding(shown[0], made.privacy is not None)
        finding = attacked(finding, made, recipe, data, others, seed=seed)
        note = "its mean alone" if shown[0].directions is None and own.kind == "cone" else ""
        outcomes.append(Outcome(name, made.size_bytes, finding, score, note))
    return [*outcomes, secure_sum(cone, worst.exposure.total)]


def _options(own: Recipe, count: int, inputs: Float) -> dict[str, Recipe]:
    clip = typical_length(inputs)
    recipes = [Recipe(), *(Recipe(rank=rank) for rank in RANKS), Recipe("means", int8=False)]
    options = {str(each): each for each in recipes}
    for epsilon in EPSILONS:
        private = PrivateRelease(epsilon, DELTA, clip)
        options[f"Cone(dp_epsilon={epsilon:g})"] = Recipe(rank="full", private=private)
    if own.kind == "cone" and own.private is None:
        options[f"min_count={count + 1}"] = dataclasses.replace(own, min_count=count + 1)
    return options


def secure_sum(cone: ClassMomentCone, count: int) -> Outcome:
    """Return what is known of a class if only the sums over ten such nodes are seen."""
    features, total = cone.num_features, NODES * count
    numbers = cone.num_classes * (1 + features + features * (features + 1) // 2)
    if total - 1 <= features:
        note = f"the sum of {total} samples still gives them away: more nodes, or noise"
    else:
        auc = known_auc(features / total)
        note = f"one of {total} samples; AUC {auc:.2f} by the mean, if the class is known"
    return Outcome(f"sums of {NODES} such nodes", RING_BYTES * numbers, None, note=note)


def own_layer(cone: ClassMomentCone) -> tuple[Float, Float]:
    """Return weight and bias of the layer that follows from one node's cone alone."""
    point = aggregate_spaces([cone]).point
    return unflatten_linear(point, cone.num_classes, cone.num_features)


def _score(cone: ClassMomentCone, held_out: LayerSamples | None) -> float | None:
    if held_out is None or not len(held_out.labels):
        return None
    weight, bias = own_layer(cone)
    return accuracy(np.argmax(held_out.inputs @ weight.T + bias, axis=1), held_out.labels)
