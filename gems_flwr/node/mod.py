"""The one mod on the client, whatever the strategy.

It sits around the user's own train handler and lets ordinary train and evaluate messages pass,
within the node's limits. A question of this library's strategies is answered in place of the
handler: what it would give away is held against the node's `NodeLimits` first, then it answers
itself with what it finds on the `Node` (see `gems_flwr.core.question`). Where messages travel
packed, masked or without layers that the node knows, the mod turns them into plain ones before, and
the answers back.

Every fault becomes an error reply that names the node and the fault: Flower loses a reply that is
None until the timeout, and a handler that returns something else can end the worker.

Flower's privacy mods clip and noise what passes them. Outside of this mod they refuse by
themselves, since most answers are no models. Inside, they would be bypassed by all that is computed
from the node's data, so such questions are refused by name.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

import gems_flwr.questions  # noqa: F401 - every question registers itself
from gems_flwr.bounds import MAX_GROWTH, MAX_PARAMETERS
from gems_flwr.carriers import (
    MASKS,
    PACKED,
    answer_masked,
    answer_packed,
    complete_model,
    lacking_layers,
    layers_digest,
)
from gems_flwr.core.flower import HANDLER_RAISED, ClientAppCallable, Mod
from gems_flwr.core.nodes import Name
from gems_flwr.core.question import Disclosure, question_kind, take_question
from gems_flwr.core.records import (
    CONFIG,
    RUN_SEED,
    SERVER_ROUND,
    fault_reason,
    only_model,
    pack_name,
    put_handler_metrics,
    to_numpy,
    without_numbers,
)
from gems_flwr.core.run import derive_seed
from gems_flwr.core.sums import LAYOUT, summand_record, take_layout
from gems_flwr.devices import check_device, home_device
from gems_flwr.errors import (
    BypassedPrivacyError,
    GemsError,
    ModelError,
    NotGoodEnoughError,
    SpaceError,
    describe_fault,
)
from gems_flwr.networks import (
    Data,
    LayerReader,
    Part,
    freeze_lowest,
    lowest_layers,
    read_node_data,
)
from gems_flwr.node.kept_inputs import KeptInputs
from gems_flwr.node.limits import NodeLimits, ledger, spend
from gems_flwr.samples import Samples
from gems_flwr.spaces import OutputLayer
from gems_flwr.typing import Arrays, Float

if TYPE_CHECKING:
    from torch import nn

    from gems_flwr.node.task import TaskSet
    from gems_flwr.secure.fixed_point import Layout


def good_enough_mod(
    data: Callable[[Context], Any] | None = None,
    *,
    model: Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]] | None = None,
    layer: str | None = None,
    activation: nn.Module | None = None,
    limits: NodeLimits | None = None,
    device: str | None = None,
    capacity: int | Callable[[Context], int] = 1,
) -> Mod:
    """Return the mod that answers the questions of this library's strategies.

    Parameters
    ----------
    data : callable, optional
        Gets the node's context, returns what the app's own ``load_data`` does: ``(train,
        validation)``, each a torch ``DataLoader``, an iterable of batches (pairs, or Flower's
        dicts) or a pair of arrays; or four arrays ``X_train, y_train, X_test, y_test``. Class
        moments are taken from the training data, radii and scores from the validation data, which
        may be None where neither is asked for. Strategies that average models need none. For
        `MultiModel` a mapping from the name of each model to its data.
    model : callable, or mapping from str to callable, optional
        Returns the torch module; by name where there are several (`MultiModel`). Only a model that
        is a single linear layer can do without.
    layer : str, optional
        Name of the linear output layer in the module, where it cannot be found.
    activation : torch.nn.Module, optional
        What follows the hidden layers where the model calls it as a function, which cannot be
        seen; ReLU by default.
    limits : NodeLimits, optional
        What the node gives away at most. By default its ``--node-config`` says so, and where that
        says nothing, the defaults of `NodeLimits` hold.
    device : str, optional
        Where the mod computes: ``cpu``, ``cuda``, ``mps``, ``xpu`` or ``xla``, with a number where
        there are several (``cuda:1``), or ``auto``; by default where `model` puts the module.
        Models and data go there in chunks, replies come back. The handler trains where it will.
    capacity : int, or callable that gets the node's context and returns it, default 1
        The most models that the node trains in a round of `MultiModel`.

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
    options = NodeOptions(data, model, layer, activation, limits, device, capacity)

    def good_enough(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return respond(options, message, context, call_next)

    return good_enough


def respond(
    options: NodeOptions, message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Answer one message; see `good_enough_mod`."""
    name, what = node_name(context), question_kind(message.content)
    try:

        def answer(message: Message, masked_with: int = 0) -> Message:
            def plain(message: Message) -> Message:
                return _answer(options, message, context, call_next, masked_with)

            packed = PACKED in message.content
            return answer_packed(message, context, plain) if packed else plain(message)

        masked = MASKS in message.content
        reply = answer_masked(options, message, context, answer) if masked else answer(message)
        if isinstance(reply, Message):
            return reply
        fault = f"the handler returned {type(reply).__name__}, expected a Message"
    except HandlerFailedError as failed:
        return failed.reply
    except Exception as error:
        # Errors of ours say what to do; for others the place may help.
        ours = isinstance(error, GemsError)
        fault = str(error) if ours else describe_fault(error)
        of_data = not ours or isinstance(error, SpaceError | NotGoodEnoughError)
        of_data |= getattr(error, "limit", "") in ("largest_rank", "min_mean_count")
        # Numbers may be those of the data; a simulation has nothing to hide.
        if what and of_data and "num-partitions" not in context.node_config:
            fault = without_numbers(fault, name)
    reason = fault_reason(what or message.metadata.message_type, name, fault)
    return Message(Error(code=HANDLER_RAISED, reason=reason), reply_to=message)


def _answer(
    options: NodeOptions,
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    masked_with: int,
) -> Message:
    """Answer a plain message: a question, or an ordinary one for the handler."""
    question = take_question(message.content)
    if question is None:
        limits = options.limits or NodeLimits.of_node(context.node_config)
        limits.allow_handler(message)
        return call_next(message, context)
    head: frozenset[str] | None = frozenset()
    if question.is_about_output_layer:
        head = complete_model(message, context, options.builder)
    name = pack_name(node_name(context))
    if head is None:
        return Message(RecordDict({**lacking_layers(), **name}), reply_to=message)
    layout = take_layout(message.content) if LAYOUT in message.content else None
    node = Node(
        options, message, context, call_next, head=head, layout=layout, masked_with=masked_with
    )
    if not isinstance(question, Name):
        disclosure = question.discloses(node)
        if disclosure.kind not in ("nothing", "model"):
            refuse_bypass(call_next)
        node.allow(disclosure)
    content = question.answer(node)
    if not isinstance(question, Name) and not node.has_counted:
        # An answer that did not say which classes it is about counts for all of them.
        node.allow(disclosure, leaves=True)
    content.update({**name, **node.beside})
    if node.handler_reply is not None:
        put_handler_metrics(content, node.handler_reply)
    return Message(content, reply_to=message)


# By name: the mods for secure aggregation are in a part of Flower that is not public.
_PRIVACY_MODS = {
    *("LocalDpMod", "fixedclipping_mod", "adaptiveclipping_mod"),
    *("secagg_mod", "secaggplus_mod"),
}


def refuse_bypass(call_next: ClientAppCallable) -> None:
    """Raise if a privacy mod sits between `good_enough_mod` and the handler."""
    for name in inner_mods(call_next):
        if name in _PRIVACY_MODS:
            raise BypassedPrivacyError(
                f"{name} is inside good_enough_mod, where what is computed of the node's data "
                "would bypass it; for private moments set dp_epsilon in the Gems strategy instead, "
                f"or average models (FedAvg, dynamic averaging) under {name}"
            )


def inner_mods(call_next: ClientAppCallable) -> list[str]:
    """Return the names of what a call will pass, as far as Flower's wrapping shows it."""
    names, seen = [], set()
    waiting: list[Any] = [call_next]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names.append(getattr(function, "__name__", type(function).__name__))
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # not filled yet
                if callable(cell.cell_contents):
                    waiting.append(cell.cell_contents)
    return names


# --- what questions work with on a node -------------------------------------------------------

FROZEN_LAYERS = "frozen-layers"


@dataclass(frozen=True)
class NodeOptions:
    """What `good_enough_mod` was called with; see there."""

    data: Callable[[Context], Any] | None = None
    model: Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]] | None = None
    layer: str | None = None
    activation: nn.Module | None = None
    limits: NodeLimits | None = None
    device: str | None = None
    capacity: int | Callable[[Context], int] = 1
    # For references in simulations alone: the raw data. Of a node with several models: its tasks.
    examples: Callable[[Context], tuple[Any, Any]] | None = None
    several: Callable[[Context], TaskSet] | None = None

    def __post_init__(self) -> None:
        if self.device is not None:
            check_device(self.device)

    @property
    def builder(self) -> Callable[[], nn.Module] | None:
        """What returns the torch module; of several models, the message says which one it is."""
        if isinstance(self.model, Mapping):
            return next(iter(self.model.values())) if len(self.model) == 1 else None
        return self.model


class HandlerFailedError(Exception):
    """The node's own handler replied with an error, which is passed on as it is."""

    def __init__(self, reply: Message) -> None:
        self.reply = reply


class Node:
    """A node while it answers one message; what a question's `answer` works with.

    Attributes
    ----------
    name : str
        What the node calls itself.
    round : int
        The server's round.
    limits : NodeLimits
        What the node gives away at most.
    masked_with : int
        How many nodes there are in the secure sum that hides the answer; 0 without one.
    layout : Layout or None
        How a summand is to be written, where one is asked for.
    message, context : Message, Context
        What the handler is called with; ``context.state`` is what the node keeps.
    """

    def __init__(
        self,
        options: NodeOptions,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
        *,
        head: frozenset[str] = frozenset(),
        layout: Layout | None = None,
        masked_with: int = 0,
    ) -> None:
        self.options, self.message, self.context = options, message, context
        self.limits = options.limits or NodeLimits.of_node(context.node_config)
        self.layout, self.masked_with = layout, masked_with
        self.name = node_name(context)
        config = message.content.get(CONFIG)
        self.config = dict(config) if isinstance(config, ConfigRecord) else {}
        self.round = whole_number(self.config.get(SERVER_ROUND))
        self._run_seed = whole_number(self.config.get(RUN_SEED))
        self._call_next, self._head = call_next, head
        self._readers: dict[Part, Samples] = {}
        self.handler_reply: RecordDict | None = None
        self.has_counted = False  # whether the answer was noted as one that leaves
        # Records that go out beside the answer.
        self.beside: dict[str, ConfigRecord] = {}

    @property
    def state(self) -> RecordDict:
        """What the node keeps between messages."""
        return self.context.state

    def seed(self, *path: str | int) -> int:
        """Return a seed for one purpose, the same in every repetition of the run."""
        return derive_seed(self._run_seed, *path, self.round, self.name)

    @cached_property
    def device(self) -> str:
        """Where the node computes: what the mod says, or where `model` puts the module."""
        return self.options.device or home_device(self.options.builder)

    @cached_property
    def model(self) -> Arrays:
        """The model that came with the question; one far beyond the node's own is refused."""
        record = only_model(self.message.content)
        most, builder = MAX_PARAMETERS, self.options.builder
        if builder is not None:
            most = max(most, MAX_GROWTH * sum(a.numel() for a in builder().state_dict().values()))
        if (size := sum(math.prod(array.shape) for array in record.values())) > most:
            raise ModelError(f"the server's model has {size:,} numbers, this node takes {most:,}")
        return to_numpy(record)

    def module(self) -> nn.Module:
        """Return the torch module; a ModelError if the mod was given none."""
        if self.options.builder is None:
            raise ModelError(
                "write good_enough_mod(data, model=Net): the server asks for the neurons of a "
                "hidden layer, and only the torch module computes what they see"
            )
        return self.options.builder()

    def data(self, part: Part) -> Data:
        """Return the node's training or validation data."""
        if self.options.data is None:
            raise ModelError(
                "write good_enough_mod(data, model=Net): the server's question reads the node's "
                "data, and data(context) that returns (train, validation) is missing"
            )
        return read_node_data(self.options.data(self.context)).part(part)

    @cached_property
    def _reader(self) -> LayerReader:
        module = self.options.builder() if self.options.builder else None
        return LayerReader(self.model, module, self.options.layer, device=self.device)

    def output_layer(self, part: Part = "train") -> OutputLayer:
        """Return which arrays are the linear output layer; it must be the server's as well."""
        layer = self._reader.output_layer(self.data(part))
        if self._head and self._head != set(layer.keys):
            raise ModelError(
                f"write Gems(layer='{layer.weight.removesuffix('.weight')}'): the server takes "
                f"{sorted(self._head)} for the output layer, this node's model ends in "
                f"{sorted(layer.keys)}"
            )
        return layer

    def inputs(self, part: Part) -> Samples:
        """Return the inputs of the output layer on a part of the node's data, and the classes."""
        if part not in self._readers:
            # Finding the layer takes a batch, and some data can be read only once.
            layer = self.output_layer(part)
            owner, most = f"{self.context.run_id} {self.name} {part}", self.limits.keep_inputs
            memory = KeptInputs(owner, most * 10**6, self.limits.inputs_folder) if most else None
            self._readers[part] = self._reader.read(self.data(part), layer, memory)
        return self._readers[part]

    def train(self, frozen: Iterable[str] = ()) -> Arrays:
        """Return the model that the handler has trained, with its `frozen` arrays as they were."""
        frozen, sent = list(frozen), self.model
        if count := lowest_layers(sent, frozen):
            # What `freeze_layers` reads in the handler.
            self.config[FROZEN_LAYERS] = count
            self.message.content[CONFIG] = ConfigRecord(self.config)
        self.handler_reply = self.call_handler()
        trained = to_numpy(only_model(self.handler_reply))
        _check_trained(sent, trained, frozen, count)
        return trained

    def call_handler(self) -> RecordDict:
        """Return the handler's reply to the message as it is now; errors are passed on."""
        reply = self._call_next(self.message, self.context)
        if reply.has_error():
            raise HandlerFailedError(reply)
        return reply.content

    # --- what is given away -------------------------------------------------------------------

    def allow(self, disclosure: Disclosure, *, leaves: bool = False) -> None:
        """Refuse an answer beyond the node's limits; note an adaptive one that `leaves` now."""
        limits, exact = self.limits, disclosure.kind == "moments" and disclosure.squared_mu is None
        if exact and not disclosure.masked_with and self.is_steered:
            disclosure = replace(disclosure, adaptive=True)
        limits.allow(disclosure)
        self.has_counted |= leaves
        chosen, (limit, most) = disclosure.adaptive or disclosure.planned, limits.most(disclosure)
        if chosen and not disclosure.masked_with and most:
            prefix = f"{limit.partition('_')[0]} "
            with self._ledger() as entries:
                noted = [name for name in entries if name.startswith(prefix)]
                given = {name.removeprefix(prefix): entries[name] for name in noted}
                counts = limits.count_adaptive(given, disclosure)
                if leaves:
                    entries.update({prefix + name: n for name, n in counts.items()})

    def pin(self, what: str, value: str) -> bool:
        """Return whether this is the first value of its kind that the server chose, and keep it."""
        with self._ledger() as entries:
            return bool(entries.setdefault(what, value) == value)

    def secret_seed(self, *path: str | int) -> int:
        """Return a seed for one purpose that the server cannot know, always the same."""
        if self.limits.seeded_noise:
            return self.seed(*path)
        with self._ledger() as entries:
            return derive_seed(int(entries.setdefault("secret", secrets.token_hex(32)), 16), *path)

    @property
    def ledger_name(self) -> str:
        """Whose ledger it is: a node without a name has one, whatever id the server gives it."""
        config = self.context.node_config
        return str(config.get("name", config.get("partition-id", "node")))

    @property
    def is_simulated(self) -> bool:
        """Whether Flower gave the node the number of partitions, and no one a ledger."""
        return "num-partitions" in self.context.node_config and self.limits.ledger is None

    @property
    def hidden_with(self) -> int:
        """How many nodes hide the answer from a server that may play nodes that no one signs."""
        checked = self.context.node_config.get("trusted-keys") or self.is_simulated
        return self.masked_with if checked else 0

    @property
    def is_guarded(self) -> bool:
        """Whether answers are rounded: alone, unless the node may send full moments."""
        return not self.hidden_with and self.limits.largest_rank != "full"

    def _ledger(self) -> contextlib.AbstractContextManager[dict[str, Any]]:
        # A simulated node begins anew with every run, perhaps from other random layers.
        path = None if self.is_simulated else self.limits.ledger_of(self.ledger_name)
        return ledger(path, self.context)

    @cached_property
    def is_steered(self) -> bool:
        """Whether the layers below the output layer are the server's, and not the first it sent."""
        builder = self.options.builder
        if self.limits.adaptive_answers is None or builder is None:
            return False
        # Copies: finding the head loads the server's layers, perhaps into what `model` keeps.
        state = {key: a.detach().cpu().numpy().copy() for key, a in builder().state_dict().items()}
        head = self.output_layer().keys
        sent, own = ({k: a for k, a in m.items() if k not in head} for m in (self.model, state))
        if not sent:
            return False
        is_own = self.pin("own layers", layers_digest(own))
        if is_own and layers_digest(sent) == layers_digest(own):
            return False
        if not self.is_simulated:
            again = {k: a.detach().cpu().numpy() for k, a in builder().state_dict().items()}
            if layers_digest({key: again[key] for key in own}) == layers_digest(own):
                return True  # they are the same each time
        # Layers narrower than the node's own would show more of a sample.
        fits = sent.keys() == own.keys() and all(
            len(a.shape) == len(own[k].shape) and np.less_equal(own[k].shape, a.shape).all()
            for k, a in sent.items()
        )
        return not fits or not self.pin("layers", layers_digest(sent))

    def spend(self, squared_mu: float) -> None:
        """Note a private release in the node's ledger, or refuse it."""
        spend(squared_mu, self.limits, self.context, self.ledger_name)

    def packed_summand(self, values: Mapping[str, Float]) -> RecordDict:
        """Return a summand, written as the server's layout says."""
        if self.layout is None:
            raise ModelError("the server asks for a sum and does not say how it is written")
        words = self.layout.encode(values, clip=self.masked_with > 0)
        return summand_record(self.layout.pack(words))


def node_name(context: Context) -> str:
    """Return the ``name`` in a node's ``--node-config``, else its partition, else its id."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def whole_number(value: object) -> int:
    """Return a whole number in a message's config; 0 where another strategy sends none."""
    return value if isinstance(value, int) else 0


def _check_trained(sent: Arrays, trained: Arrays, frozen: Iterable[str], count: int) -> None:
    """Refuse networks of other shapes, or with other frozen arrays, than were sent."""
    shapes = {key: array.shape for key, array in sent.items()}
    if {key: array.shape for key, array in trained.items()} != shapes:
        raise ModelError(
            f"training returned arrays of other names or shapes than {shapes}; build the model at "
            "the widths that were sent, with resize_model"
        )
    changed = [key for key in frozen if not np.array_equal(sent[key], trained[key])]
    if changed:
        todo = "train the output layer alone, for example with requires_grad_(False) on the others"
        if count:
            todo = "write freeze_layers(model, msg) in the train handler, once the model is loaded"
        raise ModelError(f"{todo}: training changed {changed}, which all nodes must share")


def freeze_layers(model: nn.Module, msg: Message | Mapping[str, Any]) -> None:
    """Keep the layers out of training that the server wants left as they are.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place: the weights of the lowest layers get no gradients. Nothing changes where
        the message asks for none, so the call can stay in an app with any strategy.
    msg : Message, or mapping
        What the train handler was called with, or its config.

    Examples
    --------
    >>> from torch import nn
    >>> from gems_flwr import freeze_layers
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> freeze_layers(model, {"frozen-layers": 1})  # in a handler: freeze_layers(model, msg)
    >>> [name for name, weight in model.named_parameters() if weight.requires_grad]
    ['2.weight', '2.bias']
    """
    config = msg.content.get(CONFIG, {}) if isinstance(msg, Message) else msg
    if not isinstance(config, Mapping | ConfigRecord):
        raise ModelError(f"write freeze_layers(model, msg) with the message, got {msg!r}")
    freeze_lowest(model, whole_number(config.get(FROZEN_LAYERS)))
