"""Which device tensors are computed on: decided here, and nowhere else.

A name is ``cpu``, ``cuda``, ``mps``, ``xpu`` or ``xla``, with a number where there are several
(``cuda:1``), or ``auto``: the first accelerator that PyTorch finds, else the processor. ``xla``
(torch_xla) is taken only if it is asked for, because looking for it starts its runtime.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from gems_flwr.errors import OptionError
from gems_flwr.typing import Float

KINDS = ("cpu", "cuda", "mps", "xpu", "xla")
# In this order; xla has to be asked for.
_AUTOMATIC = ("cuda", "xpu", "mps")
CPU = torch.device("cpu")


def check_device(name: str) -> str:
    """Return the name of a device if there could be one; `chosen_device` looks for it.

    PyTorch has to know of xla before it computes any gradient, and options are checked early: where
    torch_xla is installed and asked for, it is started here.
    """
    kind, colon, number = str(name).partition(":")
    if name == "auto" or (kind in KINDS and (number.isdecimal() or not colon)):
        if kind == "xla" and _is_there(kind):
            importlib.import_module("torch_xla").device()
        return str(name)
    raise OptionError(f"device must be one of {', '.join(KINDS)} or auto, got {name!r}")


def chosen_device(name: str | torch.device) -> torch.device:
    """Return the device of a name; an OptionError where this machine has none."""
    name = check_device(str(name))
    if name == "auto":
        return torch.device(next((kind for kind in _AUTOMATIC if _is_there(kind)), "cpu"))
    kind, _, number = name.partition(":")
    if not _is_there(kind):
        found = [each for each in ("cpu", *_AUTOMATIC) if _is_there(each)]
        missing = "torch_xla is not installed" if kind == "xla" else "PyTorch finds none"
        raise OptionError(
            f"device={name} was asked for, but {missing}; there is {', '.join(found)}, and "
            "device=auto takes the best of them"
        )
    if kind == "xla":  # its own runtime counts them
        return torch.device("xla", int(number or 0))
    count = getattr(torch, kind).device_count() if kind in _AUTOMATIC else 1
    if number and int(number) >= count:
        raise OptionError(f"device={name} was asked for, but there are {count}, from {kind}:0")
    return torch.device(name)


def home_device(build: Callable[[], nn.Module] | None) -> str:
    """Return where a model is built, which is where it is used by default."""
    if build is None:
        return "cpu"
    # Building a model draws its weights; what a handler draws afterwards must not change.
    with torch.random.fork_rng(devices=[]):
        return next((str(weight.device) for weight in build().parameters()), "cpu")


def exact_device(name: str | torch.device) -> torch.device:
    """Return where double precision is computed: on the device, or on the CPU where it has none.

    Class moments, the cone objective, radii and sums of losses are in double precision, because
    cones are solved to seven digits and certified radii have to hold. Apple's GPUs (mps) have none:
    there the model runs on the GPU, and what is made of its outputs on the CPU.
    """
    device = name if isinstance(name, torch.device) else chosen_device(name)
    return device if _has_double(device) else CPU


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision, on its device or the CPU."""
    return tensor.to(exact_device(tensor.device), torch.float64)


def sum_type(device: torch.device) -> torch.dtype:
    """Return the type in which a device adds up what is only reported, such as losses."""
    return torch.float64 if _has_double(device) else torch.float32


def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether PyTorch has SGD and Adam in one kernel for a device, in every release."""
    return device.type in ("cpu", "cuda")


def end_step(device: torch.device) -> None:
    """Mark the end of a training step.

    xla collects operations until a number is read, and would compile a whole epoch as one program.
    """
    if device.type == "xla":
        importlib.import_module("torch_xla").sync()


@contextmanager
def moved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put a model on a device, and back to where it was afterwards, with the same parameters.

    ``Module.to`` keeps parameters for most devices and makes new ones for xla: hooks on the old
    ones (corrections of gradients) go over to the new ones for the time being.
    """
    home = next((weight.device for weight in model.parameters()), device)
    if home == device:
        model.to(device)
        yield
        return
    before = [
        (module, name, tensor)
        for module in model.modules()
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None
    ]
    try:
        model.to(device)
        for module, name, old in before:
            if (new := getattr(module, name)) is not old:
                for hook in (old._backward_hooks or {}).values():
                    new.register_hook(hook)
        yield
    finally:
        model.to(home)
        for module, name, old in before:
            if (new := getattr(module, name, old)) is not old:
                old.data = new.detach()
                setattr(module, name, old)


@contextmanager
def seeded_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seed what a model on a device draws from, such as dropout; restore generators afterwards.

    The library itself draws with generators of the CPU; a model's own draws are on its device,
    whose generator has other numbers for the same seed.
    """
    has_own = device.type in ("cuda", "xpu")
    # Seeded one by one: torch.manual_seed would also reset generators that are not saved here.
    kind = device.type if has_own else "cuda"
    with torch.random.fork_rng([device] if has_own else [], device_type=kind):
        torch.default_generator.manual_seed(seed)
        if has_own:
            with getattr(torch, device.type).device(device):
                getattr(torch, device.type).manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        elif device.type == "xla":
            importlib.import_module("torch_xla").manual_seed(seed)
        yield


def _has_double(device: torch.device) -> bool:
    return device.type != "mps"


def _is_there(kind: str) -> bool:
    if kind == "xla":
        return importlib.util.find_spec("torch_xla") is not None
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu" or bool(getattr(torch, kind).is_available())


# --- algebra of NumPy's arrays ------------------------------------------------------------------
# Merging, heads and private steps are written with NumPy. On the CPU they stay so to the last
# digit; on another device the one expensive factorisation of each is done there.


def solves_elsewhere(device: str | torch.device) -> bool:
    """Return whether a device other than the CPU is to solve."""
    return exact_device(device).type != "cpu"


def solve_positive(matrix: Float, right: Float, device: str | torch.device) -> Float:
    """Return ``matrix^-1 right``; a numpy LinAlgError if the matrix is not positive definite."""
    where = exact_device(device)
    factor, wrong = torch.linalg.cholesky_ex(torch.from_numpy(np.array(matrix)).to(where))
    if int(wrong):
        raise np.linalg.LinAlgError("the matrix is not positive definite")
    found = torch.cholesky_solve(torch.from_numpy(np.array(right)).to(where), factor)
    return np.asarray(found.cpu().numpy())


def eigenpairs(matrix: Float, device: str | torch.device) -> tuple[Float, Float]:
    """Return eigenvalues, rising, and eigenvectors as columns of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(np.array(matrix)).to(exact_device(device)))
    return np.asarray(values.cpu().numpy()), np.asarray(vectors.cpu().numpy())
