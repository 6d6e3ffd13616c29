"""A model as ONNX: one file for onnxruntime and whatever else reads it, in any language.

Input ``input`` (float32, any number of examples), outputs as `Portable.output_names` has them.
``metadata_props`` say where the model comes from. Weights are in the file itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Mapping
from typing import Any

import torch

from gems_flwr.errors import ModelError, NotInstalledError
from gems_flwr.exporting.portable import Portable
from gems_flwr.exporting.to_torch import quiet, to_program

_NEEDED = ("onnx", "onnxscript")
# What a file of protobuf can hold.
_MOST_BYTES = 2**31 - 2**20


def to_onnx(model: Portable, source: Mapping[str, str]) -> Any:
    """Return a model as an ``onnx.ModelProto``, checked.

    Parameters
    ----------
    model : Portable
        What to export.
    source : mapping from str to str
        Goes into ``metadata_props``.

    Raises
    ------
    ModelError
        If the model cannot be exported, or is too large for one file.
    NotInstalledError
        If the extra ``export`` is not there.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise NotInstalledError(f"pip install 'gems-flwr[export]': ONNX needs {', '.join(missing)}")
    import onnx

    size = sum(each.numel() * each.element_size() for each in model.state_dict().values())
    if size > _MOST_BYTES:
        raise ModelError(
            f"the model has {size:,} bytes, one ONNX file holds 2 GiB; export it --to torch"
        )
    program = to_program(model)
    try:
        # It talks to standard output.
        with quiet(), contextlib.redirect_stdout(io.StringIO()):
            made = torch.onnx.export(
                program,
                (),
                dynamo=True,
                input_names=["input"],
                output_names=list(model.output_names),
                verbose=False,
            )
            assert made is not None
            proto = made.model_proto
    except Exception as error:  # torch and onnxscript raise many kinds
        first = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the model cannot be written as ONNX: {type(error).__name__}: {first}; "
            "export it --to torch"
        ) from error
    _plain(proto)
    onnx.helper.set_model_props(proto, {str(key): str(text) for key, text in source.items()})
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _plain(proto: Any) -> None:
    """Take out what tracing noted about the code and the machine; call the batch axis so."""
    graph = proto.graph
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    del graph.metadata_props[:]
    names = {graph.input[0].type.tensor_type.shape.dim[0].dim_param}
    for part in (*graph.input, *graph.output, *graph.value_info):
        for axis in part.type.tensor_type.shape.dim:
            if axis.dim_param in names and axis.dim_param:
                axis.dim_param = "batch"


def run_onnx(data: bytes, inputs: torch.Tensor) -> list[Any]:
    """Return what an ONNX model makes of inputs: by onnxruntime, or else onnx's own evaluator."""
    feeds = {"input": inputs.numpy()}
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
        return list(session.run(None, feeds))
    import onnx
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(onnx.load_from_string(data)).run(None, feeds))
