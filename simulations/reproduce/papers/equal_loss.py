"""What does a byte buy? Bytes beside those that periodic averaging needs for the same loss.

Kamp et al. 2018, Section 5. Single runs say little, since a protocol that talks less loses more;
compared are frontiers: how many bytes periodic averaging would need for the same loss, read off
between its own runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulations.reproduce.papers.findings import Finding, Findings

# Quantities of `run_measures`, and what is added here.
LOSS, BYTES, MODELS = "loss per learner", "MB in all", "models per learner"
AT_EQUAL_LOSS = "bytes beside periodic at equal loss"


def equal_loss_bytes(periodic: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the bytes that periodic averaging would need for a loss; None beyond its runs.

    Between two of its runs, given as pairs of loss and bytes, the logarithm of the bytes is taken
    to be linear in the loss.
    """
    points = sorted((at, np.log(sent)) for at, sent in periodic)
    if len(points) < 2 or not points[0][0] <= loss <= points[-1][0]:
        return None
    losses, logs = zip(*points, strict=True)
    return float(np.exp(np.interp(loss, losses, logs)))


def compare_with_periodic(found: Findings) -> None:
    """Add the bytes beside those that periodic averaging needs for the same loss, seed by seed."""
    for setting in found.settings():
        runs = {f.method: _runs(found, f) for f in found.of(LOSS) if f.setting == setting}
        for method, own in runs.items():
            if "Δ" in method or "C =" in method:
                shares = [
                    _share(run, [runs[name][seed] for name in runs if name.startswith("b = ")])
                    for seed, run in enumerate(own)
                ]
                if any(share is not None for share in shares):
                    found.add(Finding(setting, method, AT_EQUAL_LOSS, shares))


def compare_with(
    found: Findings, setting: str, theirs: str, ours: Sequence[str], name: str = ""
) -> None:
    """Add bytes and loss of protocols beside those of one other, seed by seed."""
    for quantity, title in ((BYTES, "bytes beside"), (LOSS, "loss beside")):
        reference = found.get(setting, theirs, quantity)
        for method in ours:
            own = found.get(setting, method, quantity)
            if own and reference:
                pairs = zip(own.by_seed, reference.by_seed, strict=True)
                ratios = [None if a is None or b is None else a / b for a, b in pairs]
                found.add(Finding(setting, method, f"{title} {name or theirs}", ratios))


def _runs(found: Findings, loss: Finding) -> list[tuple[float, float] | None]:
    """Return loss and bytes of every seed of a protocol."""
    sent = found.get(loss.setting, loss.method, BYTES)
    if sent is None:
        return [None] * len(loss.by_seed)
    pairs = zip(loss.by_seed, sent.by_seed, strict=True)
    return [None if a is None or b is None else (a, b) for a, b in pairs]


def _share(
    run: tuple[float, float] | None, periodic: Sequence[tuple[float, float] | None]
) -> float | None:
    """Return a run's bytes over those of periodic averaging; None beyond its losses."""
    if run is None:
        return None
    same = equal_loss_bytes([each for each in periodic if each is not None], run[0])
    return None if same is None else run[1] / same
