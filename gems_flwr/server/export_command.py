"""``gems-flwr export``: a model file as ONNX, a torch program, or a scikit-learn estimator.

What the file does not say (the network, the shape of an example, the scale) stands in
``model.json`` beside it, where a run of the ready simulations wrote it; of other models the options
say it. A linear model needs nothing but the file.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn

from gems_flwr.errors import OptionError
from gems_flwr.exporting.description import ModelDescription, RunDescription, read_description
from gems_flwr.exporting.model_file import read_model_file
from gems_flwr.runtime.ready_simulations import network_of
from gems_flwr.server.members import ONLY_MODEL, split_models
from gems_flwr.server.model_export import SUFFIXES, ExportedModel, Format, export_model

_HOW = """\
A run's own file, or a linear model, needs no options:

    gems-flwr export runs/my-run/model.safetensors --to onnx

The model of your own Flower app (Net is a class or function in task.py):

    gems-flwr export model.safetensors --to onnx --model task:Net \\
        --input-shape 1,28,28 --scale 0.00392156862745098

Status: 0 if it was written, 2 for bad input."""


def add_export(commands: Any) -> None:
    """Add the command to the parser of ``gems-flwr``."""
    export = commands.add_parser(
        "export",
        help="write a model as ONNX, a torch program or a scikit-learn estimator",
        description="Write a model file in a format that others read, preprocessing included.",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("file", type=Path, help="model.safetensors, or the folder of a run")
    export.add_argument("--to", choices=list(SUFFIXES), required=True, help="the format")
    export.add_argument(
        "-o", "--output", type=Path, help="the new file; beside the model, if not given"
    )
    export.add_argument(
        "--model", metavar="MODULE:NAME", help="what builds the network, from the current folder"
    )
    export.add_argument(
        "--input-shape", metavar="1,28,28", help="shape of one example, without the batch"
    )
    export.add_argument(
        "--scale", type=float, help="what raw values are multiplied with before the network; 1"
    )
    meaning = export.add_mutually_exclusive_group()
    meaning.add_argument("--classes", metavar="A,B,…", help="names of the classes, in order")
    meaning.add_argument(
        "--numbers", action="store_true", help="the output is a number, not a class"
    )
    several = export.add_mutually_exclusive_group()
    several.add_argument("--member", metavar="NAME", help="of several models, this one")
    several.add_argument(
        "--vote", choices=["softmax_mean", "majority"], help="of several models, what all say"
    )
    export.set_defaults(run=run_export)


def run_export(options: argparse.Namespace) -> int:
    """Export a file and say what came of it."""
    file = options.file / "model.safetensors" if options.file.is_dir() else options.file
    arrays = read_model_file(file)
    told = read_description(file.parent)
    said = None if options.model else told
    described, vote = _described(said, arrays, options)
    network: nn.Module | Callable[[], nn.Module] | None = None
    if options.model:
        network = _own_network(options.model)
    elif described is not None:
        network = network_of(described.network, described.input_shape, described.classes)
    to = cast(Format, options.to)
    output = options.output or file.with_suffix(SUFFIXES[to])
    if output.resolve() == file.resolve():
        raise OptionError(f"{output} is the model itself: choose another file (-o)")
    shape, scale = _shape(options.input_shape), options.scale
    if described is not None:
        shape = shape or described.input_shape
        scale = described.scale if scale is None else scale
    made = export_model(
        arrays,
        network,
        to=to,
        path=output,
        input_shape=shape,
        scale=1.0 if scale is None else scale,
        classes=_classes(options, described),
        vote=vote,
        member=options.member,
        source=told.source if told else None,
    )
    print(_line(output, made, to))
    if network is None and len(arrays) <= 2:
        print("taken for a linear model; if a lift or network stands below it, give --model")
    return 0


def _described(
    run: RunDescription | None, arrays: Any, options: argparse.Namespace
) -> tuple[ModelDescription | None, Any]:
    """Return what a run says of the model, and how its models vote."""
    if run is None:
        return None, options.vote
    vote = options.vote
    if list(run.models) == [ONLY_MODEL]:
        if vote is None and options.member is None and run.together in ("softmax_mean", "majority"):
            vote = run.together
        return run.models[ONLY_MODEL], vote
    if vote is not None:
        raise OptionError("these are models of different tasks, which do not vote: --member NAME")
    names = list(split_models(arrays))
    if options.member not in run.models:
        raise OptionError(f"which of the models: --member, one of {', '.join(names)}")
    return run.models[options.member], None


def _own_network(text: str) -> Any:
    """Return what ``module:name`` names, looked up from the current folder."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise OptionError(f"--model: expected module:name, such as task:Net, got '{text}'")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"--model {text}: {error}; run it where {module} can be found") from error
    finally:
        sys.path.pop(0)
    if not isinstance(found, nn.Module) and not callable(found):
        raise OptionError(f"--model {text}: expected a network or what builds one, got {found!r}")
    if isinstance(found, nn.Module):
        return found
    return lambda: _built(text, found)


def _built(text: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except TypeError as error:
        raise OptionError(
            f"--model {text} cannot be called without arguments ({error}): name a function that "
            "can, and returns the network"
        ) from error


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--input-shape: expected numbers like 1,28,28, got '{text}'") from None


def _classes(
    options: argparse.Namespace, described: ModelDescription | None
) -> int | list[str] | None:
    if options.numbers:
        return 0
    if options.classes is not None:
        return [name.strip() for name in options.classes.split(",")]
    return None if described is None else described.classes


def _line(path: Path, made: ExportedModel, to: str) -> str:
    flat = (math.prod(made.input_shape),) if to == "sklearn" else made.input_shape
    shape = ", ".join(map(str, ("n", *flat)))
    scale = "" if made.scale == 1 else f" of raw values, which it multiplies by {made.scale:g}"
    return (
        f"{path}: {made.weights:,} weights\n"
        f"  input ({shape}){scale}; outputs {', '.join(made.outputs)}\n"
        f"  tried on random inputs: differs from the torch model by at most {made.difference:.1e}"
    )
