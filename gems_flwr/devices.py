"""Which device tensors are computed on: decided here, and nowhere else.

A name is ``cpu``, ``cuda``, ``mps``, ``xpu`` or ``xla``, with a number behind it where there are
several (``cuda:1``), or ``auto``: the first accelerator that PyTorch finds, else the processor.
``xla`` (torch_xla) is taken only if it is asked for, because looking for it starts its runtime.

What a device can and cannot do is decided here, too: whether it has double precision, fused
optimisers, and when a step ends. Where random numbers come from stands in
`gems_flwr.device_draws`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gems_flwr.errors import OptionError

KINDS = ("cpu", "cuda", "mps", "xpu", "xla")
# In this order; xla has to be asked for.
_AUTOMATIC = ("cuda", "xpu", "mps")


def check_device(name: str) -> str:
    """Return the name of a device; whether this machine has it is for `chosen_device` to say.

    Options are checked early, and PyTorch has to know of xla before it computes any gradient: where
    torch_xla is installed and asked for, it is started here.

    Raises
    ------
    OptionError
        If it is none that there could be.
    """
    kind, colon, number = str(name).partition(":")
    if name == "auto" or (kind in KINDS and (number.isdecimal() or not colon)):
        if kind == "xla" and _is_there(kind):
            _start_xla()
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
    _check_number(name, kind, name.partition(":")[2])
    if kind == "xla":
        return torch.device("xla", int(name.partition(":")[2] or 0))
    return torch.device(name)


def home_device(build: Callable[[], nn.Module] | None) -> str:
    """Return where a model is built: there it is to be used unless somebody says otherwise."""
    if build is None:
        return "cpu"
    # What a handler draws afterwards is the same as if nobody had looked.
    with torch.random.fork_rng(devices=[]):
        return next((str(weight.device) for weight in build().parameters()), "cpu")


def exact_device(name: str | torch.device) -> torch.device:
    """Return where double precision is computed: on the device, or on the CPU where it has none.

    Class moments, the cone objective, radii and sums of losses are computed in double precision,
    because cones are solved to seven digits and certified radii have to hold. Apple's GPUs (mps)
    have no double precision. There the model runs on the GPU, and what is made of its outputs on
    the CPU.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr.devices import exact_device
    >>> exact_device(torch.device("mps"))
    device(type='cpu')
    """
    device = name if isinstance(name, torch.device) else chosen_device(name)
    return device if _has_double(device) else torch.device("cpu")


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision, where its device or the CPU has it."""
    return tensor.to(exact_device(tensor.device), torch.float64)


def sum_type(device: torch.device) -> torch.dtype:
    """Return the type in which a device adds up what is only told, such as the loss of an epoch."""
    return torch.float64 if _has_double(device) else torch.float32


def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether PyTorch has SGD and Adam in one kernel for a device, in every release."""
    return device.type in ("cpu", "cuda")


def end_step(device: torch.device) -> None:
    """Tell a device that one step of training ends here.

    xla collects operations until somebody looks at a number, and would compile a whole epoch as one
    program. The others need not be told.
    """
    if device.type == "xla":
        importlib.import_module("torch_xla").sync()


@contextmanager
def moved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put a model on a device, and back to where it was afterwards.

    The model has the same parameters afterwards, with what was made of them. ``Module.to`` keeps
    them for most devices and makes new ones for xla, which nobody else would know of: hooks on the
    old ones (corrections of gradients) therefore go over to the new ones for the time being.
    """
    home = next((weight.device for weight in model.parameters()), device)
    if home == device:
        model.to(device)
        yield
        return
    before = _slots(model)
    try:
        model.to(device)
        for (module, name), old in before.items():
            new = getattr(module, name)
            if new is not old:
                for hook in (old._backward_hooks or {}).values():
                    new.register_hook(hook)
        yield
    finally:
        model.to(home)
        for (module, name), old in before.items():
            new = getattr(module, name, None)
            if new is not old and new is not None:
                old.data = new.detach()
                setattr(module, name, old)


def _slots(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    return {
        (module, name): tensor
        for module in model.modules()
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    }


def _has_double(device: torch.device) -> bool:
    return device.type != "mps"


def _is_there(kind: str) -> bool:
    if kind == "xla":
        return importlib.util.find_spec("torch_xla") is not None
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu" or bool(getattr(torch, kind).is_available())


def _start_xla() -> None:
    """Start torch_xla, before the first gradient of this process: later PyTorch does not see it."""
    importlib.import_module("torch_xla").device()


def _check_number(name: str, kind: str, number: str) -> None:
    """Refuse the second of one device; of xla its own runtime knows."""
    count = getattr(torch, kind).device_count() if kind in ("cuda", "xpu", "mps") else 1
    if number and kind != "xla" and int(number) >= count:
        raise OptionError(f"device={name} was asked for, but there are {count}, from {kind}:0")
