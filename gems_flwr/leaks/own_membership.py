"""How well members of a class are told from others, tried by the owner of the samples.

The attacker is that of `gems_flwr.leaks.membership`: one who has a candidate and *other* samples of
the class. The owner has fewer samples than the study, so they are dealt out differently:

- with held-out samples of the class, what was sent is attacked itself: its samples are the members,
  the held-out ones the others. One half of the held-out samples is what the attacker knows while
  the other half is tried, and the other way round;
- without, three quarters of the samples make a space in the same way, and the last quarter is held
  out of it, several times. Fewer samples hide less, so this errs towards too high an AUC; but the
  attacker then knows an eighth of the class, and one who knows more does better.

How statistics are weighed is learnt on other such splits, drawn at random. In all of them who is a
member is independent of who is one in the trial, so nothing is learnt about the samples by heart.
The standard error (`gems_flwr.leaks.auc`) counts samples, and not what other attackers would reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gems_flwr.leaks.auc import Auc, Trial, auc_of
from gems_flwr.leaks.membership import CANDIDATES, Judge, Knowledge, Release, statistics
from gems_flwr.typing import Float

# Fewest samples that can be held out, so that half of them still say something of a class.
FEWEST_OUTSIDE = 4
# Share of the samples that make a space where none are held out.
INSIDE = 0.75
# Splits to learn from: so many that there are this many candidates, in these bounds.
LEARNT_FROM, FEWEST_SPLITS, MOST_SPLITS = 600, 2, 6
# Splits to try on where none is given: so many that this many others are tried, in these bounds.
TRIED, FEWEST_TRIALS, MOST_TRIALS = 150, 1, 4

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Membership:
    """What came of telling members from others.

    Parameters
    ----------
    auc : Auc
        0.5 is guessing, 1 is knowing.
    samples : int
        Behind what was attacked.
    others : int
        Samples that were held out, of which the attacker knew one half at a time.
    of_what_is_sent : bool
        Whether it was the space itself that was attacked, or one of fewer samples.
    """

    auc: Auc
    samples: int
    others: int
    of_what_is_sent: bool


@dataclass(frozen=True, eq=False)
class _Split:
    """Who is behind a space, whom the attacker knows, and who else is tried."""

    inside: Index
    known: Index
    others: Index


def own_membership(
    members: Float,
    held_out: Float,
    sent: tuple[Float, Float],
    release: Release,
    *,
    seed: int = 0,
) -> Membership | None:
    """Try to tell the samples behind a class's moments from others.

    Parameters
    ----------
    members : array of shape (n, D)
        All samples behind what was sent.
    held_out : array of shape (m, D)
        Samples of the same class that are not behind it; m may be 0.
    sent : pair of arrays of shapes (D,) and (D, D)
        Mean and covariance that are sent.
    release : callable
        What would be sent of other samples; None if nothing, or if it would be of another form.
    seed : int
        How samples are dealt out.

    Returns
    -------
    Membership or None
        None if there are too few samples to try it.
    """
    generator = np.random.default_rng(seed)
    pool, count = np.concatenate([members, held_out]), len(members)
    is_given = len(held_out) >= 2 * FEWEST_OUTSIDE
    # Without enough held-out samples those that there are join the others.
    size = count if is_given else int(np.ceil(INSIDE * len(pool)))
    if len(pool) - size < FEWEST_OUTSIDE or size < 2:
        return None
    everybody = np.arange(len(pool))

    def drawn(times: int) -> Iterator[_Split]:
        for _ in range(times):
            order = generator.permutation(everybody)
            half = (len(pool) - size) // 2
            yield _Split(order[:size], order[size : size + half], order[size + half :])

    rows, truths = [], []
    for split in drawn(_times(LEARNT_FROM, size, FEWEST_SPLITS, MOST_SPLITS)):
        made = release(pool[split.inside])
        if made is None:
            return None
        table, trial = _looked_at(pool, split, made)
        rows.append(table)
        truths.append(np.repeat([1, 0], [len(trial.inside), len(trial.others)]))
    judge = Judge.taught(np.concatenate(rows), np.concatenate(truths))

    trials = []
    if is_given:
        targets = [(sent, _given(generator.permutation(everybody[count:]), count))]
    else:
        targets = []
        for split in drawn(_times(TRIED, len(pool) - size, FEWEST_TRIALS, MOST_TRIALS)):
            made = release(pool[split.inside])
            if made is None:
                return None
            targets.append((made, split))
    for made, split in targets:
        swapped = _Split(split.inside, split.others, split.known)
        for each in (split, swapped):
            table, tried = _looked_at(pool, each, made)
            scores, cut = judge.suspicion(table), len(tried.inside)
            trials.append(Trial(scores[:cut], scores[cut:], tried.inside, tried.others))
    return Membership(auc_of(trials), size, len(pool) - size, is_given)


def _times(wanted: int, at_once: int, fewest: int, most: int) -> int:
    return min(most, max(fewest, wanted // at_once))


def _given(outside: Index, count: int) -> _Split:
    half = len(outside) // 2
    return _Split(np.arange(count), outside[:half], outside[half:])


def _looked_at(pool: Float, split: _Split, made: tuple[Float, Float]) -> tuple[Float, _Split]:
    """Return what the attacker looks at, and of whom: a bounded number on either side."""
    tried = _Split(split.inside[:CANDIDATES], split.known, split.others[:CANDIDATES])
    candidates = pool[np.concatenate([tried.inside, tried.others])]
    return statistics(candidates, made, Knowledge.of(pool[split.known])), tried
