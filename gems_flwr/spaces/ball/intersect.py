"""Where balls, ellipsoids and other convex sets meet: a point, or a proof that there is none.

2019, Eq. 2 minimises ``sum_k max(0, |c_k - w| - r_k)`` by gradient descent, which gives no verdict
if it does not reach zero. Instead, by duality, for **balls**::

    min_w max_k |w - c_k|^2 - r_k^2
      = max over the simplex of  sum_k x_k (|c_k|^2 - r_k^2) - |sum_k x_k c_k|^2

with ``w = sum_k x_k c_k``: only the K x K Gram matrix of the centres counts. Any x with a positive
value proves that the intersection is empty; any w with no positive constraint is in it. If it is
empty, the point with the largest smallest ``r_k - |w - c_k|`` is wanted: all radii grow by the same
t until the intersection is a single point; for fixed multipliers the dual is a quadratic in t whose
root bounds t from one side, so a few solves find it.

**Ellipsoids** and balls together are ``q_k(w) = sum_i a_ki w_i^2 - 2 b_ki w_i + g_k <= 0``, and a
half-space is the same with a = 0. For multipliers x on the simplex the minimum over w is one
division per coordinate, ``w = B / A`` with ``A = sum_k x_k a_k``, ``B = sum_k x_k b_k``; the dual
``sum_k x_k g_k - sum_i B_i^2 / A_i`` is concave in x, with gradient ``q(w)`` and Hessian
``-2 J^T diag(1/A) J``, ``J_k = b_k - a_k w``. Newton steps maximise it, each as for balls.

**Any other `ConvexSet`** enters by a ball or ellipsoid around it and by the half-spaces that cut
off the solution so far. Dropping constraints can only enlarge a set, so a positive dual still
proves emptiness; a point is only called feasible after every space has confirmed it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.spaces import convex
from gems_flwr.spaces.ball.ball import BallSpace, EllipsoidSpace
from gems_flwr.typing import Float

Stop = Callable[[Float], bool]
Convex = BallSpace | EllipsoidSpace | convex.ConvexSet


def intersect_balls(balls: Sequence[BallSpace]) -> convex.Intersection:
    """Return a point in all balls, or a proof that there is none.

    The point is the first feasible one on the way from the average (as in the papers); if the
    intersection is empty, the one whose largest distance to a ball is smallest.
    """
    began = time.perf_counter()
    convex.check_dimensions(balls)
    radii = np.array([ball.radius.value for ball in balls])
    problem = BallDual(np.stack([ball.center for ball in balls]).astype(np.float64), radii)
    average, x = problem.average, problem.uniform
    status: convex.Status = "feasible" if convex.in_all(balls, average) else "undecided"
    point = average
    if status != "feasible":
        x = problem.solve(0.0, None, early=True)
        point = problem.point(x)
    lower, upper = problem.dual(x), problem.upper(x)
    if status != "feasible" and lower > problem.noise:
        status = "empty"
    elif convex.in_all(balls, point):
        status = "feasible"
    if status == "feasible":
        point = convex.walk_from(balls, average, point)
    else:
        x = problem.deepest(x)
        deepest = problem.point(x)
        if min(convex.node_margins(balls, deepest)) >= min(convex.node_margins(balls, point)):
            point = deepest
        if status == "undecided" and convex.in_all(balls, point):
            status = "feasible"
    span = float(np.linalg.norm(average)) + float(np.sqrt(np.diag(problem.gram).max()))
    near = float(np.linalg.norm(point - average)) <= 1e-9 * span
    known = {"status": status, "bounds": (lower, upper), "is_average": near}
    return convex.verdict_of(balls, point, "balls: dual over the simplex", began, **known)  # type: ignore[arg-type]


class BallDual:
    """The dual of K balls: Gram matrix of the centres (K, d) around their mean, and radii (K,)."""

    def __init__(self, centers: Float, radii: Float) -> None:
        self.average = centers.mean(axis=0)
        # Around the mean, so that a common offset of all models costs no digits.
        self.centers = centers - self.average
        self.gram = self.centers @ self.centers.T
        self.radii = radii
        self.uniform = np.full(len(radii), 1.0 / len(radii))
        # What counts as zero, relative to the squared size of the problem.
        self.noise = 1e-10 * float(np.diag(self.gram).max() + (self.radii**2).max())

    def linear(self, t: float) -> Float:
        """The linear term with all radii larger by t."""
        return np.asarray(np.diag(self.gram) - (self.radii + t) ** 2)

    def dual(self, x: Float, t: float = 0.0) -> float:
        """The value for multipliers x, with all radii larger by t."""
        return float(x @ self.linear(t) - x @ self.gram @ x)

    def upper(self, x: Float, t: float = 0.0) -> float:
        """The largest ``|w - c_k|^2 - (r_k + t)^2`` at ``w = sum x_k c_k``."""
        return float((self.linear(t) - 2 * self.gram @ x + x @ self.gram @ x).max())

    def point(self, x: Float) -> Float:
        """Return the mean of the centres with these weights."""
        return np.asarray(self.average + x @ self.centers)

    def solve(self, t: float, start: Float | None, early: bool) -> Float:
        """Return the best multipliers; `early`: the first that decide whether the balls meet."""

        def stop(x: Float) -> bool:
            return self.dual(x, t) > self.noise or self.upper(x, t) <= -self.noise

        return maximise_on_simplex(self.linear(t), self.gram, start, stop if early else None)

    def deepest(self, x: Float) -> Float:
        """Return the multipliers of the point with the largest smallest margin."""
        # No margin exceeds the smallest radius; at that t the smallest ball is a point.
        t = -float(self.radii.min())
        x = self.solve(t, x, early=False)
        for _ in range(30):
            # For these multipliers the dual is zero at the larger root of a quadratic in t.
            mean = float(x @ self.radii)
            rest = float(x @ (np.diag(self.gram) - self.radii**2) - x @ self.gram @ x)
            root = -mean + float(np.sqrt(max(mean * mean + rest, 0.0)))
            if root <= t + 1e-12 * (abs(t) + 1e-12):
                break
            t = root
            x = self.solve(t, x, early=False)
        return x


# --- ellipsoids and other sets --------------------------------------------------------------------


def intersect_convex(
    spaces: Sequence[Convex], rounds: int = 60, tolerance: float = 1e-7
) -> convex.Intersection:
    """Return a point in all spaces, or a proof that there is none.

    The point is the first feasible one on the way from the average; if there is none, the one whose
    largest constraint value is smallest, to a duality gap of `tolerance`. Without a verdict after
    so many `rounds` of cuts it is ``undecided``.
    """
    began = time.perf_counter()
    convex.check_dimensions(spaces)
    origin = np.asarray(np.mean([s.center for s in spaces], axis=0, dtype=np.float64))
    others = [space for space in spaces if not isinstance(space, BallSpace | EllipsoidSpace)]
    plain = [s if isinstance(s, BallSpace | EllipsoidSpace) else s.outer() for s in spaces]
    problem = Quadratics.of(plain, origin)
    status: convex.Status = "feasible" if convex.in_all(spaces, origin) else "undecided"
    best, lower, upper = origin, -np.inf, np.inf
    x: Float | None = None

    def stop(w: Float, value: float) -> bool:
        # Not at the first proof of emptiness: the least violating point is wanted.
        return value <= 0 and convex.in_all(spaces, origin + w)

    for _ in range(0 if status == "feasible" else rounds):
        x = maximise_dual(problem, x, stop, tolerance=tolerance / 10)
        w, value = problem.minimiser(x)
        lower, point = max(lower, value - problem.rounding(x, w)), origin + w
        cuts = [(n, o) for space in others for n, o in zip(*space.cuts(point), strict=True)]
        beyond = max([float(n @ point - o) for n, o in cuts], default=-np.inf)
        worst, inside = max(beyond, float(problem.values(w).max())), convex.in_all(spaces, point)
        if inside or worst < upper:
            upper, best = worst, point
        status = "feasible" if inside else "empty" if lower > 0 else "undecided"
        if status != "undecided" or not cuts:
            break
        normals = np.array([n for n, _ in cuts])
        # Weights are counted from the origin: shift the offsets.
        shifted = normals @ origin - np.array([o for _, o in cuts])
        problem = problem + Quadratics(np.zeros_like(normals), -normals / 2, shifted)
        x = np.append(x, np.zeros(len(cuts)))
    if status == "feasible":
        best = convex.walk_from(spaces, origin, best)
    near = float(np.linalg.norm(best - origin)) <= 1e-9 * (1 + float(np.linalg.norm(origin)))
    method = "quadratics: dual with cutting planes"
    known = {"status": status, "bounds": (lower, upper), "is_average": near}
    return convex.verdict_of(spaces, best, method, began, **known)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class Quadratics:
    """Constraints ``sum_i a_ki w_i^2 - 2 b_ki w_i + g_k <= 0``, one per row."""

    a: Float  # curvatures, not negative (K, d)
    b: Float  # linear terms (K, d)
    g: Float  # constants (K,)

    @classmethod
    def of(cls, spaces: Sequence[BallSpace | EllipsoidSpace], origin: Float) -> Quadratics:
        """Return the constraints of some spaces, with weights counted from ``origin``."""
        centers = np.array([space.center.astype(np.float64) - origin for space in spaces])
        # Over r^2, so that all constraints are free of units; over 1 for a point.
        radii = [s.radius.value or 1.0 if isinstance(s, BallSpace) else s.radii for s in spaces]
        a = np.array([1.0 / np.full_like(origin, r) ** 2 for r in radii])
        ends = [0.0 if isinstance(s, BallSpace) and not s.radius.value else -1.0 for s in spaces]
        g = np.array([row @ c**2 for row, c in zip(a, centers, strict=True)]) + ends
        return cls(a, a * centers, g)

    def __add__(self, other: Quadratics) -> Quadratics:
        """Return both sets of constraints, these first."""
        joined = (np.concatenate([getattr(self, n), getattr(other, n)]) for n in ("a", "b", "g"))
        return Quadratics(*joined)

    def values(self, w: Float) -> Float:
        """Return the constraints at one point; up to 0 inside."""
        return np.asarray(self.a @ (w * w) - 2 * self.b @ w + self.g)

    def minimiser(self, x: Float) -> tuple[Float, float]:
        """Return the w for multipliers x, and the dual value."""
        curvature, linear = x @ self.a, x @ self.b
        safe = np.maximum(curvature, 1e-300)
        w = linear / safe
        value = float(x @ self.g - linear @ w)
        # Without curvature a linear term is unbounded below: no bound at all.
        if (curvature <= 0).any() and np.abs(linear[curvature <= 0]).max() > 0:
            value = -np.inf
        return w, value

    def rounding(self, x: Float, w: Float) -> float:
        """Return a bound on the rounding error of the dual value at x."""
        linear = x @ self.b
        return 1e-12 * float(np.abs(x * self.g).sum() + np.abs(linear * w).sum())


def maximise_dual(
    problem: Quadratics,
    start: Float | None = None,
    stop: Callable[[Float, float], bool] | None = None,
    steps: int = 60,
    tolerance: float = 1e-9,
) -> Float:
    """Return multipliers that maximise the dual.

    The first constraint must have curvature everywhere. `stop` gets w and the dual value;
    `tolerance` is the largest constraint minus the dual value, relative to the larger of it and 1.
    """
    curved = (problem.a > 0).all(axis=1)
    x = curved / curved.sum() if start is None else np.asarray(start, dtype=np.float64)
    w, value = problem.minimiser(x)
    for _ in range(steps):
        slopes = problem.values(w)
        gap = float(slopes.max()) - value
        if gap <= tolerance * max(1.0, abs(value)) or (stop is not None and stop(w, value)):
            break
        jacobian = problem.b - problem.a * w
        curvature = np.maximum(x @ problem.a, 1e-300)
        gram = (jacobian / curvature) @ jacobian.T
        target = maximise_on_simplex(slopes, gram, x)
        share, direction = 1.0, target - x
        promise = float(slopes @ direction)
        for _ in range(50):
            candidate = x + share * direction
            # Keep a trace of curvature, or the next minimiser is unbounded.
            if float(candidate[curved].sum()) < 1e-9:
                candidate = candidate * (1 - 1e-9) + 1e-9 * curved / curved.sum()
            w_new, fresh = problem.minimiser(candidate)
            if fresh >= value + 1e-4 * share * promise and fresh > value:
                x, w, value = candidate, w_new, fresh
                break
            share /= 2
        else:
            break
    return np.asarray(x)


# --- a quadratic over the simplex -----------------------------------------------------------------


def project_to_simplex(v: Float) -> Float:
    """Return the nearest point of the simplex (sorting; Held, Wolfe and Crowder 1974)."""
    ordered = np.sort(v)[::-1]
    sums = np.cumsum(ordered) - 1.0
    last = np.flatnonzero(ordered - sums / np.arange(1, len(v) + 1) > 0)[-1]
    return np.asarray(np.maximum(v - sums[last] / (last + 1), 0.0))


def maximise_on_simplex(
    linear: Float,
    gram: Float,
    start: Float | None = None,
    stop: Stop | None = None,
    tolerance: float = 1e-12,
) -> Float:
    """Return the maximiser of ``linear . x - x . gram . x`` over the simplex.

    `start` (K,) is uniform if left out. Once `stop` returns true for the current point, that is
    returned. `tolerance` is the largest gain in a coordinate that is left, relative to the data's
    size.
    """
    count = len(linear)
    x = np.full(count, 1.0 / count) if start is None else project_to_simplex(start)
    scale = float(np.abs(linear).max() + np.abs(gram).max())
    if count == 1 or scale == 0 or (stop is not None and stop(x)):
        return x

    def gain(x: Float) -> float:
        """Return how much more the steepest coordinate promises than the current point."""
        slope = linear - 2 * gram @ x
        return float(slope.max() - slope @ x)

    x, done = _momentum(linear, gram, x, scale, stop, lambda x: gain(x) <= tolerance * scale)
    if done:
        return x
    support = np.flatnonzero(x > 1e-12)
    best, best_gain = x, gain(x)
    # Primal active-set steps: solve on the support, drop what turns negative, add the best.
    for _ in range(3 * count + 50):
        solved = _solve_on(linear, gram, support, scale)
        if (solved < 0).any():
            old = x[support]
            falling = solved < old
            ratio = np.where(falling & (solved < 0), old / np.where(falling, old - solved, 1), 1.0)
            share = float(ratio.min())
            moved = np.maximum(old + share * (solved - old), 0)
            x = np.zeros_like(x)
            x[support] = moved / moved.sum()
            keep = (moved > 1e-14) & (ratio > share * (1 + 1e-12))
            support = support[keep] if keep.any() else support[[int(np.argmax(moved))]]
            continue
        x = np.zeros_like(x)
        x[support] = solved / solved.sum()
        left = gain(x)
        if left < best_gain:
            best, best_gain = x, left
        if left <= tolerance * scale or (stop is not None and stop(x)):
            return x
        slope = linear - 2 * gram @ x
        slope[support] = -np.inf
        if not np.isfinite(slope.max()):
            break
        support = np.append(support, int(np.argmax(slope)))
    return best


def _momentum(
    linear: Float, gram: Float, x: Float, scale: float, stop: Stop | None, close: Stop
) -> tuple[Float, bool]:
    """Accelerated projected gradient with restarts, at most 400 steps."""
    # A few power steps bound the largest eigenvalue from below; the factor makes it safe,
    # the row-sum norm is a bound from above.
    v = np.random.default_rng(0).random(len(x)) + 0.1
    for _ in range(20):
        image = gram @ v
        length = float(np.linalg.norm(image))
        if length == 0:
            break
        v = image / length
    bound = float(np.abs(gram).sum(axis=1).max())
    curvature = 2 * min(bound, 1.3 * float(v @ gram @ v)) + 1e-300 + 1e-15 * scale
    y, t = x, 1.0
    for step in range(1, 401):
        slope = linear - 2 * gram @ y
        fresh = project_to_simplex(y + slope / curvature)
        if slope @ (fresh - x) < 0:
            y, t = x, 1.0
            fresh = project_to_simplex(x + (linear - 2 * gram @ x) / curvature)
        following = (1 + np.sqrt(1 + 4 * t * t)) / 2
        y, x, t = fresh + (t - 1) / following * (fresh - x), fresh, following
        if step % 10 == 0 and ((stop is not None and stop(x)) or close(x)):
            return x, True
    return x, False


def _solve_on(linear: Float, gram: Float, support: NDArray[np.intp], scale: float) -> Float:
    """Solve the problem with only the sum constraint on some coordinates."""
    size = len(support)
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = 2 * gram[np.ix_(support, support)]
    # Equal centres make the block singular; a speck on the diagonal picks one solution.
    system[np.arange(size), np.arange(size)] += 1e-13 * scale
    system[:size, size] = system[size, :size] = 1.0
    right = np.append(linear[support], 1.0)
    try:
        return np.asarray(np.linalg.solve(system, right)[:size])
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(system, right, rcond=None)[0][:size])
