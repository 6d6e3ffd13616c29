"""What a node with data for several models has to say of each: how many samples, which loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Context
from torch import nn

from gems_flwr.devices import home_device
from gems_flwr.errors import ModelError
from gems_flwr.networks.inputs import Data, LayerReader, linear_layer
from gems_flwr.networks.node_data import count_samples, is_read_once, read_node_data
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.quality import Quality
from gems_flwr.wire.records import to_numpy

DataByModel = Callable[[Context], Mapping[str, Any]]
Builders = Mapping[str, Callable[[], nn.Module]]


def counted_holdings(data: DataByModel) -> Callable[[Context], dict[str, int]]:
    """Return what counts a node's training samples of each model; None counts as none.

    Parameters
    ----------
    data : callable
        Gets the node's context, returns by a model's name ``(train, validation)``.
    """

    def holdings(context: Context) -> dict[str, int]:
        parts = {name: read_node_data(each).train for name, each in _by_name(data, context).items()}
        return {n: 0 if train is None else count_samples(train) for n, train in parts.items()}

    return holdings


def cross_entropy_loss(
    data: DataByModel, models: Builders, device: str | None = None
) -> Callable[[Context, str, ArrayRecord], float]:
    """Return what computes a model's mean cross entropy on a node's training data.

    Parameters
    ----------
    data : callable
        Gets the node's context, returns by a model's name ``(train, validation)``.
    models : mapping from str to callable
        By name, what builds the torch module; a single linear layer can do without.
    device : str, optional
        Where to compute; by default where a module is built.
    """

    def loss(context: Context, name: str, arrays: ArrayRecord) -> float:
        def train() -> Data:
            return read_node_data(_by_name(data, context)[name]).part("train")

        received = to_numpy(arrays)
        module = models[name]() if name in models else None
        where = device or home_device(models.get(name))
        call = f"multi_model_mod(data, model={{'{name}': Net, …}})"
        reader, samples = LayerReader(received, module, call=call, device=where), train()
        output = reader.output_layer(samples)
        seen = reader.read(train() if is_read_once(samples) else samples, output)
        layer = LayerData(*linear_layer(received, output, where), seen.inputs, seen.labels)
        return Quality(1.0, "loss").score(*layer.scores())

    return loss


def _by_name(data: DataByModel, context: Context) -> Mapping[str, Any]:
    returned = data(context)
    if not isinstance(returned, Mapping):
        raise ModelError(
            "return {name of the model: (train, validation), …} from data(context): it returned "
            f"a {type(returned).__name__}"
        )
    return returned
