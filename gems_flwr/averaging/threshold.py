"""Thresholds of dynamic averaging that move (an open question of Kamp et al. 2018).

Whatever the threshold is at a check, the divergence after it is at most that, so it may change
from check to check without leaving Definition 2.
"""

from __future__ import annotations

import math

# The share of the new loss in its running mean, and the change of log delta per check for each
# model per node that is moved too much.
_MEMORY = 0.05
_GAIN = 0.1
# How far a threshold may go: of a ratio of losses, and of all.
_MOST_CHANGE = 1e6
_SMALLEST, _LARGEST = 1e-30, 1e30


def following_loss(
    delta: float, exponent: float, losses: tuple[float, ...], loss: float
) -> tuple[float, tuple[float, float]]:
    """Return delta times (running mean of the loss / first loss) to a power, and the new losses.

    Parameters
    ----------
    delta : float
        The threshold at the first loss.
    exponent : float
        The power, at least 0.
    losses : tuple of float
        First and running mean so far; empty at the first check.
    loss : float
        Mean loss since the last check.
    """
    first, mean = losses or (loss, loss)
    mean += _MEMORY * (loss - mean)
    # Losses are what nodes say: no ratio of them may make the threshold zero, infinite or complex.
    ratio = mean / first if first > 0 else 1.0
    ratio = min(max(ratio, 1 / _MOST_CHANGE), _MOST_CHANGE)
    return delta * ratio**exponent, (first, mean)


def steered(delta: float, rate: float, target: float) -> float:
    """Return a threshold that is higher the more models per node were moved than wanted.

    In proportion to the gap, so that it comes to rest where the mean rate is the target.
    """
    return min(max(delta * math.exp(_GAIN * (rate - target)), _SMALLEST), _LARGEST)
