"""An attacker who has a candidate, and asks whether it is among the samples behind class moments.

The attacker also has *other* samples of the class and so knows its mean and covariance. Every
candidate is held against what was sent by several statistics (inner products with the sent mean and
covariance after whitening, likelihood ratios, the largest deviation from the sent mean, features
that never vary); how to weigh them is learnt on nodes of the attacker's own making ("shadow" nodes:
Shokri et al. 2017), whose members are known.

Samples are dealt out in one of two ways:

- with held-out samples of the class, what was sent is attacked itself: its samples are the members,
  the held-out ones the others. One half of the held-out samples is what the attacker knows while
  the other half is tried, and the other way round;
- without, three quarters of the samples make a space in the same way, and the last quarter is held
  out of it, several times. Fewer samples hide less, so this errs towards too high an AUC; but the
  attacker then knows an eighth of the class, and one who knows more does better.

The standard error of the area under the ROC curve is that of DeLong, DeLong and Clarke-Pearson
(1988, Section 2). It counts samples, each with the mean over its trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gems_flwr.errors import OptionError
from gems_flwr.typing import Float

# What a node's samples become on the wire: mean and covariance; None if nothing is sent.
Release = Callable[[Float], tuple[Float, Float] | None]
Index = NDArray[np.int64]

RIDGES = (0.02, 0.2)  # ridges of the whitening, as shares of the mean variance of a feature
CANDIDATES = 300  # candidates of either kind that are tried in one trial at most
# Fewest samples that can be held out, so that half of them still say something of a class.
FEWEST_OUTSIDE = 4
INSIDE = 0.75  # share of the samples that make a space where none are held out
# Splits to learn from and to try on: so many that there are this many candidates, in these bounds.
LEARNT_FROM, LEARNING_SPLITS = 600, (2, 6)
TRIED, TRIALS = 150, (1, 4)


@dataclass(frozen=True)
class Auc:
    """An area under the ROC curve, from 0 to 1, and its standard error; 0.5 is guessing."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class Trial:
    """Scores of members and of others (larger is more like a member), and whose they are."""

    members: Float
    others: Float
    member_ids: Index
    other_ids: Index


def placements(scores: Float, of: Float) -> Float:
    """Return for each score the share of `of` that is below it, ties counting half."""
    ranked = np.sort(of)
    below, upto = (np.searchsorted(ranked, scores, side=side) for side in ("left", "right"))
    return np.asarray((below + upto) / (2 * len(ranked)))


def auc_of(trials: Sequence[Trial]) -> Auc:
    """Return the mean area over some trials; an OptionError if one has scores of one side alone."""
    if not trials or any(not len(t.members) or not len(t.others) for t in trials):
        raise OptionError("an AUC needs scores of members and of others")
    above = [placements(t.members, t.others) for t in trials]
    below = [1 - placements(t.others, t.members) for t in trials]
    variance = _variance_of_mean([t.member_ids for t in trials], above)
    variance += _variance_of_mean([t.other_ids for t in trials], below)
    return Auc(float(np.mean([each.mean() for each in above])), math.sqrt(variance))


def _variance_of_mean(ids: Sequence[Index], values: Sequence[Float]) -> float:
    samples, where = np.unique(np.concatenate(ids), return_inverse=True)
    if len(samples) < 2:
        return 0.25
    means = np.bincount(where, np.concatenate(values)) / np.bincount(where)
    return float(means.var(ddof=1) / len(samples))


# --- what the attacker looks at ---------------------------------------------------------------


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows of a class: mean, eigenvalues and eigenvectors of its covariance."""

    mean: Float
    values: Float
    vectors: Float

    @classmethod
    def of(cls, samples: Float) -> Knowledge:
        """Learn from samples that are not the node's."""
        values, vectors = np.linalg.eigh(np.cov(samples.T, bias=True))
        return cls(samples.mean(axis=0), np.maximum(values, 0), vectors)


def statistics(candidates: Float, sent: tuple[Float, Float], known: Knowledge) -> Float:
    """Return what the attacker looks at, a row per candidate."""
    mean, covariance = sent
    scale = float(known.values.mean())
    spread = np.sqrt(np.maximum(np.diag(covariance), 0))
    expected = (known.vectors * known.values) @ known.vectors.T
    off = candidates - mean
    columns = [
        -np.abs(off / (spread + 0.05 * np.sqrt(scale))).max(axis=1),
        -((np.abs(off) > 0.2 * np.sqrt(scale)) & (spread < 0.005 * np.sqrt(scale))).sum(axis=1),
    ]
    sent_values, sent_vectors = np.linalg.eigh(covariance)
    for ridge in RIDGES:
        # Makes the class nearly round.
        whitening = known.vectors / np.sqrt(known.values + ridge * scale)
        white, white_mean = (candidates - known.mean) @ whitening, (mean - known.mean) @ whitening
        surplus = whitening.T @ (covariance - expected) @ whitening
        fit = -((off @ sent_vectors) ** 2 / (np.maximum(sent_values, 0) + ridge * scale)).sum(1)
        columns += [
            white @ white_mean,
            (white**2).sum(axis=1) - ((white - white_mean) ** 2).sum(axis=1),
            ((white @ surplus) * white).sum(axis=1),
            fit,
            fit + (white**2).sum(axis=1),
        ]
    return np.stack(columns, axis=1)


# Who is behind a space, whom the attacker knows, and who else is tried.
_Split = tuple[Index, Index, Index]
Judge = Callable[[Float], Float]


def _view(pool: Float, split: _Split, sent: tuple[Float, Float]) -> tuple[Float, Index, Index]:
    """Return the statistics of so many candidates on either side, and whose they are."""
    inside, others = split[0][:CANDIDATES], split[2][:CANDIDATES]
    candidates, known = pool[np.concatenate([inside, others])], Knowledge.of(pool[split[1]])
    return statistics(candidates, sent, known), inside, others


def _learnt(pool: Float, splits: Iterator[_Split], release: Release) -> Judge | None:
    """Return how statistics are weighed, learnt on splits; None if nothing is sent of one.

    Who is a member of these splits is independent of who is one in a trial, so no sample is learnt
    by heart.
    """
    tables, truth = [], list[int]()
    for split in splits:
        sent = release(pool[split[0]])
        if sent is None:
            return None
        table, inside, others = _view(pool, split, sent)
        tables.append(table)
        truth += [1] * len(inside) + [0] * len(others)
    model = make_pipeline(
        StandardScaler(), LogisticRegression(C=0.1, max_iter=500, class_weight="balanced")
    )
    judge: Judge = model.fit(np.concatenate(tables), truth).decision_function
    return judge


@dataclass(frozen=True)
class Membership:
    """What came of telling members from others."""

    auc: Auc
    # Behind what was attacked, and held out; the attacker knew one half of the latter at a time.
    samples: int
    others: int
    # Whether it was the space itself that was attacked, or one of fewer samples.
    of_what_is_sent: bool


def attack_membership(
    members: Float,
    held_out: Float,
    sent: tuple[Float, Float],
    release: Release,
    *,
    seed: int = 0,
) -> Membership | None:
    """Try to tell the samples behind a class's moments from others; None if there are too few.

    `members` (n, D) are all samples behind what was sent, `held_out` (m, D) samples of the same
    class that are not; `release` returns what would be sent of other samples.
    """
    generator = np.random.default_rng(seed)
    pool, count = np.concatenate([members, held_out]), len(members)
    is_given = len(held_out) >= 2 * FEWEST_OUTSIDE
    # Without enough held-out samples those that there are join the others.
    size = count if is_given else math.ceil(INSIDE * len(pool))
    outside = len(pool) - size
    if outside < FEWEST_OUTSIDE or size < 2:
        return None

    def drawn(wanted: int, at_once: int, bounds: tuple[int, int]) -> Iterator[_Split]:
        for _ in range(min(bounds[1], max(bounds[0], wanted // at_once))):
            order = generator.permutation(len(pool))
            cut = size + outside // 2
            yield order[:size], order[size:cut], order[cut:]

    judge = _learnt(pool, drawn(LEARNT_FROM, size, LEARNING_SPLITS), release)
    if judge is None:
        return None
    if is_given:
        strangers = generator.permutation(np.arange(count, len(pool)))
        half = outside // 2
        targets = iter([(np.arange(count), strangers[:half], strangers[half:])])
    else:
        targets = drawn(TRIED, outside, TRIALS)
    trials = []
    for inside, one, other in targets:
        made = sent if is_given else release(pool[inside])
        if made is None:
            return None
        for known, tried in ((one, other), (other, one)):
            table, own, strange = _view(pool, (inside, known, tried), made)
            scores = judge(table)
            trials.append(Trial(scores[: len(own)], scores[len(own) :], own, strange))
    return Membership(auc_of(trials), size, outside, is_given)
