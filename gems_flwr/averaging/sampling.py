"""Who trains which model: sampling by importance under a budget (CMU 18-786 slides, 2025, Eq. 5).

A round has a budget of m pairs in expectation, client i trains at most B_i models. With
shares d, probabilities p, updates U and the active set A_s, ``Σ_{i∈A_s} (d_is / p_is) U_is`` is an
unbiased estimate of the full update ``Σ_i d_is U_is``. Clients are drawn independently of each
other, so its variance, summed over the models, is ``Σ (1/p − 1) ‖d U‖²``, which
`optimal_probabilities` minimises. Matrices have one row per client and one column per model.

Decided where the slides are silent:

- B_i > 1: p = min(1, a / λ_i) with one λ for all clients except those whose own limit binds
  earlier, which have a larger one (the KKT conditions). Solved exactly by sorting, in n log n.
- A pair without importance, or that lacks the model, has probability 0. A loss of zero does not
  mean an update of zero, so `loss_importance` puts a floor under it. If nothing has any importance,
  callers sample uniformly: the same importance for every pair.
- What the limits leave no room for stays unspent: the sum is then below the budget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]

# Sums of probabilities this close to a whole number are that number.
_ROUNDING = 1e-9
# Least loss that a client counts with, relative to the model's mean loss.
LOSS_FLOOR = 0.01


def optimal_probabilities(importance: ArrayLike, budget: float, capacity: ArrayLike = 1) -> Matrix:
    """Return the probabilities that minimise the variance; all zero without any importance.

    `importance`, of shape (clients, models) like the result, is ‖d U‖ or what stands for it, at
    least 0, and 0 where a client lacks a model. `budget` is m, above 0; if the capacities B_i do
    not allow as much, all that they allow is used.
    """
    values = _checked_importance(importance)
    if not (np.isfinite(budget) and budget > 0):
        raise ValueError(f"budget must be a number above 0, got {budget}")
    limits = np.broadcast_to(np.asarray(capacity), (len(values),))
    largest = values.max(initial=0.0)
    if largest == 0:
        return np.zeros_like(values)
    # Only ratios matter, and numbers around 1 neither overflow nor vanish. A client without
    # capacity counts as one without importance.
    values = np.where(limits[:, None] > 0, values / largest, 0.0)
    own_levels = _own_levels(values, limits)
    level = _common_level(values, own_levels, budget)
    levels = np.maximum(own_levels, level)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(levels > 0, values / levels, np.sign(values))
    return np.asarray(np.minimum(shares, 1.0))


def loss_importance(
    losses: ArrayLike, shares: ArrayLike, available: ArrayLike, floor: float = LOSS_FLOOR
) -> Matrix:
    """Return d × loss, each loss at least `floor` × the model's mean, so that no client is out.

    The mean is over the `available` pairs of a model, those whose loss is known, weighted by their
    shares d; the others have no importance. All arrays are of shape (clients, models).
    """
    known = np.asarray(available, dtype=bool)
    values = _checked_importance(np.where(known, losses, 0.0), "losses")
    d = np.where(known, np.asarray(shares, dtype=np.float64), 0.0)
    totals = d.sum(axis=0)
    means = np.divide((d * values).sum(axis=0), totals, out=np.zeros_like(totals), where=totals > 0)
    return np.asarray(d * np.maximum(values, floor * means))


def reachable_budget(available: ArrayLike, capacity: ArrayLike = 1) -> int:
    """Return how many pairs can be trained in one round: Σ_i min(B_i, models that i has)."""
    held = (np.asarray(available) > 0).sum(axis=1)
    return int(np.minimum(held, capacity).sum())


def draw_assignment(probabilities: ArrayLike, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw who trains which model.

    Each client draws by itself (Madow's systematic sampling): its models lie on a line as
    intervals as long as their probabilities, and a comb of width 1 with a random start picks those
    that it hits. So a pair is picked with exactly its probability, and a client gets at most as
    many models as its probabilities sum to, rounded up.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    ends = np.cumsum(p, axis=1)
    whole = np.rint(ends)
    ends = np.where(np.abs(ends - whole) < _ROUNDING, whole, ends)
    start = rng.random((len(p), 1))
    hits = np.ceil(ends - start)
    before = np.concatenate([np.zeros((len(p), 1)), hits[:, :-1]], axis=1)
    return np.asarray((hits > before) & (p > 0))


def aggregation_coefficients(
    shares: ArrayLike, probabilities: ArrayLike, active: ArrayLike
) -> Matrix:
    """Return d / p for the active pairs and 0 for the others: unbiased whatever p > 0 is.

    All are of shape (clients, models); active are the pairs that were drawn, or only those that
    delivered.
    """
    d, p = (np.asarray(each, dtype=np.float64) for each in (shares, probabilities))
    chosen = np.asarray(active, dtype=bool)
    return np.asarray(np.divide(d, p, out=np.zeros_like(d), where=chosen))


def data_shares(examples: ArrayLike) -> Matrix:
    """Return d: each client's share of each model's examples; 0 for a model without any."""
    counts = np.asarray(examples, dtype=np.float64)
    totals = counts.sum(axis=0, keepdims=True)
    return np.asarray(np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0))


def _own_levels(values: Matrix, limits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each client the λ at which its probabilities sum to its limit; 0 if never."""
    clients, models = values.shape
    largest_first = -np.sort(-values, axis=1)
    # If the j largest are certain, the others share what is left: λ = (their sum) / (B − j).
    tails = np.cumsum(largest_first[:, ::-1], axis=1)[:, ::-1]
    levels = np.zeros(clients)
    found = (values > 0).sum(axis=1) <= limits
    for certain in range(models):
        room = limits - certain
        level = np.divide(tails[:, certain], room, out=np.zeros(clients), where=room > 0)
        fits = ~found & (room > 0) & (largest_first[:, certain] <= level)
        levels[fits] = level[fits]
        found |= fits
    return levels


def _common_level(values: Matrix, own_levels: NDArray[np.float64], budget: float) -> float:
    """Return the λ for all at which the probabilities sum to the budget; 0 if they cannot.

    A pair's probability is constant, min(1, a / own level), up to λ = max(a, own level), and a / λ
    from there. So the sum is known at every such point from running sums, and falls.
    """
    pairs = values > 0
    a = values[pairs]
    own = np.broadcast_to(own_levels[:, None], values.shape)[pairs]
    points = np.maximum(a, own)
    order = np.argsort(points, kind="stable")
    a, points = a[order], points[order]
    constants = a / points
    falling = np.cumsum(a)
    still = np.append(np.cumsum(constants[::-1])[::-1][1:], 0.0)
    sums = still + falling / points
    if constants.sum() <= budget * (1 + 1e-12):
        return 0.0
    # Rounding may make the first point a hair smaller than the sum of the constants.
    last = max(0, int(np.searchsorted(-sums, -budget, side="right")) - 1)
    highest = points[last + 1] if last + 1 < len(points) else np.inf
    left = budget - still[last]
    # The solution lies between two points; over a million pairs rounding could carry it beyond.
    level = falling[last] / left if left > 0 else highest
    return float(min(max(level, points[last]), highest))


def _checked_importance(importance: ArrayLike, what: str = "importance") -> Matrix:
    values = np.asarray(importance, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"{what} must have clients as rows, models as columns, got {values.shape}")
    if not np.isfinite(values).all() or (values < 0).any():
        client, model = np.argwhere(~(np.isfinite(values) & (values >= 0)))[0]
        raise ValueError(
            f"{what} must be finite and at least 0, got {values[client, model]} for client "
            f"{client}, model {model}"
        )
    return values
