"""A node's data in any of the usual forms, as batches of tensors.

Data may come as a pair of arrays or as batches, from a torch ``DataLoader`` or Flower's datasets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Data = tuple[Any, Any] | Iterable[Any]

_BATCH = 4096
_LABEL_NAMES = ("label", "labels", "target", "y", "fine_label")


def batches(data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of data in any of the usual forms.

    Parameters
    ----------
    data : pair of arrays, or iterable of batches
        A batch is a pair of inputs and labels, or a mapping with one entry called ``label``,
        ``labels``, ``target`` or ``y`` and one other.
    """
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "shape"):
        inputs, labels = torch.as_tensor(data[0]), torch.as_tensor(data[1])
        for start in range(0, len(labels), _BATCH):
            yield inputs[start : start + _BATCH], labels[start : start + _BATCH]
        return
    for batch in data:
        inputs, labels = _pair(batch)
        yield torch.as_tensor(inputs), torch.as_tensor(labels)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Mapping):
        inputs, labels = batch
        return inputs, labels
    named = [key for key in batch if key in _LABEL_NAMES]
    others = [key for key in batch if key not in _LABEL_NAMES]
    if len(named) != 1 or len(others) != 1:
        raise ValueError(
            f"a batch must have its inputs and one of {list(_LABEL_NAMES)}, got {list(batch)}"
        )
    return batch[others[0]], batch[named[0]]
