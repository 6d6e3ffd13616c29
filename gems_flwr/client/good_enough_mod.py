"""The mod that makes any Flower client a GEMS node.

It sits around the user's own train handler::

    app = ClientApp(mods=[good_enough_mod(data, model=Net)])  # data(context) -> (train, validation)

and does nothing unless the server's `Gems` or `LayerwiseGems` strategy asks for a space. Then it
lets the handler train (a cone needs no trained model, so there it does not), builds the space on
the node's data and replies with it instead of the model. In the verification round it scores the
server's model and answers with one number; where the server refines its model, with sums of the
training loss and of its gradient.

Where a network's lowest layers are common to all nodes, the handler must leave them alone: it
calls ``freeze_layers(model, msg)``. One that does not is stopped at its first training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from torch import nn

from gems_flwr.client.candidates import judge_candidates
from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.client.leak_report import report_gradient, report_space, wants_report
from gems_flwr.client.limits import NodeLimits, refuse_bypass
from gems_flwr.client.loss_answers import answer_gradient, answer_losses
from gems_flwr.client.masking import masked_with
from gems_flwr.client.neuron_building import build_neurons
from gems_flwr.client.node_backbone import complete_model
from gems_flwr.client.privacy_ledger import spend
from gems_flwr.client.private_sum_answers import answer_private_sum
from gems_flwr.client.summand_answers import (
    answer_moment_sums,
    answer_summed_counts,
    answer_summed_loss,
)
from gems_flwr.devices import check_device, chosen_device, home_device
from gems_flwr.errors import ModelError
from gems_flwr.keyword_hints import refuse_keywords
from gems_flwr.networks.frozen_watch import watch_frozen
from gems_flwr.networks.inputs import Data, LayerReader, batches, linear_layer
from gems_flwr.networks.layers import weight_layers
from gems_flwr.networks.node_data import Part, is_read_once, read_node_data
from gems_flwr.networks.other_widths import try_other_widths
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.quality import Quality
from gems_flwr.runtime.flower_internals import ClientAppCallable, Mod
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import (
    frozen_layers,
    requested_neurons,
    requested_score,
    requested_space,
    wants_score,
    wants_widths_tried,
)
from gems_flwr.wire.backbone_messages import pack_needs_backbone
from gems_flwr.wire.choice_messages import (
    ChoiceRequest,
    Counts,
    pack_choice_reply,
    requested_choice,
    take_candidates,
)
from gems_flwr.wire.gradient_requests import (
    GradientRequest,
    LossesRequest,
    requested_gradient,
    requested_losses,
    take_beside,
)
from gems_flwr.wire.handler_metrics import put_handler_metrics
from gems_flwr.wire.keys import RUN_SEED, SERVER_ROUND
from gems_flwr.wire.model_replies import instruction_config
from gems_flwr.wire.moment_requests import MomentSums, requested_moment_sums, take_directions
from gems_flwr.wire.neuron_replies import pack_neurons_reply
from gems_flwr.wire.private_sum_requests import PrivateSum, requested_private_sum, take_center
from gems_flwr.wire.records import only_model, to_numpy
from gems_flwr.wire.requests import NeuronRequest
from gems_flwr.wire.space_replies import pack_score_reply, pack_space_reply
from gems_flwr.wire.space_requests import NodeLayer, SpaceRequest
from gems_flwr.wire.summands import requested_layout
from gems_flwr.wire.width_replies import pack_widths_reply

DataSource = Callable[[Context], Any]

_TRIED_SAMPLES = 32
_NOW = "good_enough_mod(data, model=Net) with data(context) that returns (train, validation)"


@refuse_keywords({"train": _NOW, "validation": _NOW})
def good_enough_mod(
    data: DataSource,
    *,
    model: Callable[[], nn.Module] | None = None,
    layer: str | None = None,
    activation: nn.Module | None = None,
    limits: NodeLimits | None = None,
    report_leaks: bool = False,
    device: str | None = None,
) -> Mod:
    """Return a mod that answers the server's requests for good-enough spaces.

    Parameters
    ----------
    data : callable
        Gets the node's context, returns what the app's own ``load_data`` does: ``(train,
        validation)``, each a torch ``DataLoader``, an iterable of batches (pairs, or Flower's
        dicts) or a pair of arrays; or four arrays ``X_train, y_train, X_test, y_test``. Class
        moments are taken from the training data, radii and scores from the validation data, which
        may be None where neither is asked for.
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
    report_leaks : bool, default False
        Whether the node's own log says of every space and gradient what it gives away, as
        ``gems-flwr inspect`` does in full; takes some seconds. ``report-leaks=true`` in the
        ``--node-config`` says so, too. The reply is the same.
    device : str, optional
        Where the mod computes: ``cpu``, ``cuda``, ``mps``, ``xpu`` or ``xla``, with a number where
        there are several (``cuda:1``), or ``auto``; by default where `model` puts the module.
        Models and data go there in chunks, replies come back. Where the handler trains is its own
        affair.

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
    ...     inputs, labels = rng.normal(size=(200, 2)) + 5 * node, np.full(200, node)
    ...     return (inputs[:160], labels[:160]), (inputs[160:], labels[160:])
    >>> app = ClientApp(mods=[good_enough_mod(data)])
    >>> @app.train()
    ... def train(message, context):
    ...     raise NotImplementedError("a cone needs no trained model")
    >>> initial = ArrayRecord(torch.nn.Linear(2, 2).state_dict())
    >>> result = Gems(verify=True).start(InProcessGrid(app, nodes=2), initial)
    >>> result.details["node_scores"]
    {'0': 1.0, '1': 1.0}
    """
    if device is not None:
        check_device(device)
    # Not functools.cache, which cannot travel to the workers of Flower's simulation engine.
    homes: list[str] = []

    def place() -> str:
        if device is not None:
            return device
        if not homes:
            homes.append(home_device(model))
        return homes[0]

    def good_enough(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        content = message.content
        bounds = NodeLimits.of_node(context.node_config) if limits is None else limits
        bounds.check_message(message)
        request, neurons = requested_space(content), requested_neurons(content)
        of_loss = requested_gradient(content) or requested_losses(content)
        choice, moments = requested_choice(content), requested_moment_sums(content)
        private = requested_private_sum(content)
        sums = moments or private
        if request or sums or neurons or of_loss or choice or wants_score(content):
            refuse_bypass(call_next)
        if request is not None:
            return space_reply(request, bounds, message, context, call_next)
        if moments is not None:
            return moments_reply(moments, bounds, message, context)
        if of_loss is not None:
            return loss_reply(of_loss, bounds, message, context)
        if private is not None:
            return private_reply(private, bounds, message, context)
        if neurons is not None:
            return neurons_reply(neurons, message, context, call_next)
        if choice is not None:
            return choice_reply(choice, bounds, message, context)
        if wants_score(content):
            return score_reply(bounds, message, context)
        if wants_widths_tried(content):
            return widths_reply(message, context)
        return call_next(message, context)

    def space_reply(
        request: SpaceRequest,
        bounds: NodeLimits,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
    ) -> Message:
        reports = wants_report(report_leaks, context.node_config)
        request = bounds.narrowed(request)
        whole = complete_model(message, context, model)
        if whole is None:
            return lacks_backbone(message, context)
        received = whole.arrays
        reader, chosen, output = read_output(received, request.reads, context)
        whole.check_output(output)
        trained, reply = received, None
        if request.needs_training:
            below = [key for key in received if key not in (output.weight, output.bias)]
            with watch_frozen(received, below, partial(_forgotten, message)):
                reply = call_next(message, context)
            if reply.has_error():
                return reply
            trained = to_numpy(_arrays(reply))
            _check_unchanged(received, trained, below)
        weight, bias = linear_layer(trained, output)
        name = node_name(context)
        if request.private is not None:
            spend(request.private.squared_mu, bounds, context)
        seed = derive_seed(_run_seed(message), "space", _round(message), name)
        samples = reader.read(chosen, output)
        shown = (bounds.rank_cap, bounds.mean_rule, bounds.least_in_sums)
        space = request.build(NodeLayer(weight, bias, samples, seed, *shown, device=place()))
        bounds.check_release(space)
        packed = pack_space_reply(space, name=name)
        if reports:
            look = derive_seed(_run_seed(message), "leaks", _round(message), name)
            report_space(space, samples, node=name, seed=look)
        if reply is not None:
            put_handler_metrics(packed, reply.content)
        return Message(packed, reply_to=message)

    def moments_reply(
        request: MomentSums, bounds: NodeLimits, message: Message, context: Context
    ) -> Message:
        layout = requested_layout(message.content)
        if layout is None:
            raise ModelError("the server asks for sums and does not say how they are written")
        directions = take_directions(message.content, request)
        whole = complete_model(message, context, model)
        if whole is None:
            return lacks_backbone(message, context)
        reader, chosen, output = read_output(whole.arrays, "train", context)
        whole.check_output(output)
        content = answer_moment_sums(
            request,
            directions,
            layout,
            reader.read(chosen, output),
            output.num_classes,
            bounds,
            name=node_name(context),
            masked=masked_with() > 0,
            device=place(),
        )
        return Message(content, reply_to=message)

    def neurons_reply(
        request: NeuronRequest, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        module = built()
        received = to_numpy(_arrays(message))
        below = [key for each in weight_layers(received)[: request.layer] for key in each.keys]
        with watch_frozen(received, below, partial(_forgotten, message)):
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        trained = to_numpy(_arrays(reply))
        _check_unchanged(received, trained, below)
        name, server_round = node_name(context), _round(message)
        balls = build_neurons(
            request,
            trained,
            module,
            part("validation", context),
            seed=derive_seed(_run_seed(message), "neurons", server_round, name),
            activation=activation,
            device=place(),
        )
        content = pack_neurons_reply(
            balls, layer=request.layer, server_round=server_round, name=name
        )
        put_handler_metrics(content, reply.content)
        return Message(content, reply_to=message)

    def score_reply(bounds: NodeLimits, message: Message, context: Context) -> Message:
        request, name = requested_score(message.content), node_name(context)
        bounds.check_score(request)
        whole = complete_model(message, context, model)
        if whole is None:
            return lacks_backbone(message, context)
        received = whole.arrays
        reader, held_out, output = read_output(received, "validation", context)
        whole.check_output(output)
        score, total = _score(received, output, reader, held_out, place())
        if (layout := requested_layout(message.content)) is not None:
            counts = Counts(np.array([float(total)]), np.array([[float(round(score * total))]]))
            return Message(answer_summed_counts(counts, layout, name=name), reply_to=message)
        if request.private is not None:
            spend(request.private.squared_mu, bounds, context)
            seed = derive_seed(_run_seed(message), "score", _round(message), name)
            noise_seed = seed if request.dp_seeded else None
            score = request.private.noised(round(score * total), total, noise_seed)
        return Message(pack_score_reply(score, name=name), reply_to=message)

    def loss_reply(
        request: GradientRequest | LossesRequest,
        bounds: NodeLimits,
        message: Message,
        context: Context,
    ) -> Message:
        reports = wants_report(report_leaks, context.node_config)
        bounds.check_losses()
        beside, name = take_beside(message.content), node_name(context)
        whole = complete_model(message, context, model)
        if whole is None:
            return lacks_backbone(message, context)
        reader, chosen, output = read_output(whole.arrays, "train", context)
        whole.check_output(output)
        about = (beside, whole.arrays, output, reader.read(chosen, output))
        if (layout := requested_layout(message.content)) is not None:
            masked = masked_with() > 0
            content = answer_summed_loss(
                request, *about, bounds, layout, name=name, masked=masked, device=place()
            )
        elif isinstance(request, GradientRequest):
            tell = partial(report_gradient, node=name) if reports else None
            content = answer_gradient(
                request, *about, bounds, name=name, report=tell, device=place()
            )
        else:
            content = answer_losses(request, *about, name=name, device=place())
        return Message(content, reply_to=message)

    def choice_reply(
        request: ChoiceRequest, bounds: NodeLimits, message: Message, context: Context
    ) -> Message:
        bounds.check_score(request)
        candidates = take_candidates(message.content, request)
        whole = complete_model(message, context, model)
        if whole is None:
            return lacks_backbone(message, context)
        reader, held_out, output = read_output(whole.arrays, "validation", context)
        whole.check_output(output)
        samples, by_class = reader.read(held_out, output), request.by_class
        counts = judge_candidates(candidates, output, samples, by_class=by_class, device=place())
        name = node_name(context)
        if (layout := requested_layout(message.content)) is not None:
            return Message(answer_summed_counts(counts, layout, name=name), reply_to=message)
        if request.private is not None:
            spend(request.private.squared_mu, bounds, context)
            seed = derive_seed(_run_seed(message), "choice", _round(message), name)
            noise_seed = seed if request.dp_seeded else None
            counts = Counts(*request.private.noised(counts.seen, counts.right, noise_seed))
        return Message(pack_choice_reply(counts, name=name), reply_to=message)

    def private_reply(
        request: PrivateSum, bounds: NodeLimits, message: Message, context: Context
    ) -> Message:
        layout = requested_layout(message.content)
        if layout is None:
            raise ModelError("the server asks for a sum and does not say how it is written")
        center = take_center(message.content)
        whole = complete_model(message, context, model)
        if whole is None:
            return lacks_backbone(message, context)
        reader, chosen, output = read_output(whole.arrays, "train", context)
        whole.check_output(output)
        name = node_name(context)
        content = answer_private_sum(
            request,
            center,
            layout,
            whole.arrays,
            output,
            reader.read(chosen, output),
            bounds,
            context,
            name=name,
            seed=derive_seed(_run_seed(message), "sum", request.stage, _round(message), name),
        )
        return Message(content, reply_to=message)

    def lacks_backbone(message: Message, context: Context) -> Message:
        return Message(pack_needs_backbone(node_name(context)), reply_to=message)

    def widths_reply(message: Message, context: Context) -> Message:
        for x, _ in batches(part("validation", context)):
            try_other_widths(built().to(chosen_device(place())), x[:_TRIED_SAMPLES])
            break
        return Message(pack_widths_reply(node_name(context)), reply_to=message)

    def built() -> nn.Module:
        if model is None:
            raise ModelError(
                "write good_enough_mod(data, model=Net): the server asks for the neurons of a "
                "hidden layer, and only the torch module computes what they see"
            )
        return model()

    def part(name: Part, context: Context) -> Data:
        return read_node_data(data(context)).part(name)

    def read_output(
        received: Arrays, name: Part, context: Context
    ) -> tuple[LayerReader, Data, OutputLayer]:
        reader = LayerReader(received, model() if model else None, layer, device=place())
        chosen = part(name, context)
        output = reader.output_layer(chosen)
        # Of batches that can be had only once, finding the layer has taken some.
        return reader, part(name, context) if is_read_once(chosen) else chosen, output

    def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return fault_reply_mod(message, context, lambda m, c: good_enough(m, c, call_next))

    return guarded


def _arrays(message: Message) -> ArrayRecord:
    return only_model(message.content)


def _run_seed(message: Message) -> int:
    return cast(int, instruction_config(message.content).get(RUN_SEED, 0))


def _round(message: Message) -> int:
    return cast(int, instruction_config(message.content).get(SERVER_ROUND, 0))


def _forgotten(message: Message, changed: list[str]) -> ModelError:
    """Return what a handler is told that trains a layer which all nodes share."""
    todo = "train the output layer alone, for example with requires_grad_(False) on the others"
    if frozen_layers(message.content):
        todo = "write freeze_layers(model, msg) in the train handler, once the model is loaded"
    return ModelError(f"{todo}: a training step changed {changed}, which all nodes must share")


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
    arrays: Arrays, output: OutputLayer, reader: LayerReader, held_out: Data, device: str
) -> tuple[float, int]:
    """Return the accuracy of a model, and on how many samples."""
    data = reader.read(held_out, output)
    weight, bias = linear_layer(arrays, output, device)
    scores, labels = LayerData(weight, bias, data.inputs, data.labels).scores()
    return Quality(1.0).score(scores, labels), len(labels)
