"""A trained model as an ONNX file, for programs that have neither torch nor this library.

Weights alone predict nothing: stored values are multiplied by a scale first, and logits made into
probabilities and a label afterwards. `Portable` is all of it as one torch module, whose input is
called ``input``. What was made is tried on random inputs before it is written.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import pkgutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional as F

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
    classes: int | None = None,
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
    classes : int, optional
        How many classes there are; 0: the model predicts a number. By default one for each output.
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
            raise OptionError("say what shape one example has: input_shape, --input-shape 1,28,28")
        input_shape = next(network.parameters()).shape[1:]
    portable = Portable(network, tuple(input_shape), classes, scale)
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
        raise OptionError(f"there is no model '{member}' (--member): there are {[*models][:10]}")
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
            "belong to (model, --model module:Net)"
        )
    layer = nn.Linear(weight.shape[1], len(weight))
    bias = others[0] if others else np.zeros(len(weight))
    layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    return nn.Sequential(nn.Flatten(), layer)


class Portable(nn.Module):
    """A model with the scale before and the probabilities behind it."""

    def __init__(
        self, model: nn.Module, input_shape: tuple[int, ...], classes: int | None, scale: float
    ) -> None:
        super().__init__()
        self.model, self.input_shape = model.eval().requires_grad_(False), input_shape
        self.scale = scale
        try:
            _, count = model(self.example()).shape
        except Exception as error:  # torch and the model raise many kinds
            raise ModelError(
                f"the model does not map inputs shaped (n, {', '.join(map(str, input_shape))}) to "
                f"(n, outputs): {_reason(error)}; give the shape of one example, input_shape "
                "(--input-shape 1,28,28)"
            ) from error
        if classes is None and count == 1:
            raise OptionError(
                "say what the output means: two classes, of which it is the logit of the second "
                "(classes=2, --classes 2), or a number (classes=0)"
            )
        self.classes = count if classes is None else classes
        # Of two classes one logit is enough; a number has one output.
        if count != (self.classes or 1) and (self.classes, count) != (2, 1):
            raise ModelError(f"the model has {count} outputs for {self.classes} classes")

    @property
    def output_names(self) -> tuple[str, ...]:
        """What `forward` returns, in order."""
        return ("logits", "probabilities", "label") if self.classes else ("prediction",)

    def example(self) -> Tensor:
        """Return random inputs that the scale maps to 0 … 1."""
        source = torch.Generator().manual_seed(0)
        return torch.rand(_EXAMPLES, *self.input_shape, generator=source) / self.scale

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return what `output_names` says for raw values of shape ``(n, *input_shape)``."""
        output = self.model(input * self.scale)
        if not self.classes:
            return (output.flatten(),)
        if output.shape[1] == 1:  # the logit of the second of two classes
            output = F.pad(output, (1, 0))
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


# --- gems-flwr export -------------------------------------------------------------------------

_HOW = """\
A linear model needs no options; for another one, Net is a class or function in task.py:

    gems-flwr export model.safetensors
    gems-flwr export model.safetensors --model task:Net --input-shape 1,28,28 --scale 0.00392157"""


def add_export(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
    export = commands.add_parser(
        "export",
        help="write a model as ONNX",
        description="Write a model file as ONNX, preprocessing included, beside it.",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = export.add_argument
    add("file", type=Path, help="a model file, such as model.safetensors")
    add("--model", metavar="MODULE:NAME", help="what builds the network, from the current folder")
    add("--input-shape", type=_shape_of, metavar="1,28,28", help="shape of one example")
    add("--scale", type=float, default=1.0, help="what raw values are multiplied with first; 1")
    add("--member", metavar="NAME", default="model", help="of several models, this one")
    add("--classes", type=int, help="how many classes; 0: the output is a number")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name not in ("run", "file")}
    given["model"] = _own_network(options.model) if options.model else None
    output = options.file.with_suffix(".onnx")
    try:
        arrays = load_file(options.file)
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{options.file} is no safetensors file: {error}") from error
    outputs = export_model(arrays, path=output, **given)
    print(f"{output}: outputs {', '.join(outputs)}")
    if not options.model:
        print("taken for a linear model; if a lift or network stands below it, give --model")
    return 0


def _shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _own_network(text: str) -> Any:
    """Return what ``module:name`` names, looked up from the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = pkgutil.resolve_name(text)
        return found if isinstance(found, nn.Module) else found()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise OptionError(
            f"--model {text}: expected module:name of a network, or of a function without "
            f"arguments that returns one ({error})"
        ) from error
    finally:
        sys.path.pop(0)
