"""What a space, a gradient and losses may be, seen from the others: plausibility.

What is checked here needs only the spaces of the other nodes, and holds while fewer than half of
the nodes lie:

- a centre farther from the geometric median of all than `FAR` times the median distance, or inputs
  of a cone whose scale is off the median by that factor: the node is left out;
- a radius below the median over `SMALL` counts as that, so that no node can shrink the
  intersection to its own model; samples above `HEAVY` times the median are scaled down to that;
- a class that two thirds of the nodes hold, with a mean off the (coordinate-wise) median of the
  nodes' by more than `OFF` deviations and more than sampling explains, or with another spread: that
  class of that node is left out. `Screened.unchecked` lists the others.

**Gradients and losses.** For softmax losses ``l_i`` with residuals ``r_i = p - e_y``:
``|r_i|^2 <= 2 (1 - p_y)^2 <= 2 l_i``, so by Cauchy and Schwarz a node's gradient, the sum of
``a_i r_i x_i^T``, is no longer than ``sqrt(2 * sum_i a_i l_i * sum_i a_i |x_i|^2)``, whose second
sum is in its moments; and a layer that is moved by D changes the loss of a sample by at most
``sqrt(2) |D x_i|``, from ``log C`` where it is zero. All of it holds for every honest node,
whatever its data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gems_flwr.averaging import HEAVY, LEAST_MODELS, geometric_median
from gems_flwr.spaces.ball.ball import BallSpace, EllipsoidSpace, Radius
from gems_flwr.spaces.cone.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.cone.covariance import FullCovariance, PartialCovariance
from gems_flwr.spaces.cone.solve import PooledMoments, component_means, pool_moments
from gems_flwr.typing import Float

FAR = 3.0
SMALL = 3.0
OFF = 0.2
SPREAD = 3.0
# With fewer samples than this even the spread of a class is chance.
FEW = 10
# Moments came rounded, and classes may have been withheld.
_ROOM = 1.5
# By which share of where it begins a loss may be off, which nodes round.
_OFF_LOSS = 0.1
# More of them than the rounding of any honest gradient comes to.
_DEVIATIONS = 6.0


@dataclasses.dataclass(frozen=True, eq=False)
class Screened:
    """Spaces as they may enter the aggregation."""

    # One per node; None for a node that is left out.
    spaces: tuple[BallSpace | EllipsoidSpace | ClassMomentCone | None, ...]
    # What was changed or why the node is left out; empty where nothing was.
    reasons: tuple[str, ...]
    # Classes of cones that too few nodes hold for a lie about them to be noticed.
    unchecked: tuple[int, ...] = ()


def screen_spaces(spaces: Sequence[BallSpace | EllipsoidSpace | ClassMomentCone]) -> Screened:
    """Compare each node's space with those of the others; see the module's docstring.

    All are cones or none is. With fewer than three nothing is changed.
    """
    cones = [space for space in spaces if isinstance(space, ClassMomentCone)]
    if len(spaces) < LEAST_MODELS:
        return Screened(tuple(spaces), ("",) * len(spaces), _unchecked(cones))
    if len(cones) == len(spaces):
        return _screen_cones(cones)
    return _screen_centres([s for s in spaces if isinstance(s, BallSpace | EllipsoidSpace)])


def _screen_centres(spaces: Sequence[BallSpace | EllipsoidSpace]) -> Screened:
    centres = [{"centre": space.center.astype(np.float64)} for space in spaces]
    middle = geometric_median(centres)["centre"]
    distances = np.array([float(np.linalg.norm(c["centre"] - middle)) for c in centres])
    far = FAR * float(np.median(distances))
    least = float(np.median([space.radius.value for space in spaces])) / SMALL
    kept: list[BallSpace | EllipsoidSpace | None] = []
    reasons = []
    for space, distance in zip(spaces, distances, strict=True):
        reason, value, screened = "", space.radius.value, None
        if distance > far:
            reason = f"its model is {distance:.4g} from the others' middle, {far:.4g} is plausible"
        elif value >= least:
            screened = space
        else:
            reason = f"its radius {value:.4g} counts as {least:.4g}, a third of the median"
            screened = _widened(space, dataclasses.replace(space.radius, value=least))
        kept.append(screened)
        reasons.append(reason)
    return Screened(tuple(kept), tuple(reasons))


def _widened(space: BallSpace | EllipsoidSpace, radius: Radius) -> BallSpace | EllipsoidSpace:
    if isinstance(space, BallSpace):
        return space.with_radius(radius)
    # What the radius of an ellipsoid is compared by is the longest axis, whatever it claims.
    axes = space.radii.astype(np.float64)
    return EllipsoidSpace(space.center, np.maximum(axes, radius.value / axes.max() * axes), radius)


def _screen_cones(cones: Sequence[ClassMomentCone]) -> Screened:
    scales = np.array([_input_scale(cone) for cone in cones])
    usual = float(np.median(scales))
    fits = (scales <= FAR * usual) & (scales * FAR >= usual)
    most = HEAVY * float(np.median([cone.total_count for cone in cones]))
    members = [index for index in range(len(cones)) if fits[index]]
    wrong = dict(zip(members, _wrong_classes([cones[index] for index in members]), strict=True))
    kept: list[ClassMomentCone | None] = []
    reasons = []
    for index, cone in enumerate(cones):
        if not fits[index]:
            kept.append(None)
            reasons.append(f"its inputs have scale {scales[index]:.4g}, the median is {usual:.4g}")
            continue
        notes = []
        if wrong[index]:
            notes.append(f"its classes {wrong[index]} are unlike those of the other nodes")
        if cone.total_count > most:
            notes.append(f"its {cone.total_count:,} samples count as {most:,.0f}")
        rest = cone.without_components(np.isin(cone.labels, wrong[index]))
        kept.append(rest and rest.with_samples_at_most(most))
        reasons.append("; ".join(notes))
    return Screened(tuple(kept), tuple(reasons), _unchecked([cones[index] for index in members]))


def _unchecked(cones: Sequence[ClassMomentCone]) -> tuple[int, ...]:
    """Return the classes that too few of the nodes hold for a lie about them to be noticed."""
    held = [label for cone in cones for label in set(cone.labels.tolist())]
    return tuple(x for x in sorted(set(held)) if not _can_be_checked(held.count(x), len(cones)))


def _can_be_checked(holders: int, nodes: int) -> bool:
    # Fewer may be a conspiracy: with up to a third of liars, most of these are honest.
    return holders >= max(LEAST_MODELS, 2 * nodes / 3)


def _input_scale(cone: ClassMomentCone) -> float:
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
    return np.array(
        [
            (covariance.factor(entry).astype(np.float64) ** 2).sum()
            + covariance.variances(entry).sum()
            for entry in range(len(cone.labels))
        ]
    )


def _wrong_classes(cones: Sequence[ClassMomentCone]) -> list[list[int]]:
    """Return, for every node, which of its classes are unlike those of most other nodes."""
    wrong: list[list[int]] = [[] for _ in cones]
    summaries = [_class_summaries(cone) for cone in cones]
    for label in sorted(set().union(*summaries)):
        holders = [index for index, summary in enumerate(summaries) if label in summary]
        if not _can_be_checked(len(holders), len(cones)):
            continue
        held = [summaries[index][label] for index in holders]
        middle = np.median([mean for _, mean, _ in held], axis=0)
        # Of a class that was sent as a mean alone nothing is known of its spread.
        traces = [trace for _, _, trace in held if np.isfinite(trace)]
        variance = float(np.median(traces)) if traces else float("inf")
        for index, (count, mean, trace) in zip(holders, held, strict=True):
            # A mean over few samples is off by chance; so it weighs little, too.
            allowed = (OFF + 3 / np.sqrt(count)) * np.sqrt(variance)
            off = float(np.linalg.norm(mean - middle)) > allowed
            other = np.isfinite(trace) and not variance / SPREAD <= trace <= SPREAD * variance
            if off or (other and count >= FEW):
                wrong[index].append(label)
    return wrong


def _class_summaries(cone: ClassMomentCone) -> dict[int, tuple[float, Float, float]]:
    """Return count, mean and total variance of each class, its clusters taken together."""
    means, traces = mean_values(cone), component_traces(cone)
    summaries = {}
    for label in sorted(set(cone.labels.tolist())):
        mine = cone.labels == label
        shares = cone.counts[mine] / cone.counts[mine].sum()
        mean = np.asarray(shares @ means[mine])
        trace = float(shares @ (traces[mine] + ((means[mine] - mean) ** 2).sum(axis=1)))
        trace = float("nan") if cone.lacking[mine].any() else trace
        summaries[label] = (float(cone.counts[mine].sum()), mean, trace)
    return summaries


def screen_gradients(
    sums: Mapping[str, Any],
    cones: Mapping[str, ClassMomentCone],
    scale: Float,
    class_weights: Float,
    layer: Float,
) -> dict[str, str]:
    """Return by node why its loss and gradient at a layer (C, D + 1) cannot be what it says.

    `sums` have ``count``, ``weight``, ``loss`` and ``gradient`` as `LossSums` has. Inputs are
    divided by `scale` (D,), a sample of each class counts by `class_weights` (C,).
    """
    steepest = np.sqrt(2) * np.linalg.norm(layer)
    reasons, heaviest = {}, float(class_weights.max())
    for node, sent in sums.items():
        length = input_length(pool_moments([cones[node]]), scale)
        most = _ROOM * np.sqrt(2 * sent.loss * heaviest * sent.count) * length
        # Where nodes round it, by no more than they report.
        rounding = float(np.sqrt(sent.gradient.shape[1]) * np.linalg.norm(sent.errors))
        found = float(np.linalg.norm(sent.gradient)) - rounding
        highest = _ROOM * heaviest * sent.count * (np.log(len(layer)) + steepest * length)
        labels, counts = cones[node].labels, cones[node].counts
        there = counts * class_weights[labels] * (sent.withheld[labels] == 0)
        least = float(there.sum()) / _ROOM * min(1.0, sent.count / counts.sum())
        if sent.loss > highest:
            reasons[node] = f"its loss is {sent.loss:.4g}, its inputs allow {highest:.4g}"
        elif sent.weight < least:
            reasons[node] = f"its samples weigh {sent.weight:.4g}, less than {least:.4g}"
        elif found > most:
            reasons[node] = f"its gradient has length {found:.4g}, its loss allows {most:.4g}"
        elif sent.weight > _ROOM * heaviest * sent.count:
            reasons[node] = f"its samples weigh {sent.weight:.4g}, more than {sent.count:g} can"
    return reasons


def screen_losses(
    losses: Mapping[str, Float],
    cones: Mapping[str, ClassMomentCone],
    layers: Sequence[Float],
    scale: Float,
    class_weights: Float,
    sums: Mapping[str, Any] | None = None,
    tried: Float | None = None,
) -> dict[str, str]:
    """Return by node why its losses (M,) at the layers (C, D + 1) cannot be what it says.

    The first layer is the one that all begin with; `tried` (M, 2) are their multiples and lengths,
    `sums` and the rest as in `screen_gradients`.
    """
    moved, reasons = np.stack(layers) - layers[0], {}
    squares = (moved**2).sum(axis=(1, 2))
    for node, sent in losses.items():
        length = input_length(pool_moments([cones[node]]), scale)
        count = _ROOM * cones[node].total_count * float(class_weights.max())
        most = np.sqrt(2 * squares) * length * count
        if (np.abs(sent - sent[0]) > most + 1e-9 * sent[0]).any():
            reasons[node] = "its losses change by more than the step can change them"
        elif sums is not None and tried is not None:
            bends = count * length**2 / 4 * squares
            if _contradicts(sent, sums[node], moved, tried, bends):
                reasons[node] = "its losses are not those of a layer with its gradient"
    return reasons


def _contradicts(sent: Float, seen: Any, moved: Float, tried: Float, bends: Float) -> bool:
    """Return whether losses are below the tangent, above a chord, or bend more than they can."""
    tangent = seen.loss + np.einsum("mcf,cf->m", moved, seen.gradient)
    # Rounding is even over an entry's error, so its deviation is a root of 3 below that.
    rounding = np.sqrt((moved**2).sum(axis=2) @ seen.errors**2 / 3)
    off = _DEVIATIONS * rounding + _OFF_LOSS * seen.loss
    for multiple in np.unique(tried[:, 0]):
        line = np.flatnonzero(tried[:, 0] == multiple)
        line = line[np.argsort(tried[line, 1])]
        if _above_chords(tried[line, 1], sent[line]) > _OFF_LOSS * seen.loss:
            return True
    return bool((sent < tangent - off).any() or (sent > tangent + off + bends).any())


def _above_chords(at: Float, values: Float) -> float:
    """Return by how much values along a line exceed what their neighbours allow, if convex."""
    share = (at[2:] - at[1:-1]) / (at[2:] - at[:-2])
    chords = share * values[:-2] + (1 - share) * values[2:]
    return float((values[1:-1] - chords).max(initial=0.0))


def input_length(moments: PooledMoments, scale: Float) -> float:
    """Return the root mean square length of scaled inputs with a one appended."""
    squares = np.zeros(len(moments.shares))
    for entry, matrix in enumerate(moments.matrices):
        within = np.diag(matrix) + moments.means[entry] ** 2
        squares[entry] = (within / scale**2).sum()
    for rows, means in component_means(moments):
        if rows.start >= len(moments.matrices):
            squares[rows] = ((means / scale) ** 2).sum(axis=1)
    within = 0.0
    for factors, variances in moments.low.spreads(moments.shares):
        within += float((((factors**2).sum(axis=0) + variances) / scale**2).sum())
    return float(np.sqrt(moments.shares @ squares + within + 1))
