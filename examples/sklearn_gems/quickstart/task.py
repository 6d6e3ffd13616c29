"""The model and the data of a node."""

import warnings

import numpy as np
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

FEATURES, CLASSES = 4, 3


def load_data(partition_id: int, num_partitions: int):
    """Return the node's training data, four fifths of its flowers, and its test data."""
    X, y = load_iris(return_X_y=True)  # noqa: N806
    rows = np.random.default_rng(0).permutation(len(y))
    rows = np.array_split(rows, num_partitions)[partition_id]
    train, test = np.split(rows, [int(0.8 * len(rows))])
    return X[train], y[train], X[test], y[test]


def create_model(penalty: float) -> LogisticRegression:
    """Return a model of the right shape that has seen nothing."""
    # One step for each message; warm: the next starts where the last ended.
    model = LogisticRegression(C=1 / penalty, max_iter=1, warm_start=True, solver="saga")
    model.classes_ = np.arange(CLASSES)
    model.coef_, model.intercept_ = np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)
    return model


def get_params(model: LogisticRegression) -> list[np.ndarray]:
    """Return the model as it is sent."""
    return [model.coef_, model.intercept_]


def set_params(model: LogisticRegression, params: list[np.ndarray]) -> None:
    """Take over a model that was sent."""
    model.coef_, model.intercept_ = (array.copy() for array in params)


def fit(model: LogisticRegression, X: np.ndarray, y: np.ndarray) -> None:  # noqa: N803
    """Take a step from where the model is."""
    with warnings.catch_warnings():
        # A step is all that is wanted.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, y)
