"""Data that lies with the nodes: in a deployment every node reads a folder of its own.

A folder (or a single file) holds ``data.npz`` with the arrays ``features``, a row per example, and
``labels``, class numbers from 0. If there is a ``validation.npz`` beside it, that is the node's
held-out part; otherwise a part of its data is. ``dataset=own`` is for a server that has no data, or
only a test file: it says what the nodes' examples look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simulations.data.archives import MissingDataError, read_arrays
from simulations.data.examples import Dataset, Examples

_FILE, _VALIDATION = "data.npz", "validation.npz"


def own(
    *,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    scale: float = 1.0,
    test: str | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
) -> Dataset:
    """Describe the nodes' own data, and read the server's test file if there is one.

    Parameters
    ----------
    input_shape : sequence of int
        Shape of one example, such as ``[30]`` or ``[3, 32, 32]``; it must be given.
    classes : int
        Number of classes, at least 2; it must be given.
    scale : float, default 1
        What features are multiplied with before a model sees them.
    test : str, optional
        An ``.npz`` file with the server's test data; without it only nodes score the model.
    data_dir, seed
        Not used: every data set is built with them.
    """
    shape = tuple(input_shape or ())
    if not shape or min(shape) < 1:
        raise ValueError(
            f"dataset.input_shape must be lengths from 1, such as [30], got {input_shape}"
        )
    if classes is None or classes < 2:
        raise ValueError(f"dataset.classes must be at least 2, got {classes}")
    nothing = Examples(np.zeros((0, *shape), dtype=np.float32), np.zeros(0, dtype=np.int64))
    return Dataset(
        name="own",
        classes=classes,
        input_shape=shape,
        scale=scale,
        train=nothing,
        public=nothing,
        test=nothing if test is None else _read(Path(test), shape, classes),
    )


def read_own_data(path: str | Path, dataset: Dataset) -> tuple[Examples, Examples | None]:
    """Return a node's own examples, and its validation part where it has set one aside.

    A missing file is a MissingDataError, one with something else than `dataset` describes a
    ValueError that names it.
    """
    place = Path(path).expanduser()
    file = place / _FILE if place.is_dir() else place
    beside = file.with_name(_VALIDATION)
    shape, classes = dataset.input_shape, dataset.classes
    validation = _read(beside, shape, classes) if beside.is_file() else None
    return _read(file, shape, classes), validation


def own_folder(path: str | Path) -> Path:
    """Return the folder of a node's own data."""
    place = Path(path).expanduser()
    return place if place.is_dir() else place.parent


def _read(file: Path, shape: tuple[int, ...], classes: int) -> Examples:
    if not file.is_file():
        raise MissingDataError(
            f"there is no {file}: it should hold the arrays 'features' and 'labels'"
        )
    features, labels = read_arrays(file, "features", "labels")
    if features.shape[1:] != shape or not len(features):
        raise ValueError(f"{file}: features have shape {features.shape}, expected rows of {shape}")
    if features.dtype.kind not in "fiu" or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{file}: features must be numbers and labels whole numbers, got {features.dtype} "
            f"and {labels.dtype}"
        )
    if features.dtype.kind == "f" and not np.isfinite(features).all():
        raise ValueError(f"{file}: features hold NaN or infinity")
    try:
        examples = Examples(features, labels)
        examples.class_counts(classes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return examples
