"""The one call in a train handler that keeps the layers which all nodes share out of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Message, RecordDict
from torch import nn

from gems_flwr.errors import ModelError
from gems_flwr.networks.surgery import freeze_lowest
from gems_flwr.wire.asking import frozen_layers
from gems_flwr.wire.keys import FROZEN_LAYERS


def freeze_layers(model: nn.Module, msg: Message | Mapping[str, Any] | int) -> None:
    """Keep the layers out of training that the server wants left as they are.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place: the weights of the lowest layers get no gradients. Nothing changes where
        the message asks for none, so the call can stay in an app with any strategy.
    msg : Message, or mapping, or int
        What the train handler was called with; or its config; or how many layers.

    Examples
    --------
    >>> from torch import nn
    >>> from gems_flwr import freeze_layers
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> freeze_layers(model, {"frozen-layers": 1})  # in a handler: freeze_layers(model, msg)
    >>> [name for name, weight in model.named_parameters() if weight.requires_grad]
    ['2.weight', '2.bias']
    """
    freeze_lowest(model, _count(msg))


def _count(msg: Message | Mapping[str, Any] | int) -> int:
    if isinstance(msg, Message):
        return frozen_layers(msg.content)
    if isinstance(msg, RecordDict):
        return frozen_layers(msg)
    if isinstance(msg, Mapping):
        return int(msg.get(FROZEN_LAYERS, 0))
    if isinstance(msg, int):
        return msg
    raise ModelError(f"write freeze_layers(model, msg) with the message, got {type(msg).__name__}")
