"""What a space may be, seen from the others: plausibility before aggregation.

The papers trust every node. A hostile one can claim a far-away model, a radius of nothing, a
billion samples, or moments of another scale. What is checked here needs no data, only the spaces of
the other nodes, and holds while fewer than half of the nodes lie:

===========================  =======================================================================
a centre                     farther from the geometric median of all centres than `FAR` times the
                             median distance: left out
a radius                     below the median radius over `SMALL`: counts as that, so that no node
                             can shrink the intersection to its own model
samples of a cone            above `HEAVY` times the median: scaled down to that
scale of a cone's inputs     above `FAR` times the median, or below a `FAR`-th: left out
a class that two thirds of   a mean that is off the (coordinate-wise) median of the nodes' means by
the nodes hold               more than `OFF` deviations of the class, and more than sampling
                             explains; or another spread: that class of that node is left out
===========================  =======================================================================

Where nobody lies, all of this leaves the spaces as they are unless nodes differ that much.

What cannot be checked: a class that few nodes hold. If a node is alone with a class, its word is
all there is; if few hold it, liars may be the majority among them, and would have the honest left
out. `Screened.unchecked` lists such classes. Their harm to *other* classes is bounded by their
samples and their scale; the scores of the other nodes can convict them (see
`gems_flwr.intersect.audit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.robust_means import geometric_median
from gems_flwr.averaging.robust_rules import HEAVY, LEAST_MODELS
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance, dense
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.partial_covariance import PartialCovariance
from gems_flwr.typing import Float

FAR = 3.0
SMALL = 3.0
OFF = 0.2
SPREAD = 3.0
# With fewer samples than this even the spread of a class is chance.
FEW = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Screened:
    """Spaces as they may enter the aggregation.

    Parameters
    ----------
    spaces : tuple
        One per node; None for a node that is left out.
    reasons : tuple of str
        What was changed or why the node is left out; empty where nothing was.
    unchecked : tuple of int
        Classes of cones that too few nodes hold for a lie about them to be noticed.
    """

    spaces: tuple[BallSpace | EllipsoidSpace | ClassMomentCone | None, ...]
    reasons: tuple[str, ...]
    unchecked: tuple[int, ...] = ()


def screen_spaces(spaces: Sequence[BallSpace | EllipsoidSpace | ClassMomentCone]) -> Screened:
    """Hold each node's space against those of the others; see the module's docstring.

    Parameters
    ----------
    spaces : sequence of BallSpace, EllipsoidSpace or ClassMomentCone
        One per node, all cones or no cone. With fewer than three nothing is changed.
    """
    cones = [space for space in spaces if isinstance(space, ClassMomentCone)]
    if len(spaces) < LEAST_MODELS:
        return Screened(tuple(spaces), ("",) * len(spaces), unchecked_classes(cones))
    if len(cones) == len(spaces):
        return _screen_cones(cones)
    return _screen_centres([s for s in spaces if isinstance(s, BallSpace | EllipsoidSpace)])


# --- balls and ellipsoids -------------------------------------------------------------------


def _screen_centres(spaces: Sequence[BallSpace | EllipsoidSpace]) -> Screened:
    centres = [{"centre": space.center.astype(np.float64)} for space in spaces]
    middle = geometric_median(centres, [1.0] * len(centres))["centre"]
    distances = np.array([float(np.linalg.norm(c["centre"] - middle)) for c in centres])
    far = FAR * float(np.median(distances))
    least = float(np.median([space.radius.value for space in spaces])) / SMALL
    kept: list[BallSpace | EllipsoidSpace | None] = []
    reasons = []
    for space, distance in zip(spaces, distances, strict=True):
        reason, value = "", space.radius.value
        if distance > far:
            reason = f"its model is {distance:.4g} from the others' middle, {far:.4g} is plausible"
        elif value < least:
            reason = f"its radius {value:.4g} counts as {least:.4g}, a third of the median"
        kept.append(None if distance > far else _widened(space, max(value, least)))
        reasons.append(reason)
    return Screened(tuple(kept), tuple(reasons))


def _widened(space: BallSpace | EllipsoidSpace, value: float) -> BallSpace | EllipsoidSpace:
    if value == space.radius.value:
        return space
    radius = dataclasses.replace(space.radius, value=value)
    if isinstance(space, BallSpace):
        return BallSpace(space.center, radius)
    # The longest axis is what the radius of an ellipsoid is compared by.
    axes = space.radii.astype(np.float64)
    return EllipsoidSpace(space.center, np.maximum(axes, value / axes.max() * axes), radius)


# --- cones ----------------------------------------------------------------------------------


def _screen_cones(cones: Sequence[ClassMomentCone]) -> Screened:
    scales = np.array([input_scale(cone) for cone in cones])
    usual = float(np.median(scales))
    fits = (scales <= FAR * usual) & (scales * FAR >= usual)
    most = HEAVY * float(np.median([cone.total_count for cone in cones]))
    members = [index for index in range(len(cones)) if fits[index]]
    wrong = wrong_components([cones[index] for index in members])
    kept: list[ClassMomentCone | None] = []
    reasons = []
    for index, cone in enumerate(cones):
        if not fits[index]:
            kept.append(None)
            reasons.append(f"its inputs have scale {scales[index]:.4g}, the median is {usual:.4g}")
            continue
        bad = wrong[members.index(index)]
        notes = []
        if bad.any():
            classes = sorted(set(cone.labels[bad].tolist()))
            notes.append(f"its classes {classes} are unlike those of the other nodes")
        if cone.total_count > most:
            notes.append(f"its {cone.total_count:,} samples count as {most:,.0f}")
        rest = cone.without_components(bad)
        kept.append(rest and rest.with_samples_at_most(most))
        reasons.append("; ".join(notes))
    unchecked = unchecked_classes([cones[index] for index in members])
    return Screened(tuple(kept), tuple(reasons), unchecked)


def unchecked_classes(cones: Sequence[ClassMomentCone]) -> tuple[int, ...]:
    """Return the classes that too few of the nodes hold for a lie about them to be noticed."""
    held = [set(cone.labels.tolist()) for cone in cones]
    return tuple(
        label
        for label in sorted(set().union(*held))
        if not _can_be_checked(sum(label in labels for labels in held), len(cones))
    )


def _can_be_checked(holders: int, nodes: int) -> bool:
    # Fewer may be a conspiracy: with up to a third of liars, most of these are honest.
    return holders >= max(LEAST_MODELS, 2 * nodes / 3)


def input_scale(cone: ClassMomentCone) -> float:
    """Return the root mean square length of a node's inputs; every class counts the same."""
    squares = (mean_values(cone) ** 2).sum(axis=1) + component_traces(cone)
    return float(np.sqrt(squares.mean()))


def component_traces(cone: ClassMomentCone) -> Float:
    """Return the total variance of every component."""
    covariance = cone.covariance
    if isinstance(covariance, PartialCovariance):
        traces, larger = np.zeros(len(cone.labels)), cone.without_components(cone.lacking)
        traces[~cone.lacking] = [] if larger is None else component_traces(larger)
        return traces
    if isinstance(covariance, FullCovariance):
        return np.asarray(np.trace(covariance.matrices, axis1=1, axis2=2, dtype=np.float64))
    assert isinstance(covariance, LowRankCovariance)
    deviations = dense(covariance.deviations).astype(np.float64)
    factors = (
        covariance.factor(component).astype(np.float64) for component in range(len(deviations))
    )
    return np.asarray([(f**2).sum() for f in factors] + (deviations**2).sum(axis=1))


def wrong_components(cones: Sequence[ClassMomentCone]) -> list[NDArray[np.bool_]]:
    """Return, for every node and component, whether it is unlike that class on most other nodes."""
    wrong = [np.zeros(len(cone.labels), dtype=bool) for cone in cones]
    summaries = [class_summaries(cone) for cone in cones]
    for label in sorted(set().union(*summaries)):
        holders = [index for index, summary in enumerate(summaries) if label in summary]
        if not _can_be_checked(len(holders), len(cones)):
            continue
        held = [summaries[index][label] for index in holders]
        middle = median_mean([cones[index] for index in holders], label)
        # Of a class that was sent as a mean alone nothing is known of its spread.
        traces = [trace for _, trace in held if np.isfinite(trace)]
        variance = float(np.median(traces)) if traces else float("inf")
        for index, (count, trace) in zip(holders, held, strict=True):
            # A mean over few samples is off by chance; so it weighs little, too.
            allowed = (OFF + 3 / np.sqrt(count)) * np.sqrt(variance)
            off = float(np.linalg.norm(class_mean(cones[index], label) - middle)) > allowed
            other = np.isfinite(trace) and not variance / SPREAD <= trace <= SPREAD * variance
            if off or (other and count >= FEW):
                wrong[index] |= cones[index].labels == label
    return wrong


def median_mean(cones: Sequence[ClassMomentCone], label: int) -> Float:
    """Return the coordinate-wise median of a class's mean over the nodes that hold it."""
    features = cones[0].num_features
    # Some features at a time: all means in double precision may take more than what was sent.
    received = sum(cone.covariance.size_bytes for cone in cones)
    width = max(16, received // (4 * 24 * len(cones)))
    return np.concatenate(
        [
            np.median([class_mean(cone, label)[first : first + width] for cone in cones], axis=0)
            for first in range(0, features, width)
        ]
    )


def class_mean(cone: ClassMomentCone, label: int) -> Float:
    """Return the mean of a class, its clusters taken together."""
    mine = cone.labels == label
    shares = cone.counts[mine] / cone.counts[mine].sum()
    return np.asarray(shares @ mean_values(cone)[mine])


def class_summaries(cone: ClassMomentCone) -> dict[int, tuple[float, float]]:
    """Return count and total variance of each class, its clusters taken together."""
    means, traces = mean_values(cone), component_traces(cone)
    summaries = {}
    for label in sorted(set(cone.labels.tolist())):
        mine = cone.labels == label
        shares = cone.counts[mine] / cone.counts[mine].sum()
        between = ((means[mine] - class_mean(cone, label)) ** 2).sum(axis=1)
        trace = float(shares @ (traces[mine] + between))
        trace = float("nan") if cone.lacking[mine].any() else trace
        summaries[label] = (float(cone.counts[mine].sum()), trace)
    return summaries
