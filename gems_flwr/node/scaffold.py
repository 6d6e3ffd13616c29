"""SCAFFOLD on a node: add a correction to every gradient, whatever the training loop looks like.

The correction c − c_i comes with the message and is added by hooks on the weights, so a training
loop need not know of it; the mean of the uncorrected gradients goes back beside the model
(Karimireddy et al. 2020, option II, where c_i becomes the mean gradient of local training). One
call of ``backward`` counts as one local step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from gems_flwr.errors import ModelError

CORRECTION, GRADIENT = "gradient-correction", "mean-gradient"
_VECTOR = "vector"


def vector_record(vector: NDArray) -> ArrayRecord:
    """Return a vector as a record of its own."""
    return ArrayRecord({_VECTOR: Array(vector)})


def vector_in(record: object) -> NDArray | None:
    """Return the vector in a record; None where there is none."""
    if not isinstance(record, ArrayRecord) or record.keys() != {_VECTOR}:
        return None
    return record[_VECTOR].numpy()


@contextmanager
def corrected_gradients(
    model: nn.Module, instruction: RecordDict
) -> Iterator[dict[str, ArrayRecord]]:
    """Add the correction in a message, if there is one, to every gradient of a model.

    The correction has one number for each floating-point number in the model's ``state_dict``, in
    its order. Yields a dict that holds what goes into the reply when the context has ended.
    """
    answer: dict[str, ArrayRecord] = {}
    correction = vector_in(instruction.get(CORRECTION))
    if correction is None:
        yield answer
        return
    arrays = {k: array for k, array in model.state_dict().items() if array.is_floating_point()}
    sizes = [array.numel() for array in arrays.values()]
    if sum(sizes) != len(correction):
        raise ModelError(f"the correction has {len(correction)} numbers, the model {sum(sizes)}")
    parts = dict(zip(arrays, np.split(correction, np.cumsum(sizes)[:-1]), strict=True))
    # Uncorrected gradients of all steps, and how many; zero for arrays that are no weights.
    sums = {name: torch.zeros_like(array) for name, array in arrays.items()}
    steps = dict.fromkeys(arrays, 0)

    def hook(name: str, weight: nn.Parameter) -> RemovableHandle:
        part = torch.from_numpy(parts[name].copy()).reshape(weight.shape).to(weight.dtype)

        def correct(gradient: torch.Tensor) -> torch.Tensor:
            sums[name] += gradient
            steps[name] += 1
            return gradient + part.to(gradient.device)

        return weight.register_hook(correct)  # type: ignore[no-untyped-call, no-any-return]

    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    hooks = [hook(name, weight) for name, weight in trained]
    try:
        yield answer
    finally:
        for each in hooks:
            each.remove()
    means = [(total / max(1, steps[name])).cpu().numpy() for name, total in sums.items()]
    answer[GRADIENT] = vector_record(np.concatenate([mean.ravel() for mean in means]))
