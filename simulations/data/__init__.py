"""The experiments' data sets: what the nodes train on, what the server owns, what is tested.

Every loader has the shape ``(*, data_dir, seed, public, ...) -> Dataset``:

- ``data_dir`` is the folder that holds the files; None means the one that ``GEMS_FLWR_DATA`` names.
  A `MissingDataError` says what to put where. Nothing is written unless ``download`` is true: then
  torchvision fetches what is not there.
- ``seed``, at least 0, decides the public sample, and what else is drawn.
- ``public`` is the size of the server's own sample, from 0 to one below the training images; the
  nodes share the rest.

An option out of range is a ValueError. The same arguments give the same samples in every process,
so a Ray worker can load the data by itself instead of having it sent.
"""

from simulations.data.archives import DATA_VARIABLE, MissingDataError, data_folder, read_arrays
from simulations.data.digit_groups import parity, permuted
from simulations.data.driving import driving
from simulations.data.examples import Dataset, Examples, assemble, strata
from simulations.data.graphical import GeneratedDataset, graphical
from simulations.data.images import (
    cifar10_features,
    digits,
    fashion_mnist,
    glyphs,
    ham10000_features,
    mnist,
)
from simulations.data.own import own, own_folder, read_own_data
from simulations.data.splits import apportion, balanced_sample, split_validation, stratified_sample
from simulations.data.tweets import tweets

__all__ = [
    "DATA_VARIABLE", "Dataset", "Examples", "GeneratedDataset", "MissingDataError", "apportion",
    "assemble", "balanced_sample", "cifar10_features", "data_folder", "digits",
    "driving", "fashion_mnist", "glyphs", "graphical", "ham10000_features", "mnist", "own",
    "own_folder", "parity", "permuted", "read_arrays", "read_own_data", "split_validation",
    "strata", "stratified_sample", "tweets",
]  # fmt: skip
