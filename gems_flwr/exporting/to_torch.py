"""A model as a torch program (``.pt2``): it loads where torch is, without this library.

    program = torch.export.load("model.pt2").module()
    logits, probabilities, label = program(inputs)

The number of inputs at once is free. What tracing notes about the machine it ran on (files and
lines of every operation) is taken out of the program.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gems_flwr.errors import ModelError
from gems_flwr.exporting.portable import Portable

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# Beside the program in the file; torch.export.load(…, extra_files={"source.json": ""}) reads it.
SOURCE = "source.json"
# More than one, which tracing would take for a constant.
_TRACED = 2


def to_program(model: Portable) -> ExportedProgram:
    """Return a model as a program for any number of inputs.

    Raises
    ------
    ModelError
        If the network does what cannot be written down as a program.
    """
    # Only now: it takes a while to import.
    import torch.export

    batch = torch.export.Dim("batch", min=1)
    try:
        with quiet():
            program = torch.export.export(
                model, (model.example(_TRACED),), dynamic_shapes={"input": {0: batch}}
            )
    except Exception as error:  # torch raises many kinds
        first = " ".join(str(error).split())[:300]
        raise ModelError(
            f"torch.export cannot trace the model: {type(error).__name__}: {first}; a network "
            "whose steps depend on the values or the number of its inputs has to be rewritten"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def program_bytes(program: ExportedProgram, source: Mapping[str, str]) -> bytes:
    """Return the ``.pt2`` file of a program, with where it comes from beside it."""
    import torch.export

    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer, extra_files={SOURCE: json.dumps(dict(source))})
    return buffer.getvalue()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch says about its own insides off the screen."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
