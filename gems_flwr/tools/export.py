"""A trained model as a file that others use: ONNX, or a torch program.

Weights alone predict nothing: stored values are multiplied by a scale first, and logits made into
probabilities and a label afterwards. `Portable` is all of it as one torch module, which torch's
exporters take. ONNX files have the input ``input``; a torch program (``.pt2``) loads without this
library: ``torch.export.load("model.pt2").module()(inputs)``. What was made is tried on random
inputs before it is returned.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import logging
import math
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

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

Format = Literal["onnx", "torch"]
_SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
# Examples in tracing and trying: more than one, which tracing would take for a constant.
_EXAMPLES = 8
# Far above rounding, far below another model.
_MOST_DIFFERENCE = 1e-3
Build = Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class ExportedModel:
    """What `export_model` made."""

    model: Any  # an onnx.ModelProto or a torch.export.ExportedProgram
    input_shape: tuple[int, ...]  # of one example
    outputs: tuple[str, ...]  # their names, in order
    difference: float  # of its outputs to those of the torch model at most, on random inputs


def export_model(
    arrays: ArrayRecord | Arrays,
    model: nn.Module | Build | None = None,
    *,
    to: Format,
    path: str | Path | None = None,
    input_shape: Sequence[int] | None = None,
    scale: float = 1.0,
    classes: int | Sequence[str] | None = None,
    member: str | None = None,
) -> ExportedModel:
    """Make a model of a run usable elsewhere, with what stands before and behind its weights.

    Parameters
    ----------
    arrays : ArrayRecord, or mapping from str to ndarray
        The weights, such as ``result.arrays``; hidden layers may have other widths than `model`.
    model : torch.nn.Module, or callable that returns one, optional
        The network; not needed for a linear model.
    to : {"onnx", "torch"}
        The format.
    path : path, optional
        Where to write the file; by default it is only returned.
    input_shape : sequence of int, optional
        Shape of one example, as in ``(1, 28, 28)``; not needed for a linear model.
    scale : float, default 1.0
        What raw values are multiplied with before the network sees them, such as 1 / 255.
    classes : int or sequence of str, optional
        How many classes there are, or their names; 0: the model predicts a number. By default one
        for each output, if there are several.
    member : str, optional
        Which model to take, by its name, where there are several.

    Raises
    ------
    ModelError
        If arrays and network do not fit, or the format has nothing for the network.
    OptionError
        If something is missing that the arrays do not show.
    NotInstalledError
        If the extra ``export`` is needed and not there.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from gems_flwr.tools import export_model
    >>> layer = {"weight": np.array([[2.0, 0.0], [0.0, 2.0]]), "bias": np.zeros(2)}
    >>> made = export_model(layer, to="torch", scale=1 / 16, classes=["cat", "dog"])
    >>> made.outputs
    ('logits', 'probabilities', 'label')
    >>> made.model.module()(torch.tensor([[16.0, 0.0], [3.0, 9.0]]))[2]
    tensor([0, 1])
    """
    if to not in _SUFFIXES:
        raise OptionError(f"to: expected one of {list(_SUFFIXES)}, got {to!r}")
    plain = to_numpy(arrays) if isinstance(arrays, ArrayRecord) else arrays
    network = _network(_chosen(plain, member), model)
    names = None if classes is None or isinstance(classes, int) else [str(c) for c in classes]
    if names is not None and (len(set(names)) != len(names) or len(names) < 2):
        raise OptionError(f"classes: expected at least two different names, got {names}")
    if input_shape is None and model is not None:
        raise OptionError(
            "say what shape one example has: input_shape=(1, 28, 28), --input-shape 1,28,28"
        )
    shape = next(network.parameters()).shape[1:] if input_shape is None else input_shape
    count: Any = classes if names is None else len(names)
    portable = Portable(network, tuple(shape), count, float(scale))
    facts = {**versions(), "scale": repr(float(scale)), "classes": ", ".join(names or ())}
    inputs = portable.example()
    with torch.no_grad():
        expected = [each.numpy() for each in portable(inputs)]
    if to == "onnx":
        made = _to_onnx(portable, facts)
        data = made.SerializeToString()
        from onnx.reference import ReferenceEvaluator

        got = list(ReferenceEvaluator(made).run(None, {"input": inputs.numpy()}))
    else:
        made = _to_program(portable)
        got = [each.numpy() for each in made.module()(inputs)]
        buffer = io.BytesIO()
        with _quiet():
            torch.export.save(made, buffer)
        data = buffer.getvalue()
    # Labels are left to their outputs: two that are nearly equal may change places.
    pairs = [(a, b) for a, b in zip(expected, got, strict=True) if a.dtype.kind == "f"]
    difference = max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)
    if not difference <= _MOST_DIFFERENCE:
        raise ModelError(
            f"the outputs of the exported model differ by {difference:.3g} from those of the "
            "model; please report it, with the network"
        )
    if path is not None:
        write_atomically(Path(path), data)
    return ExportedModel(made, portable.input_shape, portable.output_names, difference)


# --- from arrays to a network -----------------------------------------------------------------


def _chosen(arrays: Arrays, member: str | None) -> Arrays:
    if not arrays:
        raise ModelError("there are no arrays in it")
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub":
            raise ModelError(f"array '{name}' is of type {array.dtype}, expected numbers")
        if count := int((~np.isfinite(array)).sum()):
            raise ModelError(f"array '{name}' has {count} values that are not finite numbers")
    models = split_models(arrays)
    names = ", ".join([*models][:10]) + (f" and {len(models) - 10} more" * (len(models) > 10))
    if member is None and len(models) > 1:
        raise OptionError(f"there are {len(models)} models ({names}): choose one (--member NAME)")
    if member is not None and member not in models:
        raise OptionError(f"there is no model '{member}': there are {names}")
    return models[member] if member is not None else next(iter(models.values()))


def _network(arrays: Arrays, model: nn.Module | Build | None) -> nn.Module:
    """Return a network with the weights of some arrays, at the widths that these have."""
    if model is None:
        return _linear_network(arrays)
    built = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    if not isinstance(built, nn.Module):
        raise OptionError(f"model: expected a torch.nn.Module, got {type(built).__name__}")
    state = built.state_dict()
    for name, array in arrays.items():
        if name in state and state[name].is_floating_point() != (array.dtype.kind == "f"):
            raise ModelError(
                f"array '{name}' is of type {array.dtype}, the model's is {state[name].dtype}"
            )
    return resize_model(built.cpu(), arrays).float()


def _linear_network(arrays: Arrays) -> nn.Module:
    """Return a linear layer: a matrix, and perhaps a vector with a number for each row."""
    weight, *others = sorted(arrays.values(), key=lambda array: -array.ndim)
    fits = weight.ndim == 2 and weight.size and len(others) <= 1
    fits = fits and all(each.shape == weight.shape[:1] for each in others)
    if not fits or any(array.dtype.kind != "f" for array in arrays.values()):
        shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in arrays.items())
        raise OptionError(
            f"the arrays are more than a linear layer ({shapes[:300]}): say which network they "
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
        if not math.isfinite(scale) or scale == 0:
            raise ModelError(f"scale: expected a finite number other than 0, got {scale!r}")
        self.model, self.input_shape = model.eval().requires_grad_(False), input_shape
        shape = ", ".join(map(str, self.input_shape))
        try:
            outputs = model(torch.zeros(2, *self.input_shape))
        except Exception as error:
            raise ModelError(
                f"the model does not take inputs shaped (n, {shape}): {_reason(error)}; give the "
                "shape of one example, input_shape (--input-shape 1,28,28)"
            ) from error
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != 2:
            what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ModelError(
                f"the model maps inputs shaped (2, {shape}) to {what}, expected (2, outputs)"
            )
        count = outputs.shape[1]
        if classes is None and count == 1:
            raise OptionError(
                "say what the output means: classes=['no', 'yes'] (--classes no,yes), or classes=0 "
                "for a number (--numbers)"
            )
        self.scale, self.classes = scale, count if classes is None else classes
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


# --- formats ----------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _to_program(model: Portable) -> Any:
    # Only now: it takes a while to import.
    import torch.export

    shapes = {"input": {0: torch.export.Dim("batch", min=1)}}
    try:
        with _quiet():
            inputs = (model.example(),)
            program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    except Exception as error:  # torch raises many kinds
        raise ModelError(
            f"torch.export cannot trace the model: {_reason(error)}; a network whose steps depend "
            "on the values or the number of its inputs has to be rewritten"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # files of this machine
    return program


def _to_onnx(model: Portable, facts: dict[str, str]) -> Any:
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise NotInstalledError(f"pip install 'gems-flwr[export]': ONNX needs {name}")
    import onnx

    program, names = _to_program(model), list(model.output_names)
    try:
        with _quiet():
            how: dict[str, Any] = {"dynamo": True, "verbose": False}
            made = torch.onnx.export(program, (), input_names=["input"], output_names=names, **how)
            proto = cast("Any", made).model_proto
        # What tracing notes about the code and the machine.
        graph = proto.graph
        parts = (graph.node, graph.value_info, graph.input, graph.output, graph.initializer)
        for part in (graph, *(each for group in parts for each in group)):
            del part.metadata_props[:]
            part.doc_string = ""
        onnx.helper.set_model_props(proto, facts)
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # torch and onnxscript raise many kinds, a model above 2 GiB too
        raise ModelError(
            f"the model cannot be written as ONNX: {_reason(error)}; export it --to torch"
        ) from error
    return proto


# --- gems-flwr export -------------------------------------------------------------------------

_HOW = """\
A linear model needs no options:

    gems-flwr export model.safetensors --to onnx

The model of your own Flower app (Net is a class or function in task.py):

    gems-flwr export model.safetensors --to onnx --model task:Net \\
        --input-shape 1,28,28 --scale 0.00392156862745098

Status: 0 if it was written, 2 for bad input."""


def add_export(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
    export = commands.add_parser(
        "export",
        help="write a model as ONNX or a torch program",
        description="Write a model file in a format that others read, preprocessing included.",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = export.add_argument
    add("file", type=Path, help="model.safetensors, or the folder of a run")
    add("--to", choices=list(_SUFFIXES), required=True, help="the format")
    add("-o", "--output", type=Path, help="the new file; beside the model, if not given")
    add("--model", metavar="MODULE:NAME", help="what builds the network, from the current folder")
    add("--input-shape", type=_shape_of, metavar="1,28,28", help="shape of one example")
    add("--scale", type=float, default=1.0, help="what raw values are multiplied with first; 1")
    add("--member", metavar="NAME", help="of several models, this one")
    add = export.add_mutually_exclusive_group().add_argument
    add("--classes", metavar="A,B,…", help="names of the classes, in order")
    add("--numbers", action="store_true", help="the output is a number, not a class")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    file = options.file / "model.safetensors" if options.file.is_dir() else options.file
    output = options.output or file.with_suffix(_SUFFIXES[options.to])
    if output.resolve() == file.resolve():
        raise OptionError(f"{output} is the model itself: choose another file (-o)")
    classes = options.classes
    made = export_model(
        _read_arrays(file),
        _own_network(options.model) if options.model else None,
        to=options.to,
        path=output,
        input_shape=options.input_shape,
        scale=options.scale,
        classes=0 if options.numbers else classes and [name.strip() for name in classes.split(",")],
        member=options.member,
    )
    print(
        f"{output}: input ({', '.join(map(str, ('n', *made.input_shape)))}), "
        f"outputs {', '.join(made.outputs)}\n"
        f"  tried on random inputs: differs from the torch model by at most {made.difference:.1e}"
    )
    if not options.model:
        print("taken for a linear model; if a lift or network stands below it, give --model")
    return 0


def _shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _read_arrays(path: Path) -> Arrays:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{path} is not a safetensors file that can be read: {error}") from error


def _own_network(text: str) -> Any:
    """Return what ``module:name`` names, looked up from the current folder."""
    if not all(text.partition(":")):
        raise OptionError(f"--model: expected module:name, such as task:Net, got '{text}'")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"--model {text}: {error}; run it where it can be found") from error
    finally:
        sys.path.pop(0)
    try:
        return found if isinstance(found, nn.Module) else found()
    except TypeError as error:
        raise OptionError(
            f"--model {text}: expected a network, or a function without arguments that returns "
            f"one ({error})"
        ) from error
