"""Groups of training examples: kept with their data, divided as asked, in the 2018 tasks."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.runtime.seeding import derive_seed
from simulations import data
from simulations.config import ConfigError, compose_config
from simulations.data.examples import Dataset, Examples, assemble
from simulations.data.permuted import beside_permuted, pixel_permutation
from simulations.experiment.experiment import Experiment
from simulations.partitions.groups import Groups


def pool_of(count: int, seed: int) -> tuple[Examples, np.ndarray]:
    """Examples whose feature is their position, with three classes, and two groups by position."""
    labels = np.random.default_rng(seed).integers(3, size=count)
    return Examples(np.arange(count)[:, None], labels), (np.arange(count) % 3 == 0).astype(int)


def build(pool: Examples, groups: np.ndarray | None, public: int, seed: int = 0) -> Dataset:
    return assemble(
        "made",
        classes=3,
        scale=1.0,
        pool=pool,
        test=pool,
        public=public,
        seed=seed,
        groups=groups,
    )


# --- a data set's groups --------------------------------------------------------------------------


@given(st.integers(60, 200), st.integers(0, 50), st.integers(0, 1000))
def test_groups_stay_with_their_examples_when_the_public_sample_is_taken_out(
    count: int, public: int, seed: int
) -> None:
    pool, groups = pool_of(count, seed)
    dataset = build(pool, groups, public, seed)
    assert dataset.groups is not None
    np.testing.assert_array_equal(dataset.groups, groups[dataset.train.features[:, 0]])
    assert len(dataset.public) == public


def test_the_public_sample_has_classes_and_groups_in_proportion() -> None:
    """A tenth of 100, 50, 40 and 10 examples in the four cells is 10, 5, 4 and 1."""
    labels, groups = (np.repeat(each, [100, 50, 40, 10]) for each in ([0, 0, 1, 1], [0, 1, 0, 1]))
    dataset = build(Examples(np.arange(200)[:, None], labels), groups, public=20)
    chosen = dataset.public.features[:, 0]
    cells = np.bincount(2 * labels[chosen] + groups[chosen])
    assert cells.tolist() == [10, 5, 4, 1]


def test_without_groups_a_data_set_has_none() -> None:
    assert build(pool_of(60, 0)[0], None, public=6).groups is None
    assert data.graphical(seed=0, examples=50, public=5).groups is None


@pytest.mark.parametrize("groups", [np.zeros(59, int), np.zeros(60), np.full(60, -1)])
def test_groups_that_do_not_fit_the_examples_are_refused(groups: np.ndarray) -> None:
    with pytest.raises(ValueError, match="one group of at least 0 each, 60 whole numbers"):
        build(pool_of(60, 0)[0], groups, public=6)


def test_groups_cannot_be_changed() -> None:
    dataset = build(*pool_of(60, 0), public=6)
    assert dataset.groups is not None
    with pytest.raises(ValueError, match="read-only"):
        dataset.groups[0] = 1


# --- the partition --------------------------------------------------------------------------------


@given(st.integers(1, 5), st.floats(0.2, 1), st.integers(0, 1000))
def test_every_example_goes_to_one_node_and_the_same_seed_divides_alike(
    nodes: int, mixing: float, seed: int
) -> None:
    groups = np.arange(300) % nodes
    labels = np.zeros(300, dtype=int)
    first, again = (
        Groups(mixing)(labels, nodes=nodes, classes=1, seed=seed, groups=groups) for _ in "ab"
    )
    np.testing.assert_array_equal(np.sort(np.concatenate(first)), np.arange(300))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_without_mixing_every_node_holds_its_own_group() -> None:
    groups = np.asarray([2, 0, 1, 1, 0, 2])
    parts = Groups()(np.zeros(6, int), nodes=3, classes=1, seed=0, groups=groups)
    assert [part.tolist() for part in parts] == [[1, 4], [2, 3], [0, 5]]


@pytest.mark.parametrize(("nodes", "mixing"), [(2, 0.5), (2, 0.75), (4, 0.25), (4, 0.4)])
def test_a_node_has_its_share_of_each_group(nodes: int, mixing: float) -> None:
    """Shares of n = 20,000 / nodes are within 4 standard deviations, at most 2 / sqrt(n).

    The node's own group is there with probability γ, each other one with (1 - γ) / (nodes - 1);
    with γ = 1 / nodes all are equal, which is a random division.
    """
    groups = np.arange(20_000) % nodes
    parts = Groups(mixing)(np.zeros(20_000, int), nodes=nodes, classes=1, seed=5, groups=groups)
    shares = np.stack([np.bincount(groups[part], minlength=nodes) for part in parts])
    shares = shares / (20_000 / nodes)
    expected = np.full((nodes, nodes), (1 - mixing) / (nodes - 1))
    np.fill_diagonal(expected, mixing)
    assert np.abs(shares - expected).max() < 2 / np.sqrt(20_000 / nodes)


@pytest.mark.parametrize("mixing", [-0.1, 1.1, float("nan")])
def test_impossible_mixing_is_refused(mixing: float) -> None:
    with pytest.raises(ValueError, match=r"partition\.mixing must be in \[0, 1\]"):
        Groups(mixing)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dataset=digits", "nodes=2"], r"partition=groups: .*no groups.*mnist_permuted"),
        (["dataset=digits_permuted", "nodes=3"], "has 2 groups: set nodes=2, got 3"),
    ],
)
def test_what_cannot_be_divided_by_groups_is_the_configs_fault(
    overrides: list[str], words: str
) -> None:
    experiment = Experiment(compose_config(["partition=groups", *overrides]))
    with pytest.raises(ConfigError, match=words):
        _ = experiment.shares


def test_an_experiment_gives_each_node_its_group() -> None:
    """All permuted copies are on node 1: put back, its images are those of node 0."""
    experiment = Experiment(
        compose_config(["experiment=gems2018_mnist", "dataset=digits_permuted", "seed=3"])
    )
    both = [
        Examples.concatenate([share.train, share.validation]).features.reshape(-1, 64)
        for share in experiment.shares
    ]
    order = pixel_permutation((1, 8, 8), derive_seed(3, "data"))
    back = np.empty_like(both[1])
    back[:, order] = both[1]
    assert sorted(map(bytes, both[0])) == sorted(map(bytes, back))


def test_partitions_by_label_still_divide_data_with_groups() -> None:
    config = compose_config(["dataset=digits_permuted", "partition=labels", "nodes=2"])
    held = [set(share.train.labels.tolist()) for share in Experiment(config).shares]
    assert held == [set(range(5)), set(range(5, 10))]


# --- permuted copies ------------------------------------------------------------------------------


def test_permuting_back_gives_the_originals_in_every_part() -> None:
    dataset = data.digits_permuted(seed=4)
    order = pixel_permutation((1, 8, 8), 4)
    assert not np.array_equal(order, np.arange(64))
    parts = {
        "train": (dataset.train, dataset.groups == 0),
        "public": (dataset.public, np.arange(200) % 2 == 0),
        "test": (dataset.test, np.arange(len(dataset.test)) < len(dataset.test) // 2),
    }
    for name, (part, is_original) in parts.items():
        flat = part.features.reshape(len(part), -1)
        back = np.empty_like(flat[~is_original])
        back[:, order] = flat[~is_original]
        np.testing.assert_array_equal(back, flat[is_original], err_msg=name)
        np.testing.assert_array_equal(part.labels[is_original], part.labels[~is_original])


def test_the_originals_are_the_plain_data_set() -> None:
    plain, pair = data.digits(seed=0, public=100), data.digits_permuted(seed=0, public=200)
    half = len(plain.test)
    np.testing.assert_array_equal(pair.test.features[:half], plain.test.features)
    np.testing.assert_array_equal(pair.train.features[pair.groups == 0], plain.train.features)
    np.testing.assert_array_equal(pair.public.features[::2], plain.public.features)


def test_another_seed_draws_another_permutation() -> None:
    assert not np.array_equal(pixel_permutation((1, 8, 8), 0), pixel_permutation((1, 8, 8), 1))


def test_fewer_examples_are_as_many_of_each_group_and_leave_the_test_set_alone() -> None:
    small = data.digits_permuted(seed=0, examples=300)
    assert np.bincount(small.groups).tolist() == [150, 150]
    assert len(small.test) == len(data.digits_permuted(seed=0).test)
    counts = small.train.class_counts(10)
    assert counts.sum() == 300
    assert counts.min() >= 26  # a tenth is 30; the rarest digit is 9.7 % of the images


def test_colour_images_are_permuted_over_all_channels() -> None:
    """Every value of the image occurs once, so a copy has all of them, across channels."""
    image = np.arange(12).reshape(1, 3, 2, 2)
    part = Examples(np.repeat(image, 4, axis=0), np.zeros(4, int))
    base = Dataset("made", 1, (3, 2, 2), 1.0, part, part.take([]), part)
    pair = beside_permuted(base, name="pair", public=2, examples=None, seed=1)
    copy = pair.public.features[1]
    assert sorted(copy.ravel()) == list(range(12))
    assert {tuple(sorted(c.ravel())) for c in copy} != {tuple(c.ravel()) for c in image[0]}


@pytest.mark.parametrize("options", [{"public": 3}, {"public": 2876}, {"examples": 0}])
def test_sizes_that_are_odd_or_out_of_range_are_refused(options: dict[str, int]) -> None:
    """1,438 training images make 2,876 with copies, two of which must be left to the nodes."""
    with pytest.raises(ValueError, match="must be an even number from"):
        data.digits_permuted(seed=0, **options)


# --- parity ---------------------------------------------------------------------------------------


def test_labels_are_parities_and_groups_are_halves_or_parities() -> None:
    plain = data.digits(seed=0)
    halves, parity = (data.digits_parity(seed=0, division=d) for d in ("halves", "parity"))
    for dataset in (halves, parity):
        assert (dataset.classes, dataset.input_shape) == (2, (50,))
        for part in ("train", "public", "test"):
            digit = getattr(plain, part).labels
            np.testing.assert_array_equal(getattr(dataset, part).labels, digit % 2)
    np.testing.assert_array_equal(halves.groups, plain.train.labels >= 5)
    np.testing.assert_array_equal(parity.groups, plain.train.labels % 2)


def test_parity_features_are_relu_outputs_that_tell_even_from_odd() -> None:
    """An independent logistic regression on them is far above the .5 of guessing."""
    from sklearn.linear_model import LogisticRegression

    dataset = data.digits_parity(seed=0)
    assert dataset.train.features.min() == 0
    assert dataset.train.features.dtype == np.float32
    judge = LogisticRegression(max_iter=1000).fit(dataset.train.features, dataset.train.labels)
    assert judge.score(dataset.test.features, dataset.test.labels) > 0.9


def test_parity_features_come_from_the_public_sample_alone() -> None:
    """Other data on the nodes leave the features of the public and test images as they were."""
    from simulations.data.parity import parity_of

    plain = data.digits(seed=0)
    kept = np.arange(len(plain.train)) % 2 == 0
    fewer = Dataset(
        "fewer",
        10,
        plain.input_shape,
        plain.scale,
        plain.train.take(np.flatnonzero(kept)),
        plain.public,
        plain.test,
    )
    whole, half = (
        parity_of(base, name="made", division="halves", features=50, seed=0)
        for base in (plain, fewer)
    )
    np.testing.assert_array_equal(whole.test.features, half.test.features)
    np.testing.assert_allclose(whole.train.features[kept], half.train.features, atol=1e-5)


def test_the_same_seed_gives_the_same_parity_features() -> None:
    from simulations.data.parity import _digits_parity

    first = data.digits_parity(seed=2)
    _digits_parity.cache_clear()
    again, other = data.digits_parity(seed=2), data.digits_parity(seed=3)
    assert again is not first
    np.testing.assert_array_equal(first.train.features, again.train.features)
    assert not np.array_equal(first.train.features, other.train.features)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"public": 0}, "public must be at least 1"),
        ({"division": "thirds"}, "halves or parity"),
        ({"features": 0}, "features must be"),
    ],
)
def test_impossible_parity_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        data.digits_parity(seed=0, **options)


# --- tweets ---------------------------------------------------------------------------------------


@pytest.fixture
def tweet_folder(tmp_path: Path) -> Path:
    """400 tweets of three out of forty words, of which every training tweet has one in common."""
    path = tmp_path / "twitter" / "tweet_sentiment_extraction_27k.tsv.gz"
    path.parent.mkdir()
    rng = np.random.default_rng(0)
    lines = [
        f"{i}\t{('negative', 'positive')[i % 2]}\tcommon "
        + " ".join(f"word{w}" for w in rng.choice(40, 3, replace=False))
        for i in range(400)
    ]
    path.write_bytes(gzip.compress("\n".join(["id\tsentiment\ttext", *lines, ""]).encode()))
    return tmp_path


def test_tweets_are_grouped_by_whether_they_contain_some_terms(tweet_folder: Path) -> None:
    """There must be terms that all of group 0 have one of and nobody of group 1 has."""
    dataset = data.tweets(data_dir=tweet_folder, seed=0, public=40, group_share=0.5)
    assert dataset.groups is not None
    contains = dataset.train.features > 0
    only_in_first = ~contains[dataset.groups == 1].any(axis=0)
    assert contains[dataset.groups == 0][:, only_in_first].any(axis=1).all()
    # A word is in about 7.5 % of the tweets, so the share is met to less than that, from below.
    assert 0.42 < (dataset.groups == 0).mean() <= 0.51


def test_tweets_have_groups_only_if_asked_and_are_otherwise_the_same(tweet_folder: Path) -> None:
    plain, grouped = (
        data.tweets(data_dir=tweet_folder, seed=0, public=0, group_share=share)
        for share in (None, 0.3)
    )
    assert plain.groups is None
    np.testing.assert_array_equal(plain.train.features, grouped.train.features)


def test_groups_of_tweets_follow_the_seed_of_the_terms(tweet_folder: Path) -> None:
    from simulations.data.vectors import _groups_by_terms

    weights = data.tweets(data_dir=tweet_folder, seed=0, public=0).train.features
    first, again, other = (_groups_by_terms(weights, 0.5, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_share_that_no_term_is_rare_enough_for_is_refused(tweet_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"raise dataset\.group_share"):
        data.tweets(data_dir=tweet_folder, seed=0, public=0, group_share=0.001)
    with pytest.raises(ValueError, match=r"group_share must be in \(0, 1\)"):
        data.tweets(data_dir=tweet_folder, seed=0, public=0, group_share=1.0)


# --- the experiments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dataset", "hidden"),
    [
        ("shallow", "mnist_parity", None),
        ("mnist", "mnist_permuted", [50]),
        ("mnist_deep", "mnist_permuted", [50, 50]),
        ("tweets", "tweets_by_terms", [50]),
        ("tweets_deep", "tweets_by_terms", [50, 50]),
    ],
)
@pytest.mark.parametrize("strategy", ["gems", "gems_layerwise", "local", "one_shot_average"])
def test_the_2018_papers_experiments_compose_with_every_one_shot_strategy(
    name: str, dataset: str, hidden: list[int] | None, strategy: str
) -> None:
    config = compose_config([f"experiment=gems2018_{name}", f"strategy={strategy}"])
    assert config.names["strategy"] == strategy
    assert (config.names["dataset"], config.names["partition"]) == (dataset, "groups")
    assert config.model.get("hidden") == hidden
    assert (config.nodes, config.own_initial_weights) == (2, True)
    # As long as the paper's references took; the logistic model is trained until it is done.
    schedule = (40, 3) if name == "shallow" else (1, None)
    assert (config.train["epochs"], config.train["patience"]) == schedule
    assert config.dataset.get("group_share") == (0.5 if dataset == "tweets_by_terms" else None)
