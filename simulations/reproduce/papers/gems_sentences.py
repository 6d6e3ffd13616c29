"""What Guha & Smith 2019 and Guha 2018 say of their figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.text_claim import TextClaim

# As released: GEMS and the average at ten times the rate of the others.
_TUNED = ("GEMS, rate 0.01", "average, rate 0.01", "local, rate 0.001", "raw, rate 0.001")


def _tuned(found: Findings, model: str) -> list[Sequence[Finding]]:
    """Return GEMS, average, local and raw, tuned as released, in every setting of a model."""
    settings = [each for each in found.settings() if f", {model}, " in each]
    rows = [
        [each for each in found.findings if (each.setting, each.method) == (setting, method)]
        for setting in settings
        for method in _TUNED
    ]
    if not rows or not all(row and row[0].values for row in rows):
        return []
    flat = [row[0] for row in rows]
    return [flat[start : start + len(_TUNED)] for start in range(0, len(flat), len(_TUNED))]


def _alike(a: Finding, b: Finding) -> bool:
    return abs(a.mean - b.mean) <= 2 * math.hypot(a.sd or 0.0, b.sd or 0.0)


def _convex_alike(found: Findings) -> bool | None:
    rows = _tuned(found, "convex")
    return all(_alike(gems, average) for gems, average, _, _ in rows) if rows else None


def _convex_better(found: Findings) -> bool | None:
    rows = _tuned(found, "convex")
    best = (min(g.mean, a.mean) > max(r.mean, c.mean) for g, a, r, c in rows)
    return all(best) if rows else None


def _networks_better(found: Findings) -> bool | None:
    rows = _tuned(found, "network")
    return all(row[0].mean > max(e.mean for e in row[1:]) for row in rows) if rows else None


def _advantage_shrinks(found: Findings) -> bool | None:
    """Whether the gain over raw training is larger with the fewest samples than with the most."""
    rows = _tuned(found, "network")
    if not rows:
        return None
    gains: dict[float, list[float]] = {}
    for gems, _, _, raw in rows:
        gains.setdefault(gems.x or 0.0, []).append(gems.mean - raw.mean)
    means = {samples: sum(each) / len(each) for samples, each in gains.items()}
    return means[min(means)] > means[max(means)]


def _grid(found: Findings) -> dict[tuple[float, float], tuple[float, bool]]:
    """Return accuracy and emptiness by the two ε, with the paper's sampled radii."""
    grid = {}
    for each in found.of("accuracy"):
        empty = found.get(each.setting, each.method, "empty")
        if each.method == "radii sampled" and each.values and empty is not None:
            first, second = each.setting.removeprefix("ε = ").split(" and ")
            grid[float(first), float(second)] = (each.mean, empty.mean > 0.5)
    return grid


def _high_is_empty(found: Findings) -> bool | None:
    grid = _grid(found)
    top = max((first for first, _ in grid), default=0.0)
    return grid[top, top][1] if grid else None


def _one_high_is_worse(found: Findings) -> bool | None:
    grid = _grid(found)
    if not grid:
        return None
    low, top = min(a for a, _ in grid), max(a for a, _ in grid)
    mixed = (grid[low, top], grid[top, low])
    return all(not empty and accuracy < grid[low, low][0] for accuracy, empty in mixed)


def _best_is_equal_and_low(found: Findings) -> bool | None:
    met = {pair: accuracy for pair, (accuracy, empty) in _grid(found).items() if not empty}
    equal = [accuracy for (a, b), accuracy in met.items() if a == b]
    # Ties count as the best: where the average is in both balls, every ε gives the same model.
    return max(equal) >= max(met.values()) - 0.005 if equal else None


def _exceeds_epsilon(found: Findings) -> bool | None:
    met = [(max(pair), acc) for pair, (acc, empty) in _grid(found).items() if not empty]
    return any(accuracy > epsilon for epsilon, accuracy in met) if met else None


# --- GEMS 2018 --------------------------------------------------------------------------------


def _fewer_neurons(found: Findings) -> bool | None:
    points = sorted(
        (each.x or 0.0, each.mean)
        for each in found.of("hidden neurons")
        if each.method == "GEMS" and each.values
    )
    pairs = pairwise(points)
    return all(a[1] >= b[1] for a, b in pairs) if len(points) > 1 else None


def _global_is_steady(found: Findings) -> bool | None:
    settings = found.settings()
    pairs = [(found.get(s, "GEMS", "loss"), found.get(s, "Local", "loss")) for s in settings]
    return all(a.mean < b.mean for a, b in pairs if a and b) if all(map(all, pairs)) else None


SENTENCES: Mapping[str, tuple[TextClaim, ...]] = {
    "GEMS 2019, Figure 3": (
        TextClaim("tuned GEMS is comparable to the tuned average", _convex_alike),
        TextClaim("both outperform tuned local models and raw training", _convex_better),
    ),
    "GEMS 2019, Figure 4": (
        TextClaim("tuned GEMS outperforms all others at every sample size", _networks_better),
        TextClaim("its advantage over raw training shrinks with more samples", _advantage_shrinks),
    ),
    "GEMS 2019, Figure 6": (
        TextClaim("with a high ε for both nodes there is no intersection", _high_is_empty),
        TextClaim("one high ε gives a model, a worse one", _one_high_is_worse),
        TextClaim("best where both ε are equal and low", _best_is_equal_and_low),
        TextClaim("the model's accuracy can exceed ε", _exceeds_epsilon),
    ),
    "GEMS 2018, Figure 2": (TextClaim("a greater ε gives fewer hidden neurons", _fewer_neurons),),
    "GEMS 2018, Figure 3": (
        TextClaim("GEMS has less loss than local models at every mixture", _global_is_steady),
    ),
}
