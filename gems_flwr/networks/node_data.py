"""A node's training and validation data, in whatever form the app's own loader returns them.

Flower's apps have a function that returns two loaders, or four arrays as scikit-learn's quickstart
does. One callable therefore serves every mod: what it returns is told apart here, with plain
arrays and without Flower.

Decided here: what can be read in two ways is refused, with what to return instead. A list is none
of the forms, since a list of two batches and a list of two loaders look alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gems_flwr.errors import ModelError
from gems_flwr.networks.inputs import Data, batches

Part = Literal["train", "validation"]

_WANTED = "return (train, validation) from data(context)"
_FORMS = "each of them a loader, an iterable of batches or a pair of arrays (inputs, labels)"


@dataclass(frozen=True, eq=False)
class NodeData:
    """What a node has; a part that is not there is None.

    Parameters
    ----------
    train : Data or None
        For class moments and statistics.
    validation : Data or None
        For scores and radii.
    """

    train: Data | None
    validation: Data | None

    def part(self, name: Part) -> Data:
        """Return one part.

        Raises
        ------
        ModelError
            If there is none, or it is empty; the message begins with what to return.
        """
        data: Data | None = getattr(self, name)
        if data is None or _is_empty(data):
            raise ModelError(
                f"{_WANTED} with {name} data in it: the server's request reads it, and there is "
                f"{'none' if data is None else 'no sample in it'}"
            )
        return data


def read_node_data(returned: Any) -> NodeData:
    """Return the two parts of what an app's loader returned.

    Parameters
    ----------
    returned : tuple
        ``(train, validation)``, or the four arrays ``X_train, y_train, X_test, y_test``, or
        those in the order of scikit-learn's ``train_test_split``.

    Raises
    ------
    ModelError
        If it is something else, or the order of four arrays cannot be told.
    """
    if isinstance(returned, NodeData):
        return returned
    if isinstance(returned, tuple) and len(returned) == 4 and all(map(_is_array, returned)):
        return _four_arrays(returned)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ModelError(f"{_WANTED}, {_FORMS}; it returned {_described(returned)}")
    if all(map(_is_array, returned)):
        raise ModelError(
            f"{_WANTED}, each of them a pair: it returned the inputs and labels of one of them, or "
            f"what looks like it ({_described(returned)})"
        )
    for part in returned:
        if part is not None and (_is_array(part) or not hasattr(part, "__iter__")):
            raise ModelError(f"{_WANTED}, {_FORMS}; it returned {_described(returned)}")
    return NodeData(*returned)


def count_samples(data: Data) -> int:
    """Return how many samples there are, without reading them where the data know it."""
    dataset = getattr(data, "dataset", None)
    if isinstance(dataset, Sized) and not getattr(data, "drop_last", False):
        return len(dataset)
    return sum(len(labels.reshape(-1)) for _, labels in batches(data))


def is_read_once(data: Data) -> bool:
    """Return whether the data are gone once they were read."""
    return isinstance(data, Iterator)


def _four_arrays(arrays: tuple[Any, ...]) -> NodeData:
    a, b, c, d = arrays
    quickstart, split = ((a, b), (c, d)), ((a, c), (b, d))
    fitting = [pairs for pairs in (quickstart, split) if _look_right(*pairs)]
    if len(fitting) != 1:
        raise ModelError(
            "return ((X_train, y_train), (X_test, y_test)) from data(context): which of four "
            f"arrays are labels cannot be told from their shapes {[np.shape(x) for x in arrays]}"
        )
    return NodeData(*fitting[0])


def _look_right(train: tuple[Any, Any], validation: tuple[Any, Any]) -> bool:
    """Return whether two pairs can be inputs of one kind, each with a label per sample."""
    inputs = [np.shape(x) for x, _ in (train, validation)]
    labels = [np.shape(y) for _, y in (train, validation)]
    return (
        all(len(shape) > 1 for shape in inputs)
        and inputs[0][1:] == inputs[1][1:]
        and all(len(shape) == 1 or shape[1:] == (1,) for shape in labels)
        and all(x[0] == y[0] for x, y in zip(inputs, labels, strict=True))
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape")


def _is_empty(data: Data) -> bool:
    if isinstance(data, tuple | list) and len(data) == 2 and _is_array(data[1]):
        return len(data[1]) == 0
    return isinstance(data, Sized) and len(data) == 0


def _described(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"a tuple of {len(returned)}: {', '.join(map(_named, returned))}"
    return _named(returned)


def _named(value: Any) -> str:
    shape = f" of shape {tuple(np.shape(value))}" if _is_array(value) else ""
    return f"{type(value).__name__}{shape}"
