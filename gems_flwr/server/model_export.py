"""From a run's arrays to a file in a format that others read; see `gems_flwr.exporting`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from gems_flwr.disk.files import write_atomically
from gems_flwr.errors import ModelError, OptionError
from gems_flwr.exporting.description import ModelDescription, versions
from gems_flwr.exporting.model_file import check_arrays, filled, linear_model
from gems_flwr.exporting.portable import Portable, Vote
from gems_flwr.exporting.to_onnx import run_onnx, to_onnx
from gems_flwr.exporting.to_sklearn import sklearn_bytes, to_sklearn
from gems_flwr.exporting.to_torch import program_bytes, to_program
from gems_flwr.server.members import split_models
from gems_flwr.typing import Arrays
from gems_flwr.wire.records import to_numpy

Format = Literal["onnx", "torch", "sklearn"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "sklearn": ".skops"}
_CHECKED = 8
# Far above rounding, far below another model.
_MOST_DIFFERENCE = 1e-3


@dataclass(frozen=True, eq=False)
class ExportedModel:
    """What `export_model` made.

    Parameters
    ----------
    model : object
        An ``onnx.ModelProto``, a ``torch.export.ExportedProgram``, or an estimator.
    input_shape : tuple of int
        Shape of one example; scikit-learn takes it flattened.
    scale : float
        What the model multiplies raw values with.
    outputs : tuple of str
        What comes out, in order.
    weights : int
        How many numbers were learned.
    difference : float
        Largest difference of outputs to those of the torch model, on random inputs.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import export_model
    >>> layer = {"weight": np.eye(3), "bias": np.zeros(3)}
    >>> made = export_model(layer, to="torch")
    >>> made.outputs, made.weights
    (('logits', 'probabilities', 'label'), 12)
    """

    model: Any
    input_shape: tuple[int, ...]
    scale: float
    outputs: tuple[str, ...]
    weights: int
    difference: float


def export_model(
    arrays: ArrayRecord | Arrays,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    to: Format,
    path: str | Path | None = None,
    input_shape: Sequence[int] | None = None,
    scale: float = 1.0,
    classes: int | Sequence[str] | None = None,
    vote: Vote | None = None,
    member: str | None = None,
    source: Mapping[str, str] | None = None,
) -> ExportedModel:
    """Make a model of a run usable elsewhere, with what stands before and behind its weights.

    Parameters
    ----------
    arrays : ArrayRecord, or mapping from str to ndarray
        The weights, such as ``result.arrays``; hidden layers may have other widths than `model`.
    model : torch.nn.Module, or callable that returns one, optional
        The network; not needed for a linear model.
    to : {"onnx", "torch", "sklearn"}
        The format.
    path : path, optional
        Where to write the file; by default it is not written, only returned.
    input_shape : sequence of int, optional
        Shape of one example, as in ``(1, 28, 28)``; not needed for a linear model.
    scale : float, default 1.0
        What raw values are multiplied with before the network sees them, such as 1 / 255.
    classes : int or sequence of str, optional
        How many classes there are, or what they are called; 0: the model predicts a number. By
        default one for each output, if there are several.
    vote : {"softmax_mean", "majority"}, optional
        How the models of an `Ensemble` make one.
    member : str, optional
        Which model to take, by its name, where there are several.
    source : mapping from str to str, optional
        Where the model comes from; goes into the file (not of scikit-learn).

    Raises
    ------
    ModelError
        If arrays and network do not fit, or the format has nothing for the network.
    OptionError
        If something has to be said that was not.
    NotInstalledError
        If the extra ``export`` is needed and not there.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import export_model
    >>> layer = {"weight": np.array([[2.0, 0.0], [0.0, 2.0]]), "bias": np.zeros(2)}
    >>> made = export_model(layer, to="sklearn", scale=1 / 16, classes=["cat", "dog"])
    >>> made.model.predict([[16, 0], [3, 9]])
    array(['cat', 'dog'], dtype='<U3')
    """
    if to not in get_args(Format):
        raise OptionError(f"to: expected one of {list(get_args(Format))}, got {to!r}")
    plain = to_numpy(arrays) if isinstance(arrays, ArrayRecord) else _numpy(arrays)
    check_arrays(plain)
    networks = [_network(each, model) for each in _chosen(plain, member, vote)]
    count, names = _classes(classes)
    said = ModelDescription(
        _shape(networks[0], input_shape), _count(networks[0], count), float(scale)
    )
    portable = Portable(
        networks, input_shape=said.input_shape, scale=said.scale, classes=said.classes, vote=vote
    )
    told = {**versions(), **(source or {}), "scale": repr(said.scale)}
    if names:
        told["classes"] = ", ".join(names)
    made, data = _make(portable, to, names, told, write=path is not None)
    if path is not None:
        write_atomically(Path(path), data)
    return made


def _make(
    portable: Portable, to: Format, names: list[str] | None, source: Mapping[str, str], write: bool
) -> tuple[ExportedModel, bytes]:
    inputs, data = portable.example(_CHECKED), b""
    with torch.no_grad():
        expected = [each.numpy() for each in portable(inputs)]
    outputs: tuple[str, ...] = portable.output_names
    if to == "onnx":
        made = to_onnx(portable, source)
        data = made.SerializeToString()
        got = run_onnx(data, inputs)
    elif to == "torch":
        made = to_program(portable)
        got = [each.numpy() for each in made.module()(inputs)]
        data = program_bytes(made, source) if write else b""
    else:
        made = to_sklearn(portable, names)
        outputs = ("predict_proba", "predict") if hasattr(made, "predict_proba") else ("predict",)
        got = [getattr(made, name)(inputs.flatten(1).double().numpy()) for name in outputs]
        expected = _as_sklearn(expected[-len(outputs) :], portable.classes, names)
        data = sklearn_bytes(made) if write else b""
    # Labels are left to their outputs: two that are nearly equal may change places.
    floats = [(a, b) for a, b in zip(expected, got, strict=True) if a.dtype.kind == "f"]
    difference = max((float(np.abs(a - b).max(initial=0.0)) for a, b in floats), default=0.0)
    if not difference <= _MOST_DIFFERENCE:
        raise ModelError(
            f"the exported model is another: its outputs differ by {difference:.3g}; please report "
            "it, with the network"
        )
    return (
        ExportedModel(
            made, portable.input_shape, portable.scale, outputs, portable.weights, difference
        ),
        data,
    )


def _as_sklearn(expected: list[Any], classes: int, names: list[str] | None) -> list[Any]:
    """Return outputs as an estimator has them: classes by name, and in the order of names."""
    if not classes:
        return expected
    labels = np.array(names) if names else np.arange(classes)
    *probabilities, label = expected
    return [*(each[:, np.argsort(labels)] for each in probabilities), labels[label]]


def _numpy(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.asarray(each.numpy() if hasattr(each, "numpy") else each)
        for name, each in arrays.items()
    }


def _chosen(arrays: Arrays, member: str | None, vote: Vote | None) -> list[Arrays]:
    """Return the models to export: one, or all that vote."""
    models = split_models(arrays)
    if member is not None:
        if member not in models:
            raise OptionError(f"there is no model '{member}': there are {_listed(models)}")
        return [models[member]]
    if len(models) > 1 and vote is None:
        raise OptionError(
            f"there are {len(models)} models ({_listed(models)}): choose one (--member NAME), or "
            "let all vote (--vote softmax_mean or majority)"
        )
    return list(models.values())


def _listed(models: Mapping[str, Any]) -> str:
    names = list(models)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _network(arrays: Arrays, model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    if model is None:
        linear = linear_model(arrays)
        if linear is None:
            shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in arrays.items())
            raise OptionError(
                f"the arrays are more than a linear layer ({shapes[:300]}): say which network they "
                "belong to (model, --model module:Net)"
            )
        return linear
    built = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    if not isinstance(built, nn.Module):
        raise OptionError(f"model: expected a torch.nn.Module, got {type(built).__name__}")
    return filled(built, arrays)


def _shape(network: nn.Module, shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shape of one example: as said, or of a vector that the first layer takes."""
    if shape is not None:
        return tuple(shape)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
    first = next((each for each in network.modules() if isinstance(each, kinds)), None)
    lifted = any(hasattr(each, "features") for each in network.modules())
    if not isinstance(first, nn.Linear) or lifted:
        raise OptionError(
            "say what shape one example has: input_shape=(1, 28, 28), --input-shape 1,28,28"
        )
    return (first.in_features,)


def _count(network: nn.Module, classes: int | None) -> int:
    if classes is not None:
        return classes
    layers = [each for each in network.modules() if isinstance(each, nn.Linear)]
    if not layers or layers[-1].out_features == 1:
        raise OptionError(
            "say what the output means: classes=['no', 'yes'] (--classes no,yes), or classes=0 for "
            "a number (--numbers)"
        )
    return layers[-1].out_features


def _classes(classes: int | Sequence[str] | None) -> tuple[int | None, list[str] | None]:
    """Return how many classes there are, and what they are called, as far as it was said."""
    if classes is None or isinstance(classes, int):
        return classes, None
    names = [str(each) for each in classes]
    if len(set(names)) != len(names) or len(names) < 2:
        raise OptionError(f"classes: expected at least two different names, got {names}")
    return len(names), names
