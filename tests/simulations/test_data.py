"""Data sets: what is in them, what is kept apart, and what is said when files are missing."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from simulations import data
from simulations.data.archives import MissingDataError, read_idx
from simulations.data.examples import Dataset, Examples, balance
from simulations.data.splits import apportion, split_validation

CONF = Path(__file__).parents[2] / "conf" / "dataset"
FROM_FILES = [
    "mnist",
    "mnist_parity",
    "mnist_permuted",
    "fashion_mnist",
    "cifar10",
    "cifar10_features",
    "ham10000",
    "ham10000_features",
    "tweets",
]


def examples(labels: list[int]) -> Examples:
    """Examples whose only feature is their position, so that they can be told apart."""
    return Examples(np.arange(len(labels))[:, None], np.asarray(labels))


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


@pytest.fixture
def tiny_mnist(tmp_path: Path) -> Iterator[Path]:
    """A data folder with a packed MNIST of 30 + 10 images, that cannot be written to."""
    raw = tmp_path / "MNIST" / "raw"
    for prefix, count in (("train", 30), ("t10k", 10)):
        images = np.arange(count)[:, None, None] * np.ones((1, 28, 28))
        write_idx(raw / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    raw.chmod(0o555)
    yield tmp_path
    raw.chmod(0o755)


@pytest.fixture
def real_data() -> str:
    folder = os.environ.get(data.DATA_VARIABLE)
    if not folder:
        pytest.skip(f"real data are not there: {data.DATA_VARIABLE} is not set")
    return folder


# --- Examples -------------------------------------------------------------------------------------


def test_examples_are_taken_in_the_order_asked_for() -> None:
    taken = examples([5, 6, 7]).take([2, 0])
    assert taken.labels.tolist() == [7, 5]
    assert taken.features.ravel().tolist() == [2, 0]


def test_concatenating_parts_gives_back_the_whole() -> None:
    whole = examples([0, 1, 2, 1])
    joined = Examples.concatenate([whole.take([0, 1]), whole.take([2, 3])])
    np.testing.assert_array_equal(joined.features, whole.features)
    np.testing.assert_array_equal(joined.labels, whole.labels)


def test_classes_without_examples_are_counted_as_zero() -> None:
    assert examples([0, 2, 2]).class_counts(4).tolist() == [1, 0, 2, 0]


def test_labels_outside_the_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 … 2"):
        examples([0, 3]).class_counts(3)


def test_examples_cannot_be_changed_and_the_callers_array_still_can() -> None:
    features = np.zeros((2, 3))
    held = Examples(features, np.zeros(2, np.int8))
    with pytest.raises(ValueError, match="read-only"):
        held.features[0] = 1
    features[0] = 1
    assert held.labels.dtype == np.int64


def test_features_and_labels_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one row of features per label"):
        Examples(np.zeros((3, 2)), np.zeros(2))


# --- splitting ------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    st.integers(0, 500),
)
def test_apportioned_items_sum_to_the_total_and_miss_the_exact_share_by_less_than_one(
    weights: list[float], total: int
) -> None:
    """The quota rule of the largest remainder method."""
    counts = apportion(np.asarray(weights), total)
    assert counts.sum() == total
    exact = np.asarray(weights) * total / sum(weights)
    assert np.all(np.abs(counts - exact) < 1 + 1e-6)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.floats(0, 0.99),
    st.integers(0, 2**32),
)
def test_validation_split_is_a_partition_and_every_class_keeps_a_training_example(
    labels: list[int], fraction: float, seed: int
) -> None:
    array = np.asarray(labels)
    training, validation = split_validation(array, fraction, seed)
    assert sorted([*training, *validation]) == list(range(len(labels)))
    assert set(array[training]) == set(labels)
    repeated = len(set(labels)) < len(labels)
    assert (len(validation) > 0) == (fraction > 0 and repeated)
    again = split_validation(array, fraction, seed)
    np.testing.assert_array_equal(validation, again[1])


def test_validation_split_keeps_class_proportions() -> None:
    """A tenth of 100, 50 and 10 examples is 10, 5 and 1."""
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    _, validation = split_validation(labels, 0.1, seed=0)
    assert np.bincount(labels[validation]).tolist() == [10, 5, 1]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_validation_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        split_validation(np.zeros(4, dtype=int), fraction, seed=0)


# --- loaders --------------------------------------------------------------------------------------


def rows(part: Examples) -> list[bytes]:
    return [row.tobytes() for row in part.features]


def check(dataset: Dataset) -> None:
    """What holds for every data set."""
    for part in (dataset.train, dataset.public, dataset.test):
        assert part.features.shape[1:] == dataset.input_shape
        assert set(np.unique(part.labels)) == set(range(dataset.classes))
        assert np.isfinite(part.features.astype(np.float32)).all()


def test_digits_need_no_files_and_use_all_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    dataset = data.digits(data_dir=None, seed=3)
    check(dataset)
    assert dataset.input_shape == (1, 8, 8)
    assert dataset.train.features.dtype == np.uint8
    assert (dataset.train.features * dataset.scale).max() == 1.0
    # All 1,797 images of scikit-learn's set are different: sets of rows show who has what.
    parts = [set(rows(part)) for part in (dataset.train, dataset.public, dataset.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 1797


def test_public_sample_follows_the_seed() -> None:
    first, again, other = (data.digits(seed=seed, public=50) for seed in (0, 0, 1))
    assert rows(first.public) == rows(again.public)
    assert rows(first.public) != rows(other.public)


def test_a_data_set_is_read_once_per_process(tiny_mnist: Path) -> None:
    first = data.mnist(data_dir=tiny_mnist, seed=0, public=10)
    assert data.mnist(data_dir=str(tiny_mnist), seed=0, public=10) is first


@pytest.mark.parametrize("public", [-1, 1438, 0.5])
def test_impossible_public_size_is_refused_with_the_range(public: int) -> None:
    """1,797 digits less a fifth (359) are 1,438, of which one must be left to the nodes."""
    with pytest.raises(ValueError, match="from 0 to 1437"):
        data.digits(seed=0, public=public)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_impossible_test_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"test_fraction must be in \(0, 1\)"):
        data.digits(seed=0, test_fraction=fraction)


def test_packed_mnist_is_read_from_a_folder_that_cannot_be_written(tiny_mnist: Path) -> None:
    before = sorted(tiny_mnist.rglob("*"))
    dataset = data.mnist(data_dir=tiny_mnist, seed=0, public=10)
    check(dataset)
    assert (len(dataset.train), len(dataset.public), len(dataset.test)) == (20, 10, 10)
    np.testing.assert_array_equal(dataset.test.features[:, 0, 0, 0], np.arange(10))
    np.testing.assert_array_equal(dataset.train.features[:, 0, 5, 5] % 10, dataset.train.labels)
    assert sorted(tiny_mnist.rglob("*")) == before


def test_unpacked_mnist_is_read_through_torchvision(tiny_mnist: Path) -> None:
    packed = data.mnist(data_dir=tiny_mnist, seed=0, public=10)
    raw = tiny_mnist / "MNIST" / "raw"
    raw.chmod(0o755)
    for path in list(raw.glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    unpacked = data.mnist(data_dir=tiny_mnist / "MNIST" / "..", seed=0, public=10)
    assert unpacked is not packed
    np.testing.assert_array_equal(unpacked.train.features, packed.train.features)
    np.testing.assert_array_equal(unpacked.train.labels, packed.train.labels)


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    good = tmp_path / "good.gz"
    write_idx(good, np.zeros((2, 3)))
    assert read_idx(good).shape == (2, 3)
    content = gzip.decompress(good.read_bytes())
    cases = {
        "short.gz": gzip.compress(content[:-1]),
        "header.gz": gzip.compress(content[:6]),
        "type.gz": gzip.compress(b"\0\0\x0d" + content[3:]),
        "truncated.gz": good.read_bytes()[:-9],
        "plain.gz": content,
    }
    for name, damaged in cases.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=name):
            read_idx(tmp_path / name)


@pytest.mark.parametrize("name", FROM_FILES)
def test_missing_files_are_named_in_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError) as caught:
        getattr(data, name)(data_dir=tmp_path, seed=0)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "data_dir" in message
    assert data.DATA_VARIABLE in message
    assert message.count(". ") == 0


@pytest.mark.parametrize("name", FROM_FILES)
def test_without_a_data_folder_the_option_and_the_variable_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    with pytest.raises(MissingDataError, match=rf"data_dir=.*{data.DATA_VARIABLE}"):
        getattr(data, name)(data_dir=None, seed=0)


def test_the_environment_names_the_data_folder(
    tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(data.DATA_VARIABLE, str(tiny_mnist))
    assert len(data.mnist(data_dir=None, seed=0, public=5).train) == 25


def test_tweets_are_vectorised_with_terms_of_training_tweets_only(tmp_path: Path) -> None:
    """Each tweet has a word of its own; those of the 4 test tweets must not become terms."""
    path = tmp_path / "twitter" / "tweet_sentiment_extraction_27k.tsv.gz"
    path.parent.mkdir()
    sentiments = ["negative", "positive", "neutral"]
    lines = [f'{i}\t{sentiments[i % 3]}\t"common word{i}' for i in range(30)]
    path.write_bytes(gzip.compress("\n".join(["id\tsentiment\ttext", *lines, ""]).encode()))
    dataset = data.tweets(data_dir=tmp_path, seed=0, public=4, terms=1000)
    check(dataset)
    assert (len(dataset.train), len(dataset.public), len(dataset.test)) == (12, 4, 4)
    assert dataset.input_shape == (16 + 1,)
    assert dataset.train.features.dtype == np.float32
    # Only the common word of a test tweet is known, so its unit-length vector is one 1.
    assert np.sort(dataset.test.features, axis=1)[:, -2:].tolist() == [[0, 1]] * 4


def test_ham10000_keeps_the_files_own_split(tmp_path: Path) -> None:
    (tmp_path / "HAM10000").mkdir()
    labels = np.arange(70) % 7
    np.savez(
        tmp_path / "HAM10000" / "ham10000_28x28.npz",
        images=np.arange(70)[:, None, None, None] * np.ones((1, 28, 28, 3), dtype=np.uint8),
        labels=labels,
        split=np.repeat([0, 1, 2], [42, 14, 14]),
    )
    dataset = data.ham10000(data_dir=tmp_path, seed=0, public=14)
    check(dataset)
    assert dataset.input_shape == (3, 28, 28)
    assert dataset.test.features[:, 0, 0, 0].tolist() == list(range(56, 70))
    held = [part.features[:, 0, 0, 0].tolist() for part in (dataset.train, dataset.public)]
    assert sorted(held[0] + held[1]) == list(range(56))


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_dataset_config_instantiates_or_says_what_is_missing(
    path: Path, tmp_path: Path
) -> None:
    config = OmegaConf.load(path)
    # The one config that is another's data with other options.
    name = {"tweets_by_terms": "tweets"}.get(path.stem, path.stem)
    assert config._target_ == f"simulations.data.{name}"
    if path.stem.startswith(("digits", "graphical")):
        assert instantiate(config, data_dir=None, seed=0).name == path.stem
    elif path.stem == "own":
        with pytest.raises(Exception, match=r"dataset\.input_shape must be"):
            instantiate(config, data_dir=None, seed=0)
    else:
        with pytest.raises(Exception, match=f"{name} is not there") as caught:
            instantiate(config, data_dir=str(tmp_path), seed=0)
        assert isinstance(caught.value.__cause__ or caught.value, MissingDataError)


# --- real files -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("mnist", (55000, 5000, 10000), (1, 28, 28)),
        ("mnist_parity", (55000, 5000, 10000), (50,)),
        ("mnist_permuted", (119600, 400, 20000), (1, 28, 28)),
        ("fashion_mnist", (55000, 5000, 10000), (1, 28, 28)),
        ("cifar10", (45000, 5000, 10000), (3, 32, 32)),
        ("cifar10_features", (45000, 5000, 10000), (320,)),
        ("ham10000", (7007, 1000, 2008), (3, 28, 28)),
        ("ham10000_features", (7007, 1000, 2008), (320,)),
        ("tweets", (12090, 1000, 3273), (1000,)),
    ],
)
def test_real_data_have_the_published_sizes(
    real_data: str, name: str, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Sizes are the published ones less the default public sample; a fifth of tweets is tested."""
    try:
        dataset = getattr(data, name)(data_dir=real_data, seed=0)
    except MissingDataError as error:
        pytest.skip(str(error))
    check(dataset)
    assert (len(dataset.train), len(dataset.public), len(dataset.test)) == sizes
    assert dataset.input_shape == shape


def test_balanced_classes_are_equally_many_and_rare_examples_count_alike() -> None:
    """Class 1 has 3 of 103 examples: each comes 16 or 17 times; class 0 has no repetition."""
    labels = np.array([0] * 100 + [1] * 3)
    features = np.arange(103, dtype=np.float32)[:, None]
    whole = Examples(features, labels)
    dataset = Dataset("d", 2, (1,), 1.0, train=whole, public=whole.take([0, 1, 2, 100]), test=whole)
    even = balance(dataset, 50, seed=3)
    assert even.train.class_counts(2).tolist() == [50, 50]
    frequent, rare = even.train.take(np.arange(50)), even.train.take(np.arange(50, 100))
    assert len(np.unique(frequent.features)) == 50
    assert sorted(np.unique(rare.features, return_counts=True)[1].tolist()) == [16, 17, 17]
    assert even.public.class_counts(2).tolist() == [2, 2]
    assert even.test is whole
    again = balance(dataset, 50, seed=3)
    np.testing.assert_array_equal(again.train.features, even.train.features)
    with pytest.raises(ValueError, match=r"dataset\.balance must be at least 1"):
        balance(dataset, 0, seed=3)
