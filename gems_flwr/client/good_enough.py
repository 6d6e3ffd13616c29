"""The mod that makes any Flower client a GEMS node.

It sits around the user's own train handler::

    app = ClientApp(mods=[good_enough_mod(validation)])

and does nothing unless the server's `Gems` strategy asks for a space. Then it lets the handler
train (a cone needs no trained model, so there it does not), builds the space on the node's data
and replies with it instead of the model. In the verification round it scores the server's model
and answers with one number.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from gems_flwr import wire
from gems_flwr.averaging import Arrays
from gems_flwr.client.guard import fault_reply_mod, node_name
from gems_flwr.client.layer_inputs import Data, DataSource, LayerReader
from gems_flwr.construct import LayerData, Quality, SpaceRequest, build_space
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.spaces import OutputLayer


def good_enough_mod(
    validation: DataSource,
    *,
    train: DataSource | None = None,
    model: Callable[[], nn.Module] | None = None,
    layer: str | None = None,
    seed_private_noise: bool = False,
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
    seed_private_noise : bool, default False
        Whether the noise of a differentially private space comes from the run's seed. That
        repeats a simulation exactly, and protects nobody: leave it off for real data.
    """

    def good_enough(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        request = wire.requested_space(message.content)
        verify = wire.wants_score(message.content)
        if request is None and not verify:
            return call_next(message, context)
        received = wire.to_numpy(_arrays(message))
        reader = LayerReader(received, model() if model else None, layer)
        held_out = validation(context)
        output = reader.output_layer(held_out)
        name = node_name(context)
        if request is None:
            content = wire.pack_score_reply(_score(received, output, reader, held_out), name=name)
            return Message(content, reply_to=message)

        trained = received
        if request.kind != "cone":
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            trained = wire.to_numpy(_arrays(reply))
            _check_common(received, trained, output)
        weight, bias = _layer(trained, output)
        space = build_space(
            request,
            weight=weight,
            bias=bias,
            validation=reader.read(held_out, output),
            train=reader.read(train(context) if train else validation(context), output),
            seed=_seed(request, message, name, seed_private_noise),
        )
        return Message(wire.pack_space_reply(space, name=name), reply_to=message)

    def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return fault_reply_mod(message, context, lambda m, c: good_enough(m, c, call_next))

    return guarded


def _arrays(message: Message) -> ArrayRecord:
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"expected one ArrayRecord with the model, got {len(records)}")
    return records[0]


def _seed(request: SpaceRequest, message: Message, name: str, seeded: bool) -> int:
    if request.private is not None and not seeded:
        return secrets.randbits(63)
    config = wire.instruction_config(message.content)
    run_seed = cast(int, config.get(wire.RUN_SEED, 0))
    server_round = cast(int, config.get(wire.SERVER_ROUND, 0))
    return derive_seed(run_seed, "space", server_round, name)


def _check_common(sent: Arrays, trained: Arrays, output: OutputLayer) -> None:
    """Refuse a model whose lower layers were changed: the spaces would be about other inputs."""
    if sent.keys() != trained.keys():
        raise ValueError(f"training returned arrays {sorted(trained)}, not {sorted(sent)}")
    changed = [
        key
        for key in sent
        if key not in (output.weight, output.bias) and not np.array_equal(sent[key], trained[key])
    ]
    if changed:
        raise ValueError(
            f"training changed {changed}, below the output layer '{output.weight}'; GEMS in one "
            "round needs them common to all nodes: freeze them in training, or ask for cones"
        )


def _score(arrays: Arrays, output: OutputLayer, reader: LayerReader, held_out: Data) -> float:
    data = reader.read(held_out, output)
    weight, bias = _layer(arrays, output)
    return Quality(1.0).score(*LayerData(weight, bias, data.inputs, data.labels).scores())


def _layer(arrays: Arrays, output: OutputLayer) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.from_numpy(np.array(arrays[output.weight])).float()
    bias = torch.from_numpy(np.array(arrays[output.bias])).float() if output.bias else None
    return weight, bias
