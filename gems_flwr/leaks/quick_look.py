"""A look at a space in a moment: for a node that answers a server and has no time for all attacks.

Every class is judged by counts, directions and rounding (`disclosure`); the attacks are tried on
the few classes that show most, and only where they are small. Without held-out data, so an AUC is
one of an attacker who knows little (see `own_membership`); a class that passes here is worth the
longer look of ``gems-flwr inspect``.
"""

from __future__ import annotations

import numpy as np

from gems_flwr.leaks.disclosure import exposures
from gems_flwr.leaks.inspection import ClassFinding, Inspection, attacked, shown_most
from gems_flwr.leaks.made_of import LayerSamples
from gems_flwr.leaks.recipes import recipe_of, typical_length
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.cone_building import cone_from_sums
from gems_flwr.spaces.cone import ClassMomentCone

# Classes that are attacked; their samples, and features, at most; steps of the search.
CLASSES, SAMPLES, FEATURES, ITERATIONS = 2, 128, 1024, 100


def quick_look(space: ClassMomentCone | ClassSums, data: LayerSamples, seed: int = 0) -> Inspection:
    """Return what a cone, or the sums of a node, give away, as far as a moment tells.

    Parameters
    ----------
    space : ClassMomentCone or ClassSums
        What is about to leave. Sums are full moments.
    data : LayerSamples
        What it was made of.
    seed : int
        Of everything that is random.
    """
    cone = space if isinstance(space, ClassMomentCone) else cone_from_sums(space, min_count=1)
    known = [ClassFinding(each, cone.privacy is not None) for each in exposures(cone)]
    recipe = recipe_of(cone, typical_length(data.inputs))
    small = [each for each in known if each.exposure.total <= SAMPLES]
    chosen = {each.label for each in shown_most(small)[:CLASSES]}
    if cone.num_features > FEATURES:
        chosen = set()
    # What small means are shown in may be learnt from fewer samples.
    few = _some(data, chosen)
    none = LayerSamples.none(cone.num_features)
    found = [
        attacked(each, cone, recipe, few, none, seed=seed, iterations=ITERATIONS)
        if each.label in chosen
        else each
        for each in known
    ]
    return Inspection(tuple(found), recipe)


def _some(data: LayerSamples, whole: set[int]) -> LayerSamples:
    """Return some samples of each class, and all of some classes."""
    rows = [
        np.flatnonzero(data.labels == label)[: None if label in whole else SAMPLES]
        for label in np.unique(data.labels).tolist()
    ]
    kept = np.sort(np.concatenate(rows))
    return LayerSamples(data.inputs[kept], data.labels[kept])
