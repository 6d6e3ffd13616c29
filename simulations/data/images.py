"""Image data sets, and features of a fixed network for some of them.

Images are stored as bytes shaped ``(channels, height, width)``. Standard train and test splits are
kept where there are any; the server's public sample is taken from the training part.

Features (320 per image, of an EfficientNet-Lite0 trained on ImageNet) have ``scale = 1``.
Standardising each of them needs the pooled means and variances, which nodes cannot have without
communication; it would gain nothing for CIFAR-10 (pooled logistic regression: .647 either way) and
.003 for HAM10000. Guha & Smith (2019, Appendix B.1) used features of VGG-16: the same kind of task,
other numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from simulations.data.archives import (
    data_file,
    data_folder,
    kept_in_memory,
    one_downloads,
    read_arrays,
    read_idx,
    torchvision_dataset,
)
from simulations.data.examples import Dataset, Examples, assemble, balance_classes
from simulations.data.splits import split_validation

HAM10000_CLASSES = 7
"""akiec, bcc, bkl, df, mel, nv, vasc, in this order."""


@kept_in_memory
def digits(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 200,
    test_fraction: float = 0.2,
) -> Dataset:
    """Load the 1,797 handwritten digits, 8×8, that come with scikit-learn; no file is read.

    The seed also decides the test sample, a share ``test_fraction`` in (0, 1) of all images.
    """
    check_fraction("test_fraction", test_fraction)
    from sklearn.datasets import load_digits  # late: a Ray worker on other data can save seconds

    bunch = load_digits()
    everything = Examples(bunch.images.astype(np.uint8)[:, None], bunch.target)
    training, testing = split_validation(everything.labels, test_fraction, seed)
    return assemble(
        "digits",
        classes=10,
        scale=1 / 16,  # scikit-learn stores 17 grey levels, 0 … 16
        pool=everything.take(training),
        test=everything.take(testing),
        public=public,
        seed=seed,
    )


@kept_in_memory
def mnist(
    *, data_dir: str | Path | None = None, seed: int, public: int = 5000, download: bool = False
) -> Dataset:
    """Load MNIST: 60,000 + 10,000 handwritten digits, 28×28, from ``MNIST/raw``.

    The published ``.gz`` files and unpacked ones are read alike.
    """
    return _mnist_like("mnist", "MNIST", data_dir, seed, public, download)


@kept_in_memory
def fashion_mnist(
    *, data_dir: str | Path | None = None, seed: int, public: int = 5000, download: bool = False
) -> Dataset:
    """Load Fashion-MNIST: 60,000 + 10,000 pieces of clothing, from ``FashionMNIST/raw``."""
    return _mnist_like("fashion_mnist", "FashionMNIST", data_dir, seed, public, download)


@kept_in_memory
def cifar10_features(
    *, data_dir: str | Path | None = None, seed: int, public: int = 5000
) -> Dataset:
    """Load CIFAR-10 as features."""
    path = data_file(
        data_dir, "CIFAR10/cifar10_efficientnet_lite0_32px_320d_f16.npz", "cifar10_features"
    )
    x_train, y_train, x_test, y_test = read_arrays(path, "x_train", "y_train", "x_test", "y_test")
    pool, test = Examples(x_train, y_train), Examples(x_test, y_test)
    return assemble(
        "cifar10_features", classes=10, scale=1.0, pool=pool, test=test, public=public, seed=seed
    )


@kept_in_memory
def ham10000_features(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 1000,
    balance: int | None = None,
) -> Dataset:
    """Load HAM10000 as features: 10,015 photographs of skin lesions in 7 classes.

    The file's own split is used, in which no lesion is in two parts: training and validation
    samples go to the nodes and the public sample. Below that split samples are drawn by image, so a
    node and the server may hold different photographs of one lesion. Two thirds of the images are
    of one class: report balanced accuracy next to accuracy.

    Parameters
    ----------
    data_dir, seed, public
        See `simulations.data`.
    balance : int or None
        Training examples of every class, by repetition of the rare ones; None: as they are. The
        GEMS paper has 2,000, by random transformations of the images, which features do not allow.
    """
    path = data_file(
        data_dir, "HAM10000/ham10000_efficientnet_lite0_96px_320d_f16.npz", "ham10000_features"
    )
    features, labels, split = read_arrays(path, "features", "labels", "split")
    everything = Examples(features, labels)
    # 0 train, 1 validation, 2 test.
    pool, test = (everything.take(np.flatnonzero(part)) for part in (split != 2, split == 2))
    parts: Any = {"pool": pool, "test": test, "public": public, "seed": seed}
    loaded = assemble("ham10000_features", classes=HAM10000_CLASSES, scale=1.0, **parts)
    return loaded if balance is None else balance_classes(loaded, balance, seed)


@kept_in_memory
def glyphs(
    *, data_dir: str | Path | None = None, seed: int, public: int = 0, families: int = 10
) -> Dataset:
    """Load glyphs: 46,420 + 10,000 characters of 200 kinds, 28×28, drawn in many fonts.

    No font family is both in training and in test images. The training families are dealt at
    random into `families` groups: ``partition=groups`` gives each node some, with all characters.
    """
    if families < 1:
        raise ValueError(f"dataset.families must be at least 1, got {families}")
    path = data_file(data_dir, "glyphs/glyphs.npz", "glyphs")
    keys = ("train_images", "train_labels", "test_images", "test_labels", "train_family")
    x_train, y_train, x_test, y_test, family = read_arrays(path, *keys)
    pool, test = Examples(x_train[:, None], y_train), Examples(x_test[:, None], y_test)
    deal = np.random.default_rng(seed).permutation(int(family.max()) + 1) % families
    about: Any = {"classes": 200, "scale": 1 / 255, "public": public, "seed": seed}
    return assemble("glyphs", pool=pool, test=test, groups=deal[family], **about)


def check_fraction(option: str, value: float) -> None:
    """Refuse a share that leaves nothing on one side."""
    if not 0 < value < 1:
        raise ValueError(f"dataset.{option} must be in (0, 1), got {value}")


def _mnist_like(
    name: str, kind: str, data_dir: str | Path | None, seed: int, public: int, download: bool
) -> Dataset:
    folder = data_folder(data_dir, name)
    with one_downloads(folder, download):
        pool, test = (_read(name, kind, folder, train, download) for train in (True, False))
    return assemble(name, classes=10, scale=1 / 255, pool=pool, test=test, public=public, seed=seed)


def _read(name: str, kind: str, folder: Path, train: bool, download: bool) -> Examples:
    prefix = folder / kind / "raw" / ("train" if train else "t10k")
    packed = [Path(f"{prefix}-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1")]
    if all(path.is_file() for path in packed):
        images, labels = map(read_idx, packed)
        return Examples(images[:, None], labels.astype(np.int64))
    stored = torchvision_dataset(kind, name, folder, train, download)
    return Examples(stored.data.numpy()[:, None], stored.targets.numpy())
