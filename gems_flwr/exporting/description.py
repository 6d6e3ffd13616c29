"""What a model file does not say of its model: the inputs, the scale, the classes, the network.

A run of the ready simulations writes it as ``model.json`` beside ``model.safetensors``. It is a
file like any other that comes with a model: checked, and never code. The network is a function of
this project's with its options, by name; whose it is, is for whoever calls it to check.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from gems_flwr.disk.faults import disk_faults
from gems_flwr.errors import ModelError

FILE = "model.json"
# How several models in one file belong together.
Together = Literal["softmax_mean", "majority", "each"]
_LONGEST_AXIS = 2**31


@dataclass(frozen=True)
class ModelDescription:
    """One model.

    Parameters
    ----------
    input_shape : tuple of int
        Shape of one example.
    classes : int
        Number of classes; 0: the model predicts a number.
    scale : float
        What stored values are multiplied with before the model sees them.
    network : mapping
        ``_target_``, the function that builds it, and its options.
    """

    input_shape: tuple[int, ...]
    classes: int
    scale: float = 1.0
    network: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.input_shape
        if not shape or not all(type(n) is int and 1 <= n < _LONGEST_AXIS for n in shape):
            raise ModelError(f"input_shape: expected whole numbers from 1, got {shape}")
        if type(self.classes) is not int or self.classes < 0 or self.classes == 1:
            raise ModelError(f"classes: expected 0 or at least 2, got {self.classes!r}")
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not number or not math.isfinite(self.scale) or self.scale == 0:
            raise ModelError(f"scale: expected a finite number other than 0, got {self.scale!r}")
        if not isinstance(self.network, Mapping):
            raise ModelError(f"network: expected an object, got {self.network!r}")


@dataclass(frozen=True)
class RunDescription:
    """All models of a run.

    Parameters
    ----------
    models : mapping from str to ModelDescription
        By name; one alone is called ``model``, and then the file may hold it once for every node.
    together : str, optional
        What to make of one model for every node: let them vote, or take each by itself.
    source : mapping from str to str
        Where they come from, in a few words.
    """

    models: Mapping[str, ModelDescription]
    together: Together | None = None
    source: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of ``model.json``."""
        return json.dumps({"format": 1, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> RunDescription:
        """Return what `to_json` wrote.

        Raises
        ------
        ModelError
            Says what is strange.
        """
        try:
            values = json.loads(text)
            if values["format"] != 1:
                raise ModelError(f"format: expected 1, got {values['format']!r}")
            models = {
                str(name): ModelDescription(**{**each, "input_shape": tuple(each["input_shape"])})
                for name, each in values["models"].items()
            }
            together = values["together"]
            source = {str(key): str(value) for key, value in values["source"].items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{type(error).__name__}: {error}") from error
        if not models or together not in (None, *get_args(Together)):
            raise ModelError(f"{len(models)} models, together {together!r}")
        return cls(models, together, source)


def versions() -> dict[str, str]:
    """Return what a model is made with here."""
    packages = ("gems-flwr", "flwr", "torch", "numpy")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a folder that was never installed
        return "not installed"


def read_description(folder: Path) -> RunDescription | None:
    """Return what a run says of its models; None if there is no ``model.json``.

    Raises
    ------
    ModelError
        If the file is none of ours.
    DiskError
        If it cannot be read.
    """
    path = folder / FILE
    with disk_faults(f"read {path}"):
        if not path.is_file():
            return None
        data = path.read_bytes()
    try:
        return RunDescription.from_json(data)
    except ModelError as error:
        raise ModelError(
            f"{path} is not what a run writes: {error}; move it away and say what the model is "
            "(--model, --input-shape, --scale, --classes)"
        ) from error
