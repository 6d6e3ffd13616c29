"""Which device tensors are computed on: decided here, and nowhere else.

A name is ``cpu``, ``cuda``, ``mps``, ``xpu`` or ``xla``, with a number behind it where there are
several (``cuda:1``), or ``auto``: the first accelerator that PyTorch finds, else the processor.
``xla`` (torch_xla) is taken only if it is asked for, because looking for it starts its runtime.
"""

from __future__ import annotations

import importlib.util

import torch

from gems_flwr.errors import OptionError

KINDS = ("cpu", "cuda", "mps", "xpu", "xla")
# In this order; xla has to be asked for.
_AUTOMATIC = ("cuda", "xpu", "mps")


def check_device(name: str) -> str:
    """Return the name of a device; whether this machine has it is for `chosen_device` to say.

    Raises
    ------
    OptionError
        If it is none that there could be.
    """
    kind, colon, number = str(name).partition(":")
    if name == "auto" or (kind in KINDS and (number.isdecimal() or not colon)):
        return str(name)
    raise OptionError(f"device must be one of {', '.join(KINDS)} or auto, got {name!r}")


def chosen_device(name: str | torch.device) -> torch.device:
    """Return the device of a name.

    Raises
    ------
    OptionError
        If there is no such device, or not on this machine.

    Examples
    --------
    >>> from gems_flwr.devices import chosen_device
    >>> chosen_device("cpu")
    device(type='cpu')
    """
    name = check_device(str(name))
    if name == "auto":
        return torch.device(next((kind for kind in _AUTOMATIC if _is_there(kind)), "cpu"))
    kind = name.partition(":")[0]
    if not _is_there(kind):
        found = [each for each in ("cpu", *_AUTOMATIC) if _is_there(each)]
        missing = "torch_xla is not installed" if kind == "xla" else "PyTorch finds none"
        raise OptionError(
            f"device={name} was asked for, but {missing}; there is {', '.join(found)}, and "
            "device=auto takes the best of them"
        )
    if kind == "xla":
        # PyTorch knows the device only once this is imported.
        importlib.import_module("torch_xla")
        return torch.device("xla", int(name.partition(":")[2] or 0))
    return torch.device(name)


def _is_there(kind: str) -> bool:
    if kind == "xla":
        return importlib.util.find_spec("torch_xla") is not None
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu" or bool(getattr(torch, kind).is_available())
