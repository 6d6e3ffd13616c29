"""Data sets of feature vectors: image features of a fixed network, and bags of words.

The image features are used as they are stored, with ``scale = 1``; standardising each feature
needs the pooled means and variances, which nodes cannot have without communication. What that
costs was measured with pooled logistic regression on the whole training part (scikit-learn, C = 1,
at most 200 iterations), test accuracy:

================  ====  ==========  ===========  ============
features          raw   scaled 0.5  scaled 0.1   standardised
================  ====  ==========  ===========  ============
CIFAR-10          .647  .647        not run      .647
HAM10000          .722  .723        .741         .725
HAM, balanced     .420  .416        .417         .429
================  ====  ==========  ===========  ============

CIFAR-10 needs no preparation. On HAM10000 a small scale helps a little, as stronger regularisation
would; the constant was not tuned to it, since these are test figures.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.runtime.seeding import generator
from simulations.data.archives import data_file, data_folder, read_arrays
from simulations.data.examples import Dataset, Examples, assemble
from simulations.data.examples import balance as balance_classes
from simulations.data.images import HAM10000_CLASSES, by_split_column
from simulations.data.splits import split_validation

_CACHED = 2
_CIFAR10_FILE = "CIFAR10/cifar10_efficientnet_lite0_32px_320d_f16.npz"
_HAM10000_FILE = "HAM10000/ham10000_efficientnet_lite0_96px_320d_f16.npz"
_TWEETS_FILE = "twitter/tweet_sentiment_extraction_27k.tsv.gz"
_SENTIMENTS = {"negative": 0, "positive": 1}


def cifar10_features(
    *, data_dir: str | Path | None = None, seed: int, public: int = 5000
) -> Dataset:
    """Load CIFAR-10 as 320 features per image of an EfficientNet-Lite0 trained on ImageNet.

    The GEMS paper (Appendix B.1) used features of VGG-16: the same kind of task, other numbers.

    Parameters
    ----------
    data_dir : str or Path or None
        Folder that holds ``CIFAR10/cifar10_efficientnet_lite0_32px_320d_f16.npz``; None means the
        one named by ``GEMS_FLWR_DATA``.
    seed : int
        Decides the public sample; at least 0.
    public : int
        Size of the server's public sample, 0 … 49,999.

    Raises
    ------
    MissingDataError
        If the file is not there.
    ValueError
        If ``public`` is out of range.
    """
    return _cifar10_features(data_folder(data_dir, "cifar10_features"), seed, public)


def ham10000_features(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 1000,
    balance: int | None = None,
) -> Dataset:
    """Load HAM10000 as 320 features per image of an EfficientNet-Lite0 trained on ImageNet.

    Rows, split and caveats as in `simulations.data.images.ham10000`.

    Parameters
    ----------
    data_dir : str or Path or None
        Folder that holds ``HAM10000/ham10000_efficientnet_lite0_96px_320d_f16.npz``; None means
        the one named by ``GEMS_FLWR_DATA``.
    seed : int
        Decides the public sample; at least 0.
    public : int
        Size of the server's public sample, 0 … 8,006.
    balance : int or None
        Training examples of every class, by repetition of the rare ones; None: as they are. The
        GEMS paper has 2,000, by random transformations of the images, which features do not allow.

    Raises
    ------
    MissingDataError
        If the file is not there.
    ValueError
        If ``public`` or ``balance`` is out of range.
    """
    loaded = _ham10000_features(data_folder(data_dir, "ham10000_features"), seed, public)
    return loaded if balance is None else balance_classes(loaded, balance, seed)


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
    data_dir : str or Path or None
        Folder that holds ``twitter/tweet_sentiment_extraction_27k.tsv.gz``; None means the one
        named by ``GEMS_FLWR_DATA``.
    seed : int
        Decides the test and public samples; at least 0.
    public : int
        Size of the server's public sample.
    test_fraction : float
        Share of all tweets held out for testing, 0 < fraction < 1.
    terms : int
        Number of features, at least 1: the most frequent terms of the training tweets.
    group_share : float or None
        Share of the training tweets in group 0, 0 < share < 1, met to a hundredth if terms allow;
        None: no groups.

    Raises
    ------
    MissingDataError
        If the file is not there.
    ValueError
        If an option is out of range, or the file has another format.
    """
    folder = data_folder(data_dir, "tweets")
    return _tweets(folder, seed, public, test_fraction, terms, group_share)


@functools.lru_cache(maxsize=_CACHED)
def _cifar10_features(folder: Path, seed: int, public: int) -> Dataset:
    path = data_file(folder, _CIFAR10_FILE, "cifar10_features")
    x_train, y_train, x_test, y_test = read_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    return assemble(
        "cifar10_features",
        classes=10,
        scale=1.0,
        pool=Examples(x_train, y_train),
        test=Examples(x_test, y_test),
        public=public,
        seed=seed,
    )


@functools.lru_cache(maxsize=_CACHED)
def _ham10000_features(folder: Path, seed: int, public: int) -> Dataset:
    path = data_file(folder, _HAM10000_FILE, "ham10000_features")
    features, labels, split = read_arrays(path, ("features", "labels", "split"))
    pool, test = by_split_column(features, labels, split)
    return assemble(
        "ham10000_features",
        classes=HAM10000_CLASSES,
        scale=1.0,
        pool=pool,
        test=test,
        public=public,
        seed=seed,
    )


@functools.lru_cache(maxsize=_CACHED)
def _tweets(
    folder: Path,
    seed: int,
    public: int,
    test_fraction: float,
    terms: int,
    group_share: float | None,
) -> Dataset:
    if not 0 < test_fraction < 1:
        raise ValueError(f"dataset.test_fraction must be in (0, 1), got {test_fraction}")
    if not isinstance(terms, int) or terms < 1:
        raise ValueError(f"dataset.terms must be a whole number of at least 1, got {terms!r}")
    if group_share is not None and not 0 < group_share < 1:
        raise ValueError(f"dataset.group_share must be in (0, 1), or null, got {group_share}")
    from sklearn.feature_extraction.text import TfidfVectorizer  # late, see images

    texts, labels = _read_tweets(data_file(folder, _TWEETS_FILE, "tweets"))
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


def _read_tweets(path: Path) -> tuple[list[str], np.ndarray]:
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
