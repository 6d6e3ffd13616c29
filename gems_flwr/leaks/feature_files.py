"""Inputs of a layer and their classes as files, for ``gems-flwr inspect --data``.

What a cone is made of is what its layer sees: the data itself for a plain logistic model, features
of the network below it else. `save_features` writes those; for plain data any of these will do:

- ``.npz`` or ``.safetensors`` with arrays ``inputs`` (or ``x``, ``features``) and ``labels`` (or
  ``y``, ``targets``);
- ``.csv`` or ``.npy`` with a row per sample and the class in the last column; a csv may have a
  line of names first.

Decided here: nothing is unpickled, so there is no ``.pt``.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import nn

from gems_flwr.disk.files import replacing
from gems_flwr.errors import OfflineError
from gems_flwr.leaks.made_of import LayerSamples
from gems_flwr.networks.inputs import Data, LayerReader
from gems_flwr.networks.node_data import is_read_once

INPUTS, LABELS = ("inputs", "x", "X", "features"), ("labels", "y", "targets")
SUFFIXES = (".npz", ".safetensors", ".npy", ".csv")
_HOW = f"an array called {INPUTS[0]} (n x D) and one called {LABELS[0]} (n)"


def read_features(path: str | Path) -> LayerSamples:
    """Return inputs and classes from a file.

    Parameters
    ----------
    path : path
        One of the forms that the module's docstring lists.

    Raises
    ------
    OfflineError
        If it cannot be read as such; says what was expected.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise OfflineError(
            f"{path}: data must be one of {', '.join(SUFFIXES)}; torch tensors can be written "
            "by gems_flwr.save_features"
        )
    try:
        inputs, labels = _arrays(path)
    except (ValueError, SafetensorError, zipfile.BadZipFile, EOFError, KeyError) as error:
        if isinstance(error, OfflineError):
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise OfflineError(f"{path} cannot be read as {path.suffix[1:]}: {reason}") from error
    return _checked(path, inputs, labels)


def _arrays(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return _named(path, {name: archive[name] for name in archive.files})
    if path.suffix == ".safetensors":
        return _named(path, load_file(path))
    if path.suffix == ".npy":
        table = np.load(path)
    else:
        with path.open() as file:
            first = file.readline()
        table = np.loadtxt(path, delimiter=",", skiprows=int(_is_header(first)), ndmin=2)
    if table.ndim != 2 or table.shape[1] < 2:
        raise OfflineError(
            f"{path}: expected rows of features and, last, the class; got shape {table.shape}"
        )
    return table[:, :-1], table[:, -1]


def _is_header(line: str) -> bool:
    for cell in line.split(","):
        try:
            float(cell)
        except ValueError:
            return True
    return False


def _named(path: Path, arrays: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    inputs = [name for name in INPUTS if name in arrays]
    labels = [name for name in LABELS if name in arrays]
    if not inputs or not labels:
        raise OfflineError(f"{path}: expected {_HOW}, got {sorted(arrays)}")
    return arrays[inputs[0]], arrays[labels[0]]


def _checked(path: Path, inputs: NDArray[Any], labels: NDArray[Any]) -> LayerSamples:
    for name, array in (("inputs", inputs), ("labels", labels)):
        if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise OfflineError(f"{path}: {name} must be numbers, got {array.dtype}")
    rows = inputs.reshape(len(inputs), -1).astype(np.float64) if inputs.ndim > 1 else inputs
    flat = labels.reshape(-1)
    if rows.ndim != 2 or len(rows) != len(flat) or not rows.size:
        raise OfflineError(f"{path}: expected {_HOW}, got {inputs.shape} and {labels.shape}")
    if not np.isfinite(rows).all():
        raise OfflineError(f"{path}: inputs must be finite, got NaN or inf")
    classes = flat.astype(np.float64)
    if not np.array_equal(classes, np.rint(classes)):
        raise OfflineError(f"{path}: labels must be class numbers 0, 1, …, got {flat[:3].tolist()}")
    return LayerSamples(rows, classes.astype(np.int64))


def save_features(
    path: str | Path, data: Data, model: nn.Module, *, layer: str | None = None
) -> int:
    """Write what a model's output layer sees of some data, for ``gems-flwr inspect --data``.

    Parameters
    ----------
    path : path
        A file that ends in ``.npz``; for its owner alone.
    data : pair of arrays, or iterable of batches
        As in `good_enough_mod`: the data that the space was built on, or held-out data.
    model : torch.nn.Module
        With the weights that the server sent.
    layer : str, optional
        Name of the linear output layer, where it cannot be found.

    Returns
    -------
    int
        How many samples were written.

    Raises
    ------
    OfflineError
        If the file's name ends in something else.
    ModelError
        If the output layer cannot be found, or the data do not fit it.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from gems_flwr import save_features
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    >>> with TemporaryDirectory() as folder:
    ...     save_features(Path(folder, "data.npz"), (torch.randn(40, 8), torch.arange(40) % 2), net)
    40
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise OfflineError(f"{path}: features are written as .npz")
    data = list(data) if is_read_once(data) else data
    arrays = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    reader = LayerReader(arrays, copy.deepcopy(model), layer, call="save_features(path, data, Net)")
    samples = reader.read(data, reader.output_layer(data))
    with replacing(path, private=True) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            inputs=samples.inputs.detach().cpu().numpy(),
            labels=samples.labels.cpu().numpy(),
        )
    return len(samples)
