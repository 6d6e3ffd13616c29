"""A trained model as an ONNX file, for programs that have neither torch nor this library.

Weights alone predict nothing: stored values are multiplied by a scale first, and logits made into
probabilities and a label afterwards. `Portable` is all of it as one torch module, whose input is
called ``input``. What was made is tried on random inputs before it is written.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from gems_flwr.core.disk import write_atomically
from gems_flwr.core.records import to_numpy
from gems_flwr.errors import ModelError, NotInstalledError, OptionError
from gems_flwr.networks import resize_model
from gems_flwr.strategies.members import split_models
from gems_flwr.tools.model_card import versions
from gems_flwr.typing import Arrays

# Examples in tracing and trying: more than one, which tracing would take for a constant.
_EXAMPLES = 8
# Far above rounding, far below another model.
_MOST_DIFFERENCE = 1e-3


def export_model(
    arrays: ArrayRecord | Arrays,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    path: str | Path,
    input_shape: Sequence[int] | None = None,
    scale: float = 1.0,
    member: str = "model",
) -> tuple[str, ...]:
    """Write a model as ONNX, with what stands before and behind its weights; return its outputs.

    Parameters
    ----------
    arrays : ArrayRecord, or mapping from str to ndarray
        The weights, such as ``result.arrays``; hidden layers may have other widths than `model`.
    model : torch.nn.Module, or callable that returns one, optional
        The network; not needed for a linear model.
    path : path
        The file.
    input_shape : sequence of int, optional
        Shape of one example, as in ``(1, 28, 28)``; not needed for a linear model.
    scale : float, default 1.0
        What raw values are multiplied with before the network sees them, such as 1 / 255.
    member : str, optional
        Which model to take, by its name, where there are several.

    Raises
    ------
    ModelError
        If arrays and network do not fit, or ONNX has nothing for the network.
    OptionError
        If something is missing that the arrays do not show.
    NotInstalledError
        If the extra ``export`` is needed and not there.
    """
    try:
        from onnx.reference import ReferenceEvaluator
    except ImportError as error:
        raise NotInstalledError(f"pip install 'gems-flwr[export]': {error}") from error
    plain = to_numpy(arrays) if isinstance(arrays, ArrayRecord) else arrays
    network = _network(_chosen(plain, member), model)
    if input_shape is None:
        if model is not None:
            raise OptionError("say what shape one example has: input_shape=(1, 28, 28)")
        input_shape = next(network.parameters()).shape[1:]
    portable = Portable(network, tuple(input_shape), scale)
    made = _to_onnx(portable)
    inputs = portable.example()
    with torch.no_grad():
        expected = portable(inputs)[0].numpy()
    got = ReferenceEvaluator(made).run(None, {"input": inputs.numpy()})[0]  # type: ignore[index]
    difference = float(np.abs(expected - got).max())
    if not difference <= _MOST_DIFFERENCE:
        raise ModelError(
            f"the outputs of the exported model differ by {difference:.3g} from those of the "
            "model; please report it, with the network"
        )
    write_atomically(Path(path), made.SerializeToString())
    return portable.output_names


def _chosen(arrays: Arrays, member: str) -> Arrays:
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise ModelError(f"array '{name}' has values that are not finite numbers")
    models = split_models(arrays)
    if member not in models:
        raise OptionError(f"there is no model '{member}': there are {[*models][:10]}")
    return models[member]


def _network(arrays: Arrays, model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """Return a network with the weights of some arrays, at the widths that these have."""
    if model is not None:
        built = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        return resize_model(built.cpu(), arrays).float()
    weight, *others = sorted(arrays.values(), key=lambda array: -array.ndim)
    fits = weight.ndim == 2 and weight.size and [x.shape for x in others] in ([], [(len(weight),)])
    if not fits:
        raise OptionError(
            f"{', '.join(arrays)[:300]} are more than a linear layer: say which network they "
            "belong to (model)"
        )
    layer = nn.Linear(weight.shape[1], len(weight))
    bias = others[0] if others else np.zeros(len(weight))
    layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    return nn.Sequential(nn.Flatten(), layer)


class Portable(nn.Module):
    """A model with the scale before and the probabilities behind it; one output is a number."""

    def __init__(self, model: nn.Module, input_shape: tuple[int, ...], scale: float) -> None:
        super().__init__()
        self.model, self.input_shape = model.eval().requires_grad_(False), input_shape
        self.scale = scale
        try:
            _, self.outputs = model(self.example()).shape
        except Exception as error:  # torch and the model raise many kinds
            raise ModelError(
                f"the model does not map inputs shaped (n, {', '.join(map(str, input_shape))}) to "
                f"(n, outputs): {_reason(error)}; give the shape of one example, input_shape"
            ) from error

    @property
    def output_names(self) -> tuple[str, ...]:
        """What `forward` returns, in order."""
        return ("logits", "probabilities", "label") if self.outputs > 1 else ("prediction",)

    def example(self) -> Tensor:
        """Return random inputs that the scale maps to 0 … 1."""
        source = torch.Generator().manual_seed(0)
        return torch.rand(_EXAMPLES, *self.input_shape, generator=source) / self.scale

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return what `output_names` says for raw values of shape ``(n, *input_shape)``."""
        output = self.model(input * self.scale)
        if self.outputs == 1:
            return (output.flatten(),)
        return output, torch.softmax(output, dim=1), output.argmax(1)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _to_onnx(model: Portable) -> Any:
    import onnx
    import torch.export

    how: dict[str, Any] = {
        "input_names": ["input"],
        "output_names": list(model.output_names),
        "dynamic_shapes": {"input": {0: torch.export.Dim("batch", min=1)}},
        "dynamo": True,
        "verbose": False,
    }
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            made: Any = torch.onnx.export(model, (model.example(),), **how)
        proto = made.model_proto
        # What tracing notes about the code and the machine.
        graph = proto.graph
        parts = (graph.node, graph.value_info, graph.input, graph.output, graph.initializer)
        for part in (graph, *(each for group in parts for each in group)):
            del part.metadata_props[:]
            part.doc_string = ""
        onnx.helper.set_model_props(proto, {**versions(), "scale": repr(model.scale)})
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # torch and onnxscript raise many kinds, a model above 2 GiB too
        raise ModelError(f"the model cannot be written as ONNX: {_reason(error)}") from error
    finally:
        logging.disable(logging.NOTSET)
    return proto
