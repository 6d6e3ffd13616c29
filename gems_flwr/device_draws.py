"""Random numbers that do not depend on the device: drawn on the CPU, and moved.

A GPU has a generator of its own, whose numbers differ from the CPU's for the same seed. Wherever
this library draws (orders, directions, starts of clusters), it draws with a generator of the CPU.
What is left is what a model draws by itself while it trains: dropout, and noise that a `forward`
adds. While `seeded_draws` lasts, functions of torch that draw do so on the CPU if their tensors are
elsewhere.

Decided here: dropout's mask alone crosses over. What draws inside one kernel of torch (recurrent
layers with ``dropout=``, attention with ``dropout_p``) cannot be caught; it draws on the device,
from the same seed, and so is the same in every repetition on that device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
# Those whose result is the input times a mask.
_MASKS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
# Those that are computed on the CPU as a whole.
_OTHERS = (
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
    torch.randperm,
)
_IN_PLACE = (
    Tensor.bernoulli_,
    Tensor.cauchy_,
    Tensor.exponential_,
    Tensor.geometric_,
    Tensor.log_normal_,
    Tensor.normal_,
    Tensor.random_,
    Tensor.uniform_,
)


@contextmanager
def seeded_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seed what models draw from, draw on the CPU, and restore the generators' state afterwards.

    Parameters
    ----------
    seed : int
        At least 0.
    device : torch.device
        Where the model is.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr.device_draws import seeded_draws
    >>> with seeded_draws(0, torch.device("cpu")):
    ...     first = torch.rand(1)
    >>> with seeded_draws(0, torch.device("cpu")):
    ...     bool(torch.rand(1) == first)
    True
    """
    # Generators are seeded one by one: torch.manual_seed would also reset those not saved here.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if device.type == "cpu":
            yield
            return
        with _own_generator_seeded(seed, device), _DrawsOnCpu():
            yield


@contextmanager
def _own_generator_seeded(seed: int, device: torch.device) -> Iterator[None]:
    if device.type == "xla":
        # torch_xla has no public module of this kind; what it draws is seeded by itself.
        yield
        return
    own: Any = getattr(torch, device.type)
    where = () if device.type == "mps" else (device,)
    state = own.get_rng_state(*where)
    try:
        if where:
            with own.device(device):
                own.manual_seed(seed)
        else:
            own.manual_seed(seed)
        yield
    finally:
        own.set_rng_state(state, *where)


class _DrawsOnCpu(TorchFunctionMode):
    """Lets torch's functions draw on the CPU whatever device their tensors are on."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        where = _device_of(args, options)
        if where.type == "cpu":
            return func(*args, **options)
        if func in _MASKS:
            return _masked(func, *args, **options)
        if func in _OTHERS:
            return _computed(func, args, options, where)
        if func in _IN_PLACE:
            drawn = func(torch.empty_like(args[0], device=_CPU), *args[1:], **options)
            return args[0].copy_(drawn)
        return func(*args, **options)


def _device_of(args: tuple[Any, ...], options: Mapping[str, Any]) -> torch.device:
    named = options.get("device")
    if named is not None:
        return torch.device(named)
    tensors = (each for each in (*args, *options.values()) if isinstance(each, Tensor))
    return next((each.device for each in tensors), _CPU)


def _masked(
    func: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training:
        return input
    mask = func(torch.ones(input.shape, dtype=input.dtype), p, True).to(input.device)
    return input.mul_(mask) if inplace else input * mask


def _computed(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    where: torch.device,
) -> Any:
    def home(value: Any) -> Any:
        return value.to(_CPU) if isinstance(value, Tensor) else value

    generator = options.get("generator")
    if generator is not None and generator.device.type != "cpu":
        # Whoever brings a generator of the device wants its numbers.
        return func(*args, **options)
    if options.get("device") is not None:
        options["device"] = _CPU
    result = func(*map(home, args), **{key: home(value) for key, value in options.items()})
    return result.to(where)
