"""A node's data in any of the usual forms, and what a model's output layer sees of them.

Data may come as a pair of arrays or as batches, from a torch ``DataLoader`` or Flower's datasets;
as two of these, or as four arrays, as in scikit-learn's quickstart. What can be read in two ways is
refused, with what to return instead. A list is none of the forms, since a list of two batches and a
list of two loaders look alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from gems_flwr.devices import chosen_device, exact_device
from gems_flwr.errors import ModelError
from gems_flwr.networks.layers import resize_model
from gems_flwr.samples import Samples
from gems_flwr.spaces import OutputLayer, find_output_layer
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from gems_flwr.node.kept_inputs import KeptInputs

Data = tuple[Any, Any] | Iterable[Any]
Part = Literal["train", "validation"]

_BATCH = 4096
# Samples whose inputs are computed in any case, so that a module is known by what it does as well.
_PROBE = 8
_LABEL_NAMES = ("label", "labels", "target", "y", "fine_label")
_WANTED = "return (train, validation) from data(context)"
_FORMS = "each of them a loader, an iterable of batches or a pair of arrays (inputs, labels)"


def batches(data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of data in any of the usual forms."""
    if isinstance(data, tuple | list) and len(data) == 2 and _is_array(data[1]):
        inputs, labels = map(_tensor, data)
        for start in range(0, len(labels), _BATCH):
            yield inputs[start : start + _BATCH], labels[start : start + _BATCH]
        return
    for batch in data:
        inputs, labels = map(_tensor, _pair(batch))
        if labels.ndim == 0:
            raise ModelError(
                "return loaders, for example DataLoader(dataset, batch_size=32): what came is a "
                "single sample, not a batch"
            )
        yield inputs, labels


def _in_order(data: Any) -> Any:
    """Return a shuffled loader's batches in the data set's order, each time the same."""
    shuffled = type(data) is DataLoader and type(data.sampler) is RandomSampler
    if not shuffled or data.sampler.replacement or data.batch_size is None:
        return data
    same = ("num_workers", "collate_fn", "worker_init_fn", "timeout", "multiprocessing_context")
    order = BatchSampler(SequentialSampler(data.dataset), data.batch_size, data.drop_last)
    given: dict[str, Any] = {key: getattr(data, key) for key in same}
    is_whole = data.sampler.num_samples == len(data.dataset)
    return DataLoader(data.dataset, batch_sampler=order, **given) if is_whole else data


def _tensor(values: Any) -> Tensor:
    # By way of numpy, which knows pandas' frames and lists of arrays, too.
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Mapping):
        inputs, labels = batch
        return inputs, labels
    named = [key for key in batch if key in _LABEL_NAMES]
    others = [key for key in batch if key not in _LABEL_NAMES]
    if len(named) != 1 or len(others) != 1:
        raise ModelError(
            f"a batch must have its inputs and one of {list(_LABEL_NAMES)}, got {list(batch)}"
        )
    return batch[others[0]], batch[named[0]]


@dataclass(frozen=True, eq=False)
class NodeData:
    """What a node has: for moments and statistics, for scores and radii; None where it has none."""

    train: Data | None
    validation: Data | None

    def part(self, name: Part) -> Data:
        """Return one part; a ModelError where there is no sample in it."""
        data: Data | None = getattr(self, name)
        if data is None or _is_empty(data):
            raise ModelError(
                f"{_WANTED} with {name} data in it: the server's request reads it, and there is "
                f"{'none' if data is None else 'no sample in it'}"
            )
        return data


def read_node_data(returned: Any) -> NodeData:
    """Return the two parts of what an app's loader returned."""
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
        return f"a tuple of {len(returned)}: {', '.join(map(_described, returned))}"
    shape = f" of shape {tuple(np.shape(returned))}" if _is_array(returned) else ""
    return f"{type(returned).__name__}{shape}"


class Step(NamedTuple):
    """One call of a module: its name, first input and output."""

    name: str
    inputs: Tensor
    outputs: Tensor


def watch(model: nn.Module, x: Tensor, names: Iterable[str]) -> list[Step]:
    """Return the calls of some modules in the order in which they ran."""
    seen: list[Step] = []

    def note(name: str, _: nn.Module, arguments: Any, out: Any) -> None:
        seen.append(Step(name, arguments[0].detach(), out.detach()))

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(partial(note, name)) for name in names]
    try:
        with torch.no_grad():
            model(on_device_of(model, x))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def on_device_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a batch where the model is, in the precision of its weights."""
    weight = next(model.parameters())
    return x.to(weight.device, weight.dtype)


def linear_layer(
    arrays: Arrays, output: OutputLayer, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a model's output layer in single precision, for exact sums."""
    where = exact_device(device)
    weight, *bias = (torch.tensor(np.asarray(arrays[k])).float().to(where) for k in output.keys)
    return weight, bias[0] if bias else None


def _digest(*tensors: Tensor, about: str = "") -> bytes:
    """Return a digest of a text and of tensors: their types, shapes and values."""
    total = hashlib.blake2b(about.encode(), digest_size=16)
    for tensor in tensors:
        values = tensor.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(values.data)
    return total.digest()


# What may stand between the linear output layer and what the model returns.
_ENDINGS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda scores: scores,
    torch.sigmoid,
    lambda scores: scores.softmax(-1),
    lambda scores: scores.log_softmax(-1),
)


class LayerReader:
    """Finds the linear output layer of a model and computes its inputs.

    Without a module the model must be the linear layer alone, and its inputs are the data,
    flattened. `layer` names the output layer in the module, where it cannot be found; `call` is
    what to write where the module is missing.
    """

    def __init__(
        self,
        arrays: Arrays,
        model: nn.Module | None = None,
        layer: str | None = None,
        *,
        call: str = "good_enough_mod(data, model=Net)",
        device: str | torch.device = "cpu",
    ) -> None:
        self._arrays, self._name, self._call = arrays, layer, call
        self._module: nn.Module | None = None
        if model is not None:
            self._module = resize_model(model, arrays).eval().to(chosen_device(device))
            if layer is not None and layer not in dict(model.named_modules()):
                names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
                raise ModelError(f"the model has no layer '{layer}'; its linear layers are {names}")

    def output_layer(self, data: Data) -> OutputLayer:
        """Return which arrays are the output layer; data is only needed to try the model out."""
        if self._module is not None and self._name is None:
            for inputs, _ in batches(data):
                # Not the data: whether a layer is found must say nothing about a sample.
                chance = torch.Generator().manual_seed(0)
                floats = inputs[:2].float().cpu()
                example = torch.rand(floats.shape, generator=chance).to(inputs.dtype)
                self._name = self._find(self._module, example)
                break
        layer = find_output_layer(self._arrays, self._name)
        below = [key for key in self._arrays if key not in (layer.weight, layer.bias)]
        if self._module is None and below:
            raise ModelError(
                f"write {self._call}: the model has arrays below its output layer ({below}), and "
                "only the torch module computes what that layer sees"
            )
        return layer

    def read(self, data: Data, layer: OutputLayer, memory: KeptInputs | None = None) -> Samples:
        """Return the layer's inputs on all of the data.

        With a `memory`, batches are not computed again as long as they are those of the last time,
        bit for bit. A module is known by what it is made of and by its outputs on a few samples:
        one that draws random numbers is computed each time.
        """
        key = self._key(layer) if memory else None
        kept = memory.find(key) if memory and key else None
        inputs, labels, digests, rows = list[Tensor](), list[Tensor](), b"", 0
        for x, y in batches(_in_order(data)):
            labels.append(_classes(y, len(x)).cpu())
            if memory and key:
                probe = [] if digests else [self._inputs(x.to_dense()[:_PROBE])]
                digests += _digest(x, *probe)
                kept = kept if kept and kept[0].startswith(digests) else None
            inputs.append(kept[1][rows : rows + len(x)] if kept else self._inputs(x))
            rows += len(x)
        if not inputs:
            raise ModelError("there is no data to build a space on")
        is_same = kept is not None and kept[0] == digests
        result = Samples(kept[1] if kept and is_same else torch.cat(inputs), torch.cat(labels))
        if result.inputs.shape[1] != layer.features:
            raise ModelError(
                f"the output layer has {layer.features} inputs, the data gives "
                f"{result.inputs.shape[1]}"
            )
        if memory and key and not is_same and len(result.inputs) == rows:
            memory.keep(key, (digests, result.inputs))
        return result

    def _key(self, layer: OutputLayer) -> bytes | None:
        """Return a digest of what computes the layer's inputs, if anything does."""
        module = self._module or nn.Identity()
        # Buffers, too: those of a lift are in no state dict.
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        below = {name: each for name, each in tensors.items() if name not in layer.keys}
        devices = {str(each.device) for each in below.values()}
        about = f"{module} {self._name} {list(below)} {devices}"
        return _digest(*below.values(), about=about) if below else None

    def _inputs(self, x: Tensor) -> Tensor:
        if self._module is None:
            return x.reshape(len(x), -1).float().cpu()
        assert self._name is not None
        return watch(self._module, x, [self._name])[0].inputs.cpu()

    def _find(self, module: nn.Module, x: Tensor) -> str:
        """Return the linear layer whose output is the model's, or makes its probabilities."""
        linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
        with torch.no_grad():
            output = module(on_device_of(module, x))
        for step in reversed(watch(module, x, linear)):
            if any(_is_same(ending(step.outputs), output) for ending in _ENDINGS):
                return step.name
        raise ModelError(
            f"no linear layer gives the model's output; name the one to aggregate by "
            f"layer=..., one of {linear}"
        )


def _is_same(ours: Tensor, output: Any) -> bool:
    """Return whether a model returned these numbers; one per sample may have lost its axis."""
    if not isinstance(output, Tensor) or ours.numel() != output.numel():
        return False
    return len(ours) == len(output) and torch.allclose(ours.reshape(output.shape), output)


def _classes(labels: Tensor, samples: int) -> Tensor:
    """Return one class number per sample; they may come as floats of shape (n, 1)."""
    flat = labels.reshape(-1)
    if len(flat) != samples:
        raise ModelError(
            f"labels must be one class number per sample, got shape {tuple(labels.shape)} for "
            f"{samples} samples"
        )
    classes = flat.long()
    if flat.is_floating_point() and not torch.equal(classes.to(flat), flat):
        raise ModelError("labels must be class numbers 0, 1, …, got fractions: is it a regression?")
    return classes
