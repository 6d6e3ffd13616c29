"""The experiments' data sets: what the nodes train on, what the server owns, what is tested.

Every loader has the shape ``(*, data_dir, seed, public, ...) -> Dataset``. The same arguments give
the same samples in every process, so a Ray worker can load the data by itself instead of having it
sent. The last data set loaded is kept in memory, because workers ask for it with every message.
"""

from simulations.data.archives import DATA_VARIABLE, MissingDataError
from simulations.data.driving_data import driving
from simulations.data.examples import Dataset, Examples
from simulations.data.graphical import GeneratedDataset, graphical
from simulations.data.images import cifar10, digits, fashion_mnist, ham10000, mnist
from simulations.data.own_data import own, read_own_data
from simulations.data.parity import digits_parity, mnist_parity
from simulations.data.permuted import digits_permuted, mnist_permuted
from simulations.data.splits import split_validation
from simulations.data.vectors import cifar10_features, ham10000_features, tweets

__all__ = [
    "DATA_VARIABLE",
    "Dataset",
    "Examples",
    "GeneratedDataset",
    "MissingDataError",
    "cifar10",
    "cifar10_features",
    "digits",
    "digits_parity",
    "digits_permuted",
    "driving",
    "fashion_mnist",
    "graphical",
    "ham10000",
    "ham10000_features",
    "mnist",
    "mnist_parity",
    "mnist_permuted",
    "own",
    "read_own_data",
    "split_validation",
    "tweets",
]
