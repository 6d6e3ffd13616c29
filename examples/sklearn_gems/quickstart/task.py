"""The model and the data of a node."""

import warnings

import numpy as np
from flwr.app import ArrayRecord, Context
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

TEST_IMAGES = 360
Data = tuple[np.ndarray, np.ndarray]


def training_data(context: Context) -> Data:
    """Return four fifths of the node's digits."""
    rows = _rows(context)
    return _data(rows[rows % 5 > 0])


def validation_data(context: Context) -> Data:
    """Return the other fifth."""
    rows = _rows(context)
    return _data(rows[rows % 5 == 0])


def test_data() -> Data:
    """Return the digits that no node has."""
    return _data(np.arange(TEST_IMAGES))


def _rows(context: Context) -> np.ndarray:
    node, nodes = context.node_config["partition-id"], context.node_config["num-partitions"]
    images = np.arange(TEST_IMAGES, len(load_digits().target))
    return np.array_split(images, int(nodes))[int(node)]


def _data(rows: np.ndarray) -> Data:
    digits = load_digits()
    return digits.data[rows] / 16, digits.target[rows]


def new_model() -> LogisticRegression:
    """Return a model of the right shape that has seen nothing."""
    model = LogisticRegression(warm_start=True, max_iter=5)
    model.classes_ = np.arange(10)
    model.coef_, model.intercept_ = np.zeros((10, 64)), np.zeros(10)
    return model


def to_arrays(model: LogisticRegression) -> ArrayRecord:
    """Return the model as it is sent."""
    return ArrayRecord([model.coef_, model.intercept_])


def from_arrays(arrays: ArrayRecord) -> LogisticRegression:
    """Return the model that was sent."""
    model = new_model()
    model.coef_, model.intercept_ = (array.copy() for array in arrays.to_numpy_ndarrays())
    return model


def train(model: LogisticRegression, data: Data) -> None:
    """Take a few steps from where the model is."""
    with warnings.catch_warnings():
        # A few steps are all that is wanted.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(*data)
