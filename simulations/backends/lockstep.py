"""All nodes of a stream in one tensor: a backend for protocols of local learners, without a client.

Where a hundred nodes take a step of a small model each, nearly all of the time goes into carrying
messages to and from them. This grid takes the server's messages as they are, and answers as the
nodes would, but trains all models at once: their weights lie side by side in one tensor, a batched
forward and backward pass gives every model the gradient of its own batch, and the optimisers, which
work number by number, do not notice. Strategies, messages, byte counts and files are those of the
other backends; up to rounding, so are the losses (a test compares them).

What it cannot do is said at once: it is for streams with equal batch sizes and models without
buffers, and for strategies whose models live on the nodes. Without a stream `backend=lockstep` is
`simulations.backends.lockstep_training`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.func import functional_call, vmap

from gems_flwr.compression.difference_coding import (
    PackedModel,
    decode,
    decode_whole,
    encode,
)
from gems_flwr.devices import chosen_device, end_step
from gems_flwr.runtime.flower_internals import number_message
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import requested_averaging
from gems_flwr.wire.averaging_replies import (
    SentModel,
    pack_averaging_reply,
    take_new_models,
)
from gems_flwr.wire.keys import BATCHES, CORRECT_SHARE_SUM, LOSS_SUM, NUM_EXAMPLES, SERVER_ROUND
from gems_flwr.wire.model_replies import instruction_config
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import AveragingRequest
from simulations.config import ConfigError
from simulations.experiment.experiment import Experiment, add_noise
from simulations.experiment.training import make_optimizer, seeded

Tensors = dict[str, torch.Tensor]


class LockstepGrid(InProcessGrid):
    """A grid whose nodes train together; see the module's docstring.

    Parameters
    ----------
    experiment : Experiment
        Data, streams and model.

    Raises
    ------
    ConfigError
        If the config has something that this backend cannot do.
    """

    def __init__(self, experiment: Experiment) -> None:
        config = experiment.config
        super().__init__(ClientApp(), config.nodes)
        self._experiment = experiment
        self._device = chosen_device(config.backend.device)
        self._model = experiment.build_model().to(self._device)
        _check(experiment, self._model)
        self._waiting: dict[str, Message] = {}
        self._numbers = {
            node: cast(int, each["partition-id"]) for node, each in self._configs.items()
        }
        count = config.nodes
        self._weights = {
            name: weight.detach().expand(count, *weight.shape).clone().requires_grad_()
            for name, weight in self._model.named_parameters()
        }
        self._optimizer = make_optimizer(
            cast(list[nn.Parameter], list(self._weights.values())), config.train_options
        )
        # Room for differences: to get as much anew in every round takes longer than to fill it.
        self._scratch: Tensors = {}
        self._references: list[Tensors] = [{}] * count
        self._metrics: list[Mapping[str, float]] = [{}] * count
        # What rounding has taken from models that were averaged, and what it took from the last.
        self._left_over: list[Arrays] = [{}] * count
        self._left_next: list[Arrays] = [{}] * count
        self._last_sent: SentModel | None = None
        self._last_base: Tensors | None = None
        self._last_tensors: Tensors = {}

    # --- the grid -------------------------------------------------------------------------------

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages as they are, without copying them."""
        message_ids = []
        for message in messages:
            message_ids.append(number_message(message))
            self._waiting[message.metadata.message_id] = message
        return message_ids

    def collect(self, message_ids: Iterable[str], *, timeout: float | None) -> Iterator[Message]:
        """Yield the replies of all nodes, after one common step."""
        wanted = set(message_ids)
        chosen = [key for key in self._waiting if key in wanted]
        messages = [self._waiting.pop(key) for key in chosen]
        requests = [_request(message) for message in messages]
        for message, request in zip(messages, requests, strict=True):
            self._take_new_models(message, request)
        steps = {request.steps for request in requests} - {0}
        if steps:
            self._train(messages, *steps)
        distances = self._distances(requests)
        for message, request in zip(messages, requests, strict=True):
            yield self._reply(message, request, distances)

    def _take_new_models(self, message: Message, request: AveragingRequest) -> None:
        number = self._number(message)
        model, reference = take_new_models(message.content)
        if model is not None:
            tensors = self._tensors(model, number, request)
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight[number] = tensors[name]
            if request.adopt:
                self._references[number] = tensors
            self._left_over[number] = self._left_next[number]
        if reference is not None:
            self._references[number] = self._tensors(reference, number, request)

    def _tensors(self, sent: SentModel, number: int, request: AveragingRequest) -> Tensors:
        # One average goes to many nodes as the same record, or bytes: it is read once.
        base = self._references[number]
        if (
            not (
                self._last_sent is sent
                or (isinstance(sent, PackedModel) and self._last_sent == sent)
            )
            or self._last_base is not base
        ):
            self._last_sent, self._last_base = sent, base
            if not isinstance(sent, PackedModel):
                arrays = to_numpy(sent)
            elif sent.is_whole:
                arrays = decode_whole(sent)
            else:
                own = {name: tensor.cpu().numpy() for name, tensor in base.items()}
                arrays = decode(sent, own, request.compress)
            self._last_tensors = {
                name: torch.from_numpy(a).to(self._device) for name, a in arrays.items()
            }
        return self._last_tensors

    def _reply(
        self, message: Message, request: AveragingRequest, distances: Sequence[float]
    ) -> Message:
        number = self._number(message)
        measured = request.measure or request.send == "violated"
        due = request.send == "always" or (
            request.send == "violated" and distances[number] > request.delta
        )
        model = self._sent(number, request) if due else None
        content = pack_averaging_reply(
            self._metrics[number],
            name=str(number),
            squared_distance=distances[number] if measured else None,
            model=model,
        )
        reply = Message(content, reply_to=message)
        number_message(reply)
        return reply

    def _sent(self, number: int, request: AveragingRequest) -> SentModel:
        """Return a node's model as it travels."""
        arrays = self._arrays(number)
        if request.compress == "float32":
            return to_record(arrays)
        base = {name: tensor.cpu().numpy() for name, tensor in self._references[number].items()}
        encoded = encode(arrays, base, request.compress, self._left_over[number])
        self._left_next[number] = encoded.left_over
        return encoded.packed

    def _number(self, message: Message) -> int:
        return self._numbers[message.metadata.dst_node_id]

    def _arrays(self, number: int) -> Arrays:
        rows = {name: w[number].detach().cpu() for name, w in self._weights.items()}
        return {name: row.numpy().copy() for name, row in rows.items()}

    # --- the nodes ------------------------------------------------------------------------------

    def _train(self, messages: Sequence[Message], steps: int) -> None:
        config = self._experiment.config
        if len(messages) != config.nodes:
            raise ConfigError("backend=lockstep needs all nodes to train in every round")
        last = cast(int, instruction_config(messages[0].content)[SERVER_ROUND])
        batches = config.stream.batches_per_round or 1
        if last == steps and config.stream.initial_noise:
            self._add_noise()
        losses, correct = np.zeros(config.nodes), np.zeros(config.nodes)
        judged = False
        seed = derive_seed(config.seed, "lockstep", last)
        with seeded(seed, self._device):
            for number in range((last - steps) * batches + 1, last * batches + 1):
                loss, right = self._step(number)
                losses += loss
                if right is not None:
                    correct += right
                    judged = True
        count = steps * batches
        self._metrics = [
            {
                NUM_EXAMPLES: count * self._experiment.stream.sizes[node],
                LOSS_SUM: float(losses[node]),
                **({CORRECT_SHARE_SUM: float(correct[node])} if judged else {}),
                BATCHES: float(count),
            }
            for node in range(config.nodes)
        ]

    def _step(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Take one step of all nodes; return each one's loss, and accuracy if any, before it."""
        stream, scale = self._experiment.stream, self._experiment.dataset.scale
        drawn = [stream.batch(node, number) for node in range(self._experiment.config.nodes)]
        stored = torch.from_numpy(np.stack([x for x, _ in drawn])).to(self._device)
        inputs = stored.to(torch.float32) * scale
        targets = torch.from_numpy(np.stack([y for _, y in drawn])).to(self._device)
        self._model.train()
        logits = vmap(self._predict, randomness="different")(self._weights, inputs)
        target = self._experiment.dataset.target
        outputs, truth = logits.flatten(0, 1), targets.flatten()
        losses = target.losses(outputs, truth).view_as(targets).mean(1)
        self._optimizer.zero_grad()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        hits = target.hits(outputs.detach(), truth)
        end_step(self._device)
        right = None if hits is None else _doubles(hits.view_as(targets).float().mean(1))
        return _doubles(losses.detach()), right

    def _predict(self, weights: Tensors, inputs: torch.Tensor) -> Any:
        return functional_call(self._model, weights, (inputs,))

    def _distances(self, requests: Sequence[AveragingRequest]) -> list[float]:
        if not any(r.measure or r.send == "violated" for r in requests):
            return [0.0] * len(self._references)
        sums = torch.zeros(len(self._references), dtype=torch.float64)
        with torch.no_grad():
            for reference in {id(r): r for r in self._references}.values():
                rows = [i for i, r in enumerate(self._references) if r is reference]
                for name, weight in self._weights.items():
                    chosen = weight if len(rows) == len(weight) else weight[rows]
                    if name not in self._scratch:
                        self._scratch[name] = torch.empty_like(weight)
                    gap = self._scratch[name][: len(rows)]
                    torch.sub(chosen, reference[name], out=gap)
                    sums[rows] += gap.mul_(gap).flatten(1).sum(1).cpu().double()
        return [float(each) for each in sums]

    def _add_noise(self) -> None:
        config = self._experiment.config
        for node in range(config.nodes):
            model = self._experiment.build_model()
            add_noise(
                model,
                config.stream.initial_noise,
                derive_seed(config.seed, "train", 1, str(node)),
            )
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    self._weights[name][node] = weight.to(self._device)


def _doubles(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().double().numpy()


def _request(message: Message) -> AveragingRequest:
    request = requested_averaging(message.content)
    if request is None:
        raise ConfigError(
            "backend=lockstep learns from streams with strategies whose models live on the "
            "nodes: dynamic, periodic, nosync; use backend=inprocess"
        )
    return request


def _check(experiment: Experiment, model: nn.Module) -> None:
    stream = experiment.config.stream
    if experiment.config.secure:
        raise ConfigError("backend=lockstep has no messages to put masks on: backend=inprocess")
    if stream.rate_spread:
        raise ConfigError("backend=lockstep needs equal batches: set stream.rate_spread=0")
    if list(model.buffers()):
        raise ConfigError("backend=lockstep needs a model without buffers")
