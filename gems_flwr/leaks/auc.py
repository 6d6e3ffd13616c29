"""The area under the ROC curve of scores, and how sure it is.

The area is the chance that a member scores above somebody else, ties counting half. Each score has
a *placement*: the share of the other side that it is on the right side of. The area is the mean of
placements, and their spread on either side gives its standard error (DeLong, DeLong and
Clarke-Pearson 1988, Section 2).

Decided here: a person may be tried several times, under several splits of the data. Then placements
are averaged for each person first, and the error counts people, not trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import OptionError
from gems_flwr.typing import Float


@dataclass(frozen=True)
class Auc:
    """An area under the ROC curve, from 0 to 1, and its standard error; 0.5 is guessing."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class Trial:
    """Scores of members and of others, and who they are.

    Parameters
    ----------
    members, others : float arrays
        Scores; larger is more like a member.
    member_ids, other_ids : int arrays
        Who each score is of.
    """

    members: Float
    others: Float
    member_ids: NDArray[np.int64]
    other_ids: NDArray[np.int64]


def placements(scores: Float, of: Float) -> Float:
    """Return for each score the share of others below it, ties counting half.

    Parameters
    ----------
    scores : array of shape (n,)
        Scores to be placed.
    of : array of shape (m,)
        Among these, at least one.
    """
    ranked = np.sort(of)
    below = np.searchsorted(ranked, scores, side="left")
    upto = np.searchsorted(ranked, scores, side="right")
    return np.asarray((below + upto) / (2 * len(ranked)))


def auc_of(trials: Sequence[Trial]) -> Auc:
    """Return the mean area over some trials.

    Parameters
    ----------
    trials : sequence of Trial
        At least one, each with at least one score on either side.

    Raises
    ------
    OptionError
        If there is nothing on one of the sides.
    """
    if not trials or any(not len(t.members) or not len(t.others) for t in trials):
        raise OptionError("an AUC needs scores of members and of others")
    above = [placements(t.members, t.others) for t in trials]
    below = [1 - placements(t.others, t.members) for t in trials]
    value = float(np.mean([each.mean() for each in above]))
    variance = _variance_of_mean([t.member_ids for t in trials], above)
    variance += _variance_of_mean([t.other_ids for t in trials], below)
    return Auc(value, math.sqrt(variance))


def _variance_of_mean(ids: Sequence[NDArray[np.int64]], values: Sequence[Float]) -> float:
    """Return the variance of a mean over people, each with the mean of its values."""
    people, where = np.unique(np.concatenate(ids), return_inverse=True)
    if len(people) < 2:
        return 0.25
    means = np.bincount(where, np.concatenate(values)) / np.bincount(where)
    return float(means.var(ddof=1) / len(people))


def share_text(value: float, digits: int = 2) -> str:
    """Return a number from 0 to 1 as the documentation writes it: .66, 1.00."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text
