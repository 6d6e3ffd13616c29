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
    return delta * (mean / first) ** exponent, (first, mean)


def steered(delta: float, rate: float, target: float) -> float:
    """Return a threshold that is higher the more models per node were moved than wanted.

    In proportion to the gap, so that it comes to rest where the mean rate is the target.
    """
    return delta * math.exp(_GAIN * (rate - target))
