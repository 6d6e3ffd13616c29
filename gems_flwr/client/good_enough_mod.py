"""The mod that makes any Flower client a GEMS node.

It sits around the user's own train handler::

    app = ClientApp(mods=[good_enough_mod(validation)])

and does nothing unless the server's `Gems` or `LayerwiseGems` strategy asks for a space. Then it
lets the handler train (a cone needs no trained model, so there it does not), builds the space on
the node's data and replies with it instead of the model. In the verification round it scores the
server's model and answers with one number.

Layer by layer the networks that come have other widths than the handler's model, and their
lowest layers are common to all nodes. The handler has to respect both; see
`gems_flwr.networks.surgery` for the two calls that do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.client.limits import NodeLimits, refuse_bypass
from gems_flwr.client.neuron_building import build_neurons
from gems_flwr.client.privacy_ledger import spend
from gems_flwr.errors import ModelError
from gems_flwr.networks.inputs import Data, LayerReader
from gems_flwr.networks.layers import weight_layers
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.quality import Quality
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import (
    requested_neurons,
    requested_score,
    requested_space,
    wants_score,
)
from gems_flwr.wire.keys import RUN_SEED, SERVER_ROUND
from gems_flwr.wire.model_replies import instruction_config
from gems_flwr.wire.neuron_replies import pack_neurons_reply
from gems_flwr.wire.records import only_model, to_numpy
from gems_flwr.wire.requests import NeuronRequest
from gems_flwr.wire.space_replies import pack_score_reply, pack_space_reply
from gems_flwr.wire.space_requests import NodeLayer, SpaceRequest

DataSource = Callable[[Context], Data]


def good_enough_mod(
    validation: DataSource,
    *,
    train: DataSource | None = None,
    model: Callable[[], nn.Module] | None = None,
    layer: str | None = None,
    activation: nn.Module | None = None,
    limits: NodeLimits | None = None,
) -> Mod:
    """Return a mod that answers the server's requests for good-enough spaces.

    Parameters
    ----------
    validation : callable
        Gets the node's context, returns held-out data: a pair of arrays, or batches.
    train : callable, optional
        The same for the training data, from which class-moment cones are built; without it
        they are built from the validation data.
    model : callable, optional
        Returns the torch module. Only a model that is a single linear layer can do without.
    layer : str, optional
        Name of the linear output layer in the module, where it cannot be found.
    activation : torch.nn.Module, optional
        What follows the hidden layers where the model calls it as a function, which cannot be
        seen; ReLU by default.
    limits : NodeLimits, optional
        What the node gives away at most. By default its ``--node-config`` says so, and where that
        says nothing, the defaults of `NodeLimits` hold.

    Examples
    --------
    Two nodes with one class each, and the model that is good enough for both:

    >>> import numpy as np
    >>> import torch
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import Gems, InProcessGrid, good_enough_mod
    >>> def data(context):
    ...     node = context.node_config["partition-id"]
    ...     rng = np.random.default_rng(node)
    ...     inputs = rng.normal(size=(100, 2)) + 5 * node
    ...     return inputs.astype(np.float32), np.full(100, node)
    >>> app = ClientApp(mods=[good_enough_mod(data)])
    >>> @app.train()
    ... def train(message, context):
    ...     raise NotImplementedError("a cone needs no trained model")
    >>> initial = ArrayRecord(torch.nn.Linear(2, 2).state_dict())
    >>> result = Gems(verify=True).start(InProcessGrid(app, nodes=2), initial)
    >>> result.details["node_scores"]
    {'0': 1.0, '1': 1.0}
    """

    def good_enough(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        content = message.content
        bounds = NodeLimits.of_node(context.node_config) if limits is None else limits
        bounds.check_message(message)
        request, neurons = requested_space(content), requested_neurons(content)
        if request is not None or neurons is not None or wants_score(content):
            refuse_bypass(call_next)
        if request is not None:
            return space_reply(request, bounds, message, context, call_next)
        if neurons is not None:
            return neurons_reply(neurons, message, context, call_next)
        if wants_score(content):
            return score_reply(bounds, message, context)
        return call_next(message, context)

    def space_reply(
        request: SpaceRequest,
        bounds: NodeLimits,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
    ) -> Message:
        request = bounds.narrowed(request)
        received = to_numpy(_arrays(message))
        source = train if train is not None and request.reads == "train" else validation
        reader, data, output = read_output(received, source, context)
        trained = received
        if request.needs_training:
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            trained = to_numpy(_arrays(reply))
            below = [key for key in received if key not in (output.weight, output.bias)]
            _check_unchanged(received, trained, below)
        weight, bias = _layer(trained, output)
        name = node_name(context)
        if request.private is not None:
            spend(request.private.squared_mu, bounds, context)
        seed = derive_seed(_run_seed(message), "space", _round(message), name)
        samples = reader.read(data, output)
        space = request.build(NodeLayer(weight, bias, samples, seed, bounds.rank_cap))
        bounds.check_release(space)
        return Message(pack_space_reply(space, name=name), reply_to=message)

    def neurons_reply(
        request: NeuronRequest, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        if model is None:
            raise ModelError("a request for neurons needs the torch module: give the mod model=")
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        trained = to_numpy(_arrays(reply))
        received = to_numpy(_arrays(message))
        below = weight_layers(received)[: request.layer]
        _check_unchanged(received, trained, [key for layer in below for key in layer.keys])
        name, server_round = node_name(context), _round(message)
        balls = build_neurons(
            request,
            trained,
            model(),
            validation(context),
            seed=derive_seed(_run_seed(message), "neurons", server_round, name),
            activation=activation,
        )
        content = pack_neurons_reply(
            balls, layer=request.layer, server_round=server_round, name=name
        )
        return Message(content, reply_to=message)

    def score_reply(bounds: NodeLimits, message: Message, context: Context) -> Message:
        request, name = requested_score(message.content), node_name(context)
        bounds.check_score(request)
        received = to_numpy(_arrays(message))
        reader, held_out, output = read_output(received, validation, context)
        score, total = _score(received, output, reader, held_out)
        if request.private is not None:
            spend(request.private.squared_mu, bounds, context)
            seed = derive_seed(_run_seed(message), "score", _round(message), name)
            noise_seed = seed if request.dp_seeded else None
            score = request.private.noised(round(score * total), total, noise_seed)
        return Message(pack_score_reply(score, name=name), reply_to=message)

    def read_output(
        received: Arrays, source: DataSource, context: Context
    ) -> tuple[LayerReader, Data, OutputLayer]:
        reader = LayerReader(received, model() if model else None, layer)
        data = source(context)
        output = reader.output_layer(data)
        # Of batches that can be had only once, finding the layer has taken some.
        return reader, source(context) if isinstance(data, Iterator) else data, output

    def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return fault_reply_mod(message, context, lambda m, c: good_enough(m, c, call_next))

    return guarded


def _arrays(message: Message) -> ArrayRecord:
    return only_model(message.content)


def _run_seed(message: Message) -> int:
    return cast(int, instruction_config(message.content).get(RUN_SEED, 0))


def _round(message: Message) -> int:
    return cast(int, instruction_config(message.content).get(SERVER_ROUND, 0))


def _check_unchanged(sent: Arrays, trained: Arrays, frozen: Iterable[str]) -> None:
    """Refuse a network of other shapes, or whose layers that all nodes share were changed."""
    shapes = {key: array.shape for key, array in sent.items()}
    if {key: array.shape for key, array in trained.items()} != shapes:
        raise ModelError(
            f"training returned arrays of other names or shapes than {shapes}; build the model at "
            "the widths that were sent, with resize_model"
        )
    changed = [key for key in frozen if not np.array_equal(sent[key], trained[key])]
    if changed:
        raise ModelError(
            f"training changed {changed}, which all nodes must have in common: the space would be "
            "about other inputs; call freeze_layers in training (one round of GEMS can do "
            "without training: ask for cones)"
        )


def _score(
    arrays: Arrays, output: OutputLayer, reader: LayerReader, held_out: Data
) -> tuple[float, int]:
    """Return the accuracy of a model, and on how many samples."""
    data = reader.read(held_out, output)
    weight, bias = _layer(arrays, output)
    scores, labels = LayerData(weight, bias, data.inputs, data.labels).scores()
    return Quality(1.0).score(scores, labels), len(labels)


def _layer(arrays: Arrays, output: OutputLayer) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.from_numpy(np.array(arrays[output.weight])).float()
    bias = torch.from_numpy(np.array(arrays[output.bias])).float() if output.bias else None
    return weight, bias
