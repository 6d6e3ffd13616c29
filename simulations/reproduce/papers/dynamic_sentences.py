"""What Kamp et al. 2018 say of their figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from simulations.reproduce.papers.equal_loss import AT_EQUAL_LOSS, BYTES, LOSS
from simulations.reproduce.papers.findings import Findings, Timeline
from simulations.reproduce.papers.text_claim import TextClaim

# "Comparable", "similar": at most this much more loss. "Substantially less": at most these bytes.
SIMILAR, LESS = 1.05, 0.9
_AFTER_DRIFT = 50
_ALL_PERIODS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0)


def _runs(found: Findings, setting: str) -> dict[str, tuple[float, float]]:
    """Return loss and bytes of the protocols in a setting."""
    losses = [each for each in found.of(LOSS) if each.setting == setting and each.values]
    sent = {each.method: found.get(setting, each.method, BYTES) for each in losses}
    return {e.method: (e.mean, known.mean) for e in losses if (known := sent[e.method]) is not None}


def _first(found: Findings) -> dict[str, tuple[float, float]]:
    settings = found.settings()
    return _runs(found, settings[0]) if settings else {}


def _every_period_is_met(found: Findings) -> bool | None:
    """Whether for every period a dynamic protocol has a similar loss with fewer bytes."""
    runs = _first(found)
    dynamic = [run for method, run in runs.items() if method.startswith("Δ")]
    periodic = [run for method, run in runs.items() if method.startswith("b =")]
    if not dynamic or not periodic:
        return None
    return all(
        any(loss <= SIMILAR * theirs and sent <= LESS * bytes_ for loss, sent in dynamic)
        for theirs, bytes_ in periodic
    )


def _compare(first: str, second: str, part: int) -> Callable[[Findings], bool | None]:
    """Return whether the first protocol has less loss (0) or fewer bytes (1) than the second."""

    def holds(found: Findings) -> bool | None:
        runs = _first(found)
        if first not in runs or second not in runs:
            return None
        return runs[first][part] < runs[second][part]

    return holds


def _serial_is_best(found: Findings) -> bool | None:
    runs = _first(found)
    return min(runs, key=lambda method: runs[method][0]) == "serial" if "serial" in runs else None


def _saves_four_fifths(found: Findings) -> bool | None:
    runs = _first(found)
    if "Δ = 0.8" not in runs or "b = 5" not in runs:
        return None
    return runs["Δ = 0.8"][1] <= 0.2 * runs["b = 5"][1]


def rate_after_drifts(timeline: Timeline) -> float | None:
    """Return how much more is sent in the rounds after a drift than in all others."""
    after = quiet = 0.0
    rounds = [0, 0]
    points = [*zip(timeline.rounds, timeline.megabytes, strict=True)]
    for (start, before), (end, now) in pairwise(points):
        near = any(drift <= end <= drift + _AFTER_DRIFT for drift in timeline.drifts)
        after, quiet = after + near * (now - before), quiet + (not near) * (now - before)
        rounds[not near] += end - start
    if not all(rounds) or not quiet:
        return None
    return (after / rounds[0]) / (quiet / rounds[1])


def _more_after_drifts(found: Findings) -> bool | None:
    rates = [rate_after_drifts(t) for t in found.timelines if t.method.startswith("Δ")]
    known = [rate for rate in rates if rate is not None]
    return all(rate > 1 for rate in known) if known else None


def _drives_beaten(found: Findings) -> bool | None:
    shares = found.of("share that a dynamic protocol outperforms")
    # Where all drive alike, no share was made: then none is outperformed.
    return bool(shares) and shares[0].mean == 1.0 if found.of("L_dd") else None


def _drives_like_serial(found: Findings) -> bool | None:
    gaps = {e.method: e.mean for e in found.of("L_dd beside serial") if e.values}
    near = [gaps[method] for method in ("Δ = 0.1", "Δ = 0.3") if method in gaps]
    return max(near) <= 0.05 if near else None


def _much_talk_is_bad(found: Findings) -> bool | None:
    drives = {e.method: e.mean for e in found.of("L_dd") if e.values}
    if not {"b = 1", "Δ = 0.01", "serial"} <= set(drives):
        return None
    return min(drives["b = 1"], drives["Δ = 0.01"]) > drives["serial"]


def _scale(learners: int, ours: str, theirs: str, part: int) -> Callable[[Findings], bool | None]:
    def holds(found: Findings) -> bool | None:
        runs = _runs(found, f"{learners} learners")
        if ours not in runs or theirs not in runs:
            return None
        return runs[ours][part] < runs[theirs][part]

    return holds


def _saves_everywhere(found: Findings) -> bool | None:
    """Whether in every setting some dynamic protocol needs fewer bytes at equal loss."""
    settings = [each.setting for each in found.of(LOSS)]
    best: dict[str, float] = {}
    for each in found.of(AT_EQUAL_LOSS):
        if each.method.startswith("Δ") and each.values:
            best[each.setting] = min(best.get(each.setting, math.inf), each.mean)
    return all(best.get(each, math.inf) < 1 for each in settings) if settings else None


def _relative(found: Findings) -> Mapping[tuple[str, float, float], float]:
    """Return accuracies beside that of ε = 0, b = 1, by protocol, ε and b."""
    values = {}
    for each in found.of("accuracy"):
        noise, period = each.setting.removeprefix("ε = ").split(", b = ")
        if each.values:
            values[each.method, float(noise), float(period)] = each.mean
    return {
        key: value / values[key[0], 0.0, 1.0]
        for key, value in values.items()
        if values.get((key[0], 0.0, 1.0))
    }


def _noise(
    judge: Callable[[Iterable[float]], bool], noises: Sequence[float], periods: Sequence[float]
) -> Callable[[Findings], bool | None]:
    def holds(found: Findings) -> bool | None:
        values = [v for (_, e, b), v in _relative(found).items() if e in noises and b in periods]
        return judge(values) if values else None

    return holds


SENTENCES: Mapping[str, tuple[TextClaim, ...]] = {
    "Dynamic averaging 2018, Figures 5.1 and A.1": (
        TextClaim(
            "for every period a dynamic protocol has a similar loss (5 % more at most) with "
            "substantially fewer bytes (10 %)",
            _every_period_is_met,
        ),
        TextClaim("the serial learner has the least loss", _serial_is_best),
        TextClaim("b = 4 loses more than no synchronisation", _compare("nosync", "b = 4", 0)),
    ),
    "Dynamic averaging 2018, Figures 5.2, 5.3, A.2 and A.3": (
        TextClaim("Δ = 0.6 sends less than FedAvg", _compare("Δ = 0.6", "FedAvg, C = 0.3", 1)),
        TextClaim("Δ = 0.8 sends less than FedAvg", _compare("Δ = 0.8", "FedAvg, C = 0.3", 1)),
        TextClaim("Δ = 0.8 saves four fifths of b = 5", _saves_four_fifths),
    ),
    "Dynamic averaging 2018, Figures 5.4 and A.4": (
        TextClaim("dynamic averaging sends more after each drift", _more_after_drifts),
    ),
    "Dynamic averaging 2018, Figures 5.5 and A.5": (
        TextClaim("a dynamic protocol outperforms each periodic one", _drives_beaten),
        TextClaim("Δ = 0.1 and 0.3 drive as the serial model", _drives_like_serial),
        TextClaim("b = 1 and Δ = 0.01 drive worse than it", _much_talk_is_bad),
    ),
    "Dynamic averaging 2018, Figures 6.1 and A.7": (
        TextClaim(
            "with 100 learners Δ = 0.7 has less loss than b = 2", _scale(100, "Δ = 0.7", "b = 2", 0)
        ),
        TextClaim(
            "with 200 learners Δ = 0.3 sends less than b = 1", _scale(200, "Δ = 0.3", "b = 1", 1)
        ),
    ),
    "Dynamic averaging 2018, Figures 6.2 and A.8": (
        TextClaim(
            "noise up to ε = 3 does little harm (a tenth at most)",
            _noise(lambda values: min(values) >= 0.9, (0.0, 1.0, 3.0), _ALL_PERIODS),
        ),
        TextClaim(
            "ε = 20 fails (half of the accuracy at most, b = 50)",
            _noise(lambda values: max(values) <= 0.5, (20.0,), (50.0,)),
        ),
        TextClaim(
            "different beginnings can be beneficial",
            _noise(lambda values: max(values) > 1.0, (1.0, 3.0, 5.0), _ALL_PERIODS),
        ),
    ),
    "Dynamic averaging 2018, Figure A.6": (
        TextClaim("dynamic averaging saves bytes with every optimiser", _saves_everywhere),
    ),
}
