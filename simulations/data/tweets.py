"""Tweets as bags of words, in two groups if wanted."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.core.run import generator
from simulations.data.archives import data_file, kept_in_memory
from simulations.data.examples import Dataset, Examples, assemble
from simulations.data.images import check_fraction
from simulations.data.splits import split_validation

_FILE = "twitter/tweet_sentiment_extraction_27k.tsv.gz"
_SENTIMENTS = {"negative": 0, "positive": 1}


@kept_in_memory
def tweets(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 1000,
    test_fraction: float = 0.2,
    terms: int = 1000,
    group_share: float | None = None,
) -> Dataset:
    """Load tweets labelled negative (0) or positive (1), as TF-IDF weights of frequent terms.

    Neutral tweets are left out. Terms and their weights are learned from the training tweets
    (the nodes' and the public ones), never from the test tweets: the vocabulary is taken to be
    agreed upon beforehand.

    With ``group_share``, tweets are in group 0 if they contain any of some random terms, else in
    group 1 (Guha 2018, Section 5.2). The paper does not say how many terms; a number would
    mean little, since one term is in a third of the tweets and most are in one of 200. Here terms
    are drawn one by one until group 0 has its share; one that would exceed it is passed over.

    Parameters
    ----------
    data_dir, seed, public
        See `simulations.data`; the file is ``twitter/tweet_sentiment_extraction_27k.tsv.gz``.
    test_fraction : float
        Share of all tweets held out for testing, 0 < fraction < 1.
    terms : int
        Number of features, at least 1: the most frequent terms of the training tweets.
    group_share : float or None
        Share of the training tweets in group 0, 0 < share < 1, met to a hundredth if terms allow;
        None: no groups.
    """
    check_fraction("test_fraction", test_fraction)
    if not isinstance(terms, int) or terms < 1:
        raise ValueError(f"dataset.terms must be a whole number of at least 1, got {terms!r}")
    if group_share is not None:
        check_fraction("group_share", group_share)
    from sklearn.feature_extraction.text import TfidfVectorizer  # late, see images

    texts, labels = _read(data_file(data_dir, _FILE, "tweets"))
    training, testing = split_validation(labels, test_fraction, seed)
    vectorizer = TfidfVectorizer(max_features=terms, dtype=np.float32)
    # Dense rows: a thousand columns are small, and models take dense input.
    pool = vectorizer.fit_transform([texts[i] for i in training]).toarray()
    test = vectorizer.transform([texts[i] for i in testing]).toarray()
    return assemble(
        "tweets",
        classes=2,
        scale=1.0,
        pool=Examples(pool, labels[training]),
        test=Examples(test, labels[testing]),
        public=public,
        seed=seed,
        groups=None if group_share is None else _groups_by_terms(pool, group_share, seed),
    )


def _groups_by_terms(weights: NDArray[Any], share: float, seed: int) -> NDArray[np.int64]:
    """Return 0 for the rows that contain one of some random terms, which are a share, else 1."""
    contains = weights > 0
    covered = np.zeros(len(contains), dtype=bool)
    for term in generator(seed, "group-terms").permutation(contains.shape[1]):
        wider = covered | contains[:, term]
        if wider.mean() <= share:
            covered = wider
        if covered.mean() > share - 0.01:
            break
    if not covered.any():
        raise ValueError(
            f"every term is in more than {share} of the tweets: raise dataset.group_share"
        )
    return np.where(covered, 0, 1)


def _read(path: Path) -> tuple[list[str], NDArray[np.int64]]:
    """Read the negative and positive tweets of a tab-separated file with a header."""
    texts: list[str] = []
    labels: list[int] = []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as stream:
        # Not csv.reader: quotation marks and apostrophes in tweets are text, not syntax.
        header = next(stream, "").rstrip("\r\n").split("\t")
        if header != ["id", "sentiment", "text"]:
            raise ValueError(f"{path} must have the columns id, sentiment, text, got {header}")
        for number, line in enumerate(stream, start=2):
            columns = line.rstrip("\r\n").split("\t")
            if len(columns) != 3:
                raise ValueError(f"{path}, line {number}: expected 3 columns, got {len(columns)}")
            if columns[1] in _SENTIMENTS:
                labels.append(_SENTIMENTS[columns[1]])
                texts.append(columns[2])
    return texts, np.asarray(labels, dtype=np.int64)
