"""Data sets: what is in them, what is kept apart, and what is said when files are missing."""

import gzip
import os
import struct

import numpy as np
import pytest
from helpers_driving import SIDE, write_tracks
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.targets import Numbers
from simulations import data
from simulations.data import (
    Dataset,
    Examples,
    MissingDataError,
    apportion,
    assemble,
    driving,
    own,
    read_own_data,
    split_validation,
)
from simulations.data.digit_groups import pixel_permutation
from simulations.data.driving import split_track
from simulations.data.examples import balance_classes
from simulations.data.tweets import _groups_by_terms

FROM_FILES = [
    *("mnist", "parity", "permuted", "fashion_mnist", "cifar10_features"),
    *("ham10000_features", "tweets", "driving", "glyphs"),
]


def examples(labels):
    """Examples whose only feature is their position, so that they can be told apart."""
    return Examples(np.arange(len(labels))[:, None], np.asarray(labels))


def rows(part):
    return [row.tobytes() for row in part.features]


# --- examples, and their parts ----------------------------------------------------------------


def test_classes_and_numbers_are_not_mixed_up():
    for count, labels, words in (
        (2, [0.5, 1.5], "labels must be classes"),
        (0, [0, 1], "labels are finite numbers"),
        (0, [0.5, np.nan], "with 1 that are not finite"),
    ):
        part = Examples(np.zeros((2, 3)), np.array(labels))
        with pytest.raises(ValueError, match=words):
            Dataset("made", count, (3,), 1.0, part, part, part)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 500))
def test_apportioned_items_sum_to_the_total_and_miss_the_exact_share_by_less_than_one(
    weights, total
):
    """The quota rule of the largest remainder method."""
    counts = apportion(np.asarray(weights), total)
    assert counts.sum() == total
    exact = np.asarray(weights) * total / sum(weights)
    assert np.all(np.abs(counts - exact) < 1 + 1e-6)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 0.99), st.integers(0, 2**32)
)
def test_validation_split_is_a_partition_and_every_class_keeps_a_training_example(
    labels, fraction, seed
):
    array = np.asarray(labels)
    training, validation = split_validation(array, fraction, seed)
    assert sorted([*training, *validation]) == list(range(len(labels)))
    assert set(array[training]) == set(labels)
    repeated = len(set(labels)) < len(labels)
    assert (len(validation) > 0) == (fraction > 0 and repeated)
    np.testing.assert_array_equal(validation, split_validation(array, fraction, seed)[1])


def test_balanced_classes_are_equally_many_and_rare_examples_count_alike():
    """Class 1 has 3 of 103 examples: each comes 16 or 17 times; class 0 has no repetition."""
    whole = Examples(np.arange(103, dtype=np.float32)[:, None], np.array([0] * 100 + [1] * 3))
    dataset = Dataset("d", 2, (1,), 1.0, train=whole, public=whole.take([0, 1, 2, 100]), test=whole)
    even = balance_classes(dataset, 50, seed=3)
    assert even.train.class_counts(2).tolist() == [50, 50]
    frequent, rare = even.train.take(np.arange(50)), even.train.take(np.arange(50, 100))
    assert len(np.unique(frequent.features)) == 50
    assert sorted(np.unique(rare.features, return_counts=True)[1].tolist()) == [16, 17, 17]
    assert even.public.class_counts(2).tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"dataset\.balance must be at least 1"):
        balance_classes(dataset, 0, seed=3)


def build(labels, groups, public, seed=0):
    pool = examples(labels)
    return assemble(
        "made", classes=3, scale=1.0, pool=pool, test=pool, public=public, seed=seed, groups=groups
    )


@given(st.integers(60, 200), st.integers(0, 50), st.integers(0, 1000))
def test_groups_stay_with_their_examples_when_the_public_sample_is_taken_out(count, public, seed):
    labels = np.random.default_rng(seed).integers(3, size=count)
    groups = (np.arange(count) % 3 == 0).astype(int)
    dataset = build(labels, groups, public, seed)
    np.testing.assert_array_equal(dataset.groups, groups[dataset.train.features[:, 0]])
    assert len(dataset.public) == public


def test_the_public_sample_has_classes_and_groups_in_proportion():
    """A tenth of 100, 50, 40 and 10 examples in the four cells is 10, 5, 4 and 1."""
    labels, groups = (np.repeat(each, [100, 50, 40, 10]) for each in ([0, 0, 1, 1], [0, 1, 0, 1]))
    chosen = build(labels, groups, public=20).public.features[:, 0]
    assert np.bincount(2 * labels[chosen] + groups[chosen]).tolist() == [10, 5, 4, 1]
    for wrong in (np.zeros(199, int), np.zeros(200), np.full(200, -1)):
        with pytest.raises(ValueError, match="one group of at least 0 each, 200 whole numbers"):
            build(labels, wrong, public=6)


# --- digits, and MNIST's format ----------------------------------------------------------------


def check(dataset):
    """What holds for every data set of classes."""
    for part in (dataset.train, dataset.public, dataset.test):
        assert part.features.shape[1:] == dataset.input_shape
        assert set(np.unique(part.labels)) == set(range(dataset.classes))
        assert np.isfinite(part.features.astype(np.float32)).all()


def test_digits_need_no_files_and_use_all_images_once(monkeypatch):
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    dataset = data.digits(data_dir=None, seed=3)
    check(dataset)
    assert dataset.input_shape == (1, 8, 8)
    assert (dataset.train.features * dataset.scale).max() == 1.0
    # All 1,797 images of scikit-learn's set are different: sets of rows show who has what.
    parts = [set(rows(part)) for part in (dataset.train, dataset.public, dataset.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 1797
    assert rows(data.digits(seed=4).public) != rows(dataset.public)


def write_idx(path, array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


@pytest.fixture
def tiny_mnist(tmp_path):
    """A data folder with a packed MNIST of 30 + 10 images, that cannot be written to."""
    raw = tmp_path / "MNIST" / "raw"
    for prefix, count in (("train", 30), ("t10k", 10)):
        images = np.arange(count)[:, None, None] * np.ones((1, 28, 28))
        write_idx(raw / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    raw.chmod(0o555)
    yield tmp_path
    raw.chmod(0o755)


def test_packed_mnist_is_read_once_from_a_folder_that_cannot_be_written(tiny_mnist, monkeypatch):
    before = sorted(tiny_mnist.rglob("*"))
    dataset = data.mnist(data_dir=tiny_mnist, seed=0, public=10)
    check(dataset)
    assert (len(dataset.train), len(dataset.public), len(dataset.test)) == (20, 10, 10)
    np.testing.assert_array_equal(dataset.test.features[:, 0, 0, 0], np.arange(10))
    np.testing.assert_array_equal(dataset.train.features[:, 0, 5, 5] % 10, dataset.train.labels)
    assert sorted(tiny_mnist.rglob("*")) == before
    assert data.mnist(data_dir=tiny_mnist, seed=0, public=10) is dataset
    monkeypatch.setenv(data.DATA_VARIABLE, str(tiny_mnist))
    assert len(data.mnist(data_dir=None, seed=0, public=5).train) == 25


@pytest.mark.parametrize("name", FROM_FILES)
def test_missing_files_and_folders_are_named_in_one_sentence(name, tmp_path, monkeypatch):
    with pytest.raises(MissingDataError) as caught:
        getattr(data, name)(data_dir=tmp_path, seed=0)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "data_dir" in message
    assert data.DATA_VARIABLE in message
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    with pytest.raises(MissingDataError, match=rf"data_dir=.*{data.DATA_VARIABLE}"):
        getattr(data, name)(data_dir=None, seed=0)


def test_ham10000_keeps_the_files_own_split(tmp_path):
    (tmp_path / "HAM10000").mkdir()
    np.savez(
        tmp_path / "HAM10000" / "ham10000_efficientnet_lite0_96px_320d_f16.npz",
        features=np.arange(70)[:, None] * np.ones((1, 320), np.float16),
        labels=np.arange(70) % 7,
        split=np.repeat([0, 1, 2], [42, 14, 14]),
    )
    dataset = data.ham10000_features(data_dir=tmp_path, seed=0, public=14)
    check(dataset)
    assert dataset.input_shape == (320,)
    assert dataset.test.features[:, 0].tolist() == list(range(56, 70))
    held = [part.features[:, 0].tolist() for part in (dataset.train, dataset.public)]
    assert sorted(held[0] + held[1]) == list(range(56))


def test_glyphs_of_a_font_family_stay_together_in_a_group(tmp_path):
    """Three images of each of 12 families in 5 groups, two or three families to a group."""
    families, images = np.repeat(np.arange(12), 3), np.zeros((36, 28, 28), np.uint8)
    keys = [f"{part}_{what}" for part in ("train", "test") for what in ("images", "labels")]
    (tmp_path / "glyphs").mkdir()
    arrays = dict(zip(keys, [images, np.arange(36)] * 2, strict=True))
    np.savez(tmp_path / "glyphs" / "glyphs.npz", train_family=families, **arrays)
    group_of = data.glyphs(data_dir=tmp_path, seed=1, families=5).groups.reshape(12, 3)
    assert (group_of == group_of[:, :1]).all()
    assert sorted(np.bincount(group_of[:, 0])) == [2, 2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"dataset\.families must be at least 1, got 0"):
        data.glyphs(data_dir=tmp_path, seed=1, families=0)


# --- digits in two groups ----------------------------------------------------------------------


def test_permuting_back_gives_the_originals_in_every_part():
    dataset = data.permuted(seed=4, base="digits", public=200)
    plain, order = data.digits(seed=4, public=100), pixel_permutation((1, 8, 8), 4)
    assert not np.array_equal(order, pixel_permutation((1, 8, 8), 5))
    originals = {
        "train": dataset.groups == 0,
        "public": np.arange(200) % 2 == 0,
        "test": np.arange(len(dataset.test)) < len(dataset.test) // 2,
    }
    for name, is_original in originals.items():
        part = getattr(dataset, name)
        original, flat = part.features[is_original], part.features.reshape(len(part), -1)
        assert np.array_equal(flat[~is_original], flat[is_original][:, order]), name
        np.testing.assert_array_equal(part.labels[is_original], part.labels[~is_original])
        np.testing.assert_array_equal(original, getattr(plain, name).features)


def test_parity_features_are_relu_outputs_that_tell_even_from_odd():
    """An independent logistic regression on them is far above the .5 of guessing."""
    from sklearn.linear_model import LogisticRegression

    plain = data.digits(seed=0)
    halves, parity = (
        data.parity(seed=0, base="digits", public=200, division=d) for d in ("halves", "parity")
    )
    for dataset in (halves, parity):
        assert (dataset.classes, dataset.input_shape) == (2, (50,))
        np.testing.assert_array_equal(dataset.test.labels, plain.test.labels % 2)
    np.testing.assert_array_equal(halves.groups, plain.train.labels >= 5)
    np.testing.assert_array_equal(parity.groups, plain.train.labels % 2)
    judge = LogisticRegression(max_iter=1000).fit(halves.train.features, halves.train.labels)
    assert judge.score(halves.test.features, halves.test.labels) > 0.9


# --- tweets ------------------------------------------------------------------------------------


def write_tweets(folder, texts, sentiments=("negative", "positive")):
    path = folder / "twitter" / "tweet_sentiment_extraction_27k.tsv.gz"
    path.parent.mkdir()
    lines = [f"{i}\t{sentiments[i % len(sentiments)]}\t{text}" for i, text in enumerate(texts)]
    path.write_bytes(gzip.compress("\n".join(["id\tsentiment\ttext", *lines, ""]).encode()))
    return folder


def test_tweets_are_vectorised_with_terms_of_training_tweets_only(tmp_path):
    """Each tweet has a word of its own; those of the 4 test tweets must not become terms."""
    texts = [f'"common word{i}' for i in range(30)]
    write_tweets(tmp_path, texts, ("negative", "positive", "neutral"))
    dataset = data.tweets(data_dir=tmp_path, seed=0, public=4, terms=1000)
    check(dataset)
    assert (len(dataset.train), len(dataset.public), len(dataset.test)) == (12, 4, 4)
    assert dataset.input_shape == (16 + 1,)
    # Only the common word of a test tweet is known, so its unit-length vector is one 1.
    assert np.sort(dataset.test.features, axis=1)[:, -2:].tolist() == [[0, 1]] * 4
    assert dataset.groups is None


def test_tweets_are_grouped_by_whether_they_contain_some_terms(tmp_path):
    """There are terms that all of group 0 have one of and none of group 1 has."""
    rng = np.random.default_rng(0)
    words = [rng.choice(40, 3, replace=False) for _ in range(400)]
    write_tweets(tmp_path, ["common " + " ".join(f"word{w}" for w in ws) for ws in words])
    dataset = data.tweets(data_dir=tmp_path, seed=0, public=40, group_share=0.5)
    contains = dataset.train.features > 0
    only_in_first = ~contains[dataset.groups == 1].any(axis=0)
    assert contains[dataset.groups == 0][:, only_in_first].any(axis=1).all()
    # A word is in about 7.5 % of the tweets, so the share is met to less than that, from below.
    assert 0.42 < (dataset.groups == 0).mean() <= 0.51
    weights = dataset.train.features
    first, again, other = (_groups_by_terms(weights, 0.5, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    for share, complaint in ((0.001, r"raise dataset\.group_share"), (1.0, r"in \(0, 1\)")):
        with pytest.raises(ValueError, match=complaint):
            data.tweets(data_dir=tmp_path, seed=0, public=0, group_share=share)


# --- driving, whose labels are numbers ----------------------------------------------------------


def test_driving_labels_are_numbers_and_the_images_have_the_size_of_the_files(tmp_path):
    dataset = driving(data_dir=write_tracks(tmp_path), seed=0, public=9)
    assert dataset.target == Numbers()
    assert dataset.input_shape == (1, SIDE, SIDE)
    assert dataset.train.labels.dtype == np.float32
    # 40 frames, 20 in each direction: two held out at the end, and a gap of (20 - 2) // 4 before.
    assert len(dataset.test) == 3 * 2 * 2
    assert len(dataset.train) == 3 * 2 * (20 - 2 - 4) - 9
    assert np.bincount(dataset.groups).tolist() == [25, 25, 25]
    assert driving(data_dir=tmp_path, seed=0, public=9) is dataset
    write_tracks(tmp_path, frames=60)
    assert len(driving(data_dir=tmp_path, seed=0, public=9).train) > len(dataset.train)


def test_what_is_held_out_is_the_end_of_each_direction_with_a_second_between():
    train, test = split_track(4800, 0.1)
    assert test.tolist() == [*range(2160, 2400), *range(4560, 4800)]
    assert train.tolist() == [*range(2135), *range(2400, 4535)]
    with pytest.raises(ValueError, match=r"lower dataset\.test_fraction"):
        split_track(4, 0.9)


# --- a node's own data --------------------------------------------------------------------------

FEATURES = np.eye(6, 4, dtype=np.float32)
LABELS = np.arange(6) % 3


@pytest.mark.parametrize(
    ("features", "labels", "complaint"),
    [
        (FEATURES[:, :3], LABELS, r"shape \(6, 3\), expected rows of \(4,\)"),
        (FEATURES[:0], LABELS[:0], r"shape \(0, 4\)"),
        (FEATURES * np.nan, LABELS, "NaN or infinity"),
        (FEATURES, LABELS + 3, "labels must be 0 … 2"),
        (FEATURES, LABELS + 0.5, "labels whole numbers"),
        (FEATURES, LABELS[:-1], "one row of features per label"),
    ],
)
def test_a_file_with_something_else_is_refused_by_name(features, labels, complaint, tmp_path):
    described = own(input_shape=[4], classes=3)
    with pytest.raises(MissingDataError, match=r"there is no .*data\.npz.*'features'"):
        read_own_data(tmp_path, described)
    np.savez(tmp_path / "data.npz", features=features, labels=labels)
    with pytest.raises(ValueError, match=rf"data\.npz: .*{complaint}"):
        read_own_data(tmp_path, described)


# --- real files -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("mnist", (55000, 5000, 10000), (1, 28, 28)),
        ("cifar10_features", (45000, 5000, 10000), (320,)),
        ("ham10000_features", (7007, 1000, 2008), (320,)),
        ("tweets", (12090, 1000, 3273), (1000,)),
    ],
)
def test_real_data_have_the_published_sizes(name, sizes, shape):
    """Sizes are the published ones less the default public sample; a fifth of tweets is tested."""
    if not os.environ.get(data.DATA_VARIABLE):
        pytest.skip(f"real data are not there: {data.DATA_VARIABLE} is not set")
    dataset = getattr(data, name)(seed=0)
    check(dataset)
    assert (len(dataset.train), len(dataset.public), len(dataset.test)) == sizes
    assert dataset.input_shape == shape
