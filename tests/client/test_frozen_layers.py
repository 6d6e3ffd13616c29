"""Layers that all nodes share: one call keeps them, and who forgets it hears so at once."""

import threading

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import blobs, both_parts
from helpers_gems import node_data
from helpers_layerwise import labels_of, network
from torch import nn
from torch.optim import optimizer as torch_optimizers

from gems_flwr import (
    Ball,
    Gems,
    InProcessGrid,
    LayerwiseGems,
    ModelError,
    Neurons,
    RoundFailedError,
    freeze_layers,
    good_enough_mod,
)
from gems_flwr.networks.frozen_watch import watch_frozen
from gems_flwr.wire.asking import freeze_below
from gems_flwr.wire.records import to_numpy, to_record


def message(frozen):
    arrays = ArrayRecord(network().state_dict())
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    freeze_below(content, frozen)
    # Messages are made within a run.
    (node,) = InProcessGrid(ClientApp(), 1).get_node_ids()
    return Message(content, dst_node_id=node, message_type="train")


def trained_names(model):
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_the_message_its_content_its_config_and_a_number_freeze_alike(frozen):
    msg = message(frozen)
    expected = [f"{layer}.{what}" for layer in (0, 2, 4)[frozen:] for what in ("weight", "bias")]
    for given in (msg, msg.content, msg.content["config"], {"frozen-layers": frozen}, frozen):
        model = network()
        freeze_layers(model, given)
        assert trained_names(model) == expected


def test_anything_else_is_refused():
    with pytest.raises(ModelError, match=r"^write freeze_layers\(model, msg\)"):
        freeze_layers(network(), "1")


# --- a handler that forgets it ----------------------------------------------------------------


class Handler:
    """An ordinary handler that counts its steps."""

    def __init__(self, optimizer=torch.optim.Adam, frozen=None, **options):
        self.steps, self.frozen = [], frozen
        self.optimizer, self.options = optimizer, options

    def __call__(self, message, context):
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        if self.frozen:
            self.frozen(model, message)
        if message.content["config"].get("frozen-layers"):
            self.steps.append(0)
        optimizer = self.optimizer(model.parameters(), **{"lr": 0.02, **self.options})
        x, y = blobs(labels_of(context.node_config["partition-id"]))
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if message.content["config"].get("frozen-layers"):
                self.steps[-1] += 1
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)


def start(handler, strategy=None):
    app = ClientApp(mods=[good_enough_mod(both_parts(node_data), model=network)])
    app.train()(handler)
    strategy = strategy or LayerwiseGems(neurons=Neurons(directions=20))
    return strategy.start(InProcessGrid(app, 2), ArrayRecord(network().state_dict()))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(
    ("strategy", "changed"),
    [
        (None, r"\['0.weight'\]"),
        (Gems(space=Ball(epsilon=0.3, directions=5)), r"\['0.weight', '2.weight'\]"),
    ],
)
def test_a_handler_that_forgets_to_freeze_is_stopped_at_its_first_step(
    optimizer, strategy, changed
):
    handler = Handler(optimizer)
    wanted = rf"^write freeze_layers\(model, msg\) in the train handler.* changed {changed}"
    with pytest.raises(RoundFailedError, match=wanted) as caught:
        start(handler, strategy)
    assert handler.steps == [1, 1]
    assert "failed on node 0:" in caught.value.failures[0].reason
    assert not torch_optimizers._global_optimizer_pre_hooks
    assert not torch_optimizers._global_optimizer_post_hooks


def test_a_handler_that_freezes_takes_all_its_steps():
    handler = Handler(frozen=freeze_layers)
    assert start(handler).failures == ()
    # Two nodes; of three rounds the second has a frozen layer, the last is a cone's.
    assert handler.steps == [60, 60]
    assert not torch_optimizers._global_optimizer_pre_hooks


def test_a_learning_rate_of_zero_changes_nothing_and_is_no_fault():
    handler = Handler(torch.optim.SGD, lr=0.0)
    assert start(handler).failures == ()
    assert handler.steps == [60, 60]


def test_training_without_an_optimiser_is_found_out_in_the_end():
    def handler(message, context):
        arrays = to_numpy(message.content["arrays"])
        record = to_record({key: array + 1 for key, array in arrays.items()})
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": record, "metrics": metrics})
        return Message(content, reply_to=message)

    with pytest.raises(RoundFailedError, match=r"training changed \['0.weight', '0.bias'\]"):
        start(handler)


# --- who is not meant -------------------------------------------------------------------------


def one_step(*weights):
    """Move weights by plain SGD."""
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def accuse(keys):
    return AssertionError(f"accused: {keys}")


RNG = np.random.default_rng(0)
SENT = {
    "body.weight": RNG.normal(size=(3, 2)),
    "body.bias": np.zeros(3),
    "ones.weight": np.ones((4, 4)),
    "head.weight": RNG.normal(size=(3, 2)),
}
FROZEN = ["body.weight", "body.bias", "ones.weight"]


def parameter(values):
    return nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize(
    "innocent",
    [
        lambda: parameter(SENT["head.weight"]),  # of the same shape
        lambda: parameter(np.zeros(3)),  # a bias like many
        lambda: parameter(np.ones((4, 4))),  # a constant is no proof
        lambda: parameter(SENT["body.weight"].T.copy()),
    ],
)
def test_weights_that_are_not_the_frozen_ones_may_change(innocent):
    with watch_frozen(SENT, FROZEN, accuse):
        one_step(innocent())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_frozen_weight_is_known_in_whatever_precision_it_is_trained(dtype):
    weight = nn.Parameter(torch.tensor(SENT["body.weight"], dtype=dtype))
    with (
        pytest.raises(AssertionError, match=r"accused: \['body.weight'\]"),
        watch_frozen(SENT, FROZEN, accuse),
    ):
        one_step(parameter(SENT["head.weight"]), weight)


def test_training_in_another_thread_is_not_this_handlers():
    """A handler that overstayed may go on beside the next one."""
    faults = []

    def elsewhere():
        try:
            one_step(parameter(SENT["body.weight"]))
        except AssertionError as fault:
            faults.append(fault)

    with watch_frozen(SENT, FROZEN, accuse):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert faults == []
