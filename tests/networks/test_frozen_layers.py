"""Layers that all nodes share: one call keeps them, and a handler without it is refused."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import blobs, both_parts
from helpers_layerwise import labels_of, network
from torch import nn

from gems_flwr import (
    Ball,
    Gems,
    InProcessGrid,
    LayerwiseGems,
    Neurons,
    freeze_layers,
    good_enough_mod,
)
from gems_flwr.errors import ModelError, RoundFailedError


def message(frozen):
    config = {"server-round": 1, **({"frozen-layers": frozen} if frozen else {})}
    # Messages are made within a run.
    (node,) = InProcessGrid(ClientApp(), 1).get_node_ids()
    content = RecordDict({"config": ConfigRecord(config)})
    return Message(content, dst_node_id=node, message_type="train")


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_the_message_its_config_and_a_number_freeze_alike(frozen):
    msg = message(frozen)
    expected = [f"{layer}.{what}" for layer in (0, 2, 4)[frozen:] for what in ("weight", "bias")]
    for given in (msg, msg.content["config"]):
        model = network()
        freeze_layers(model, given)
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        assert trained == expected
    with pytest.raises(ModelError, match=r"^write freeze_layers\(model, msg\)"):
        freeze_layers(network(), "1")


def start(strategy, rate=0.1, freeze=False):
    """Run an ordinary handler; return the result and how many layers it was to leave alone."""
    mod = good_enough_mod(
        both_parts(lambda c: blobs(labels_of(c.node_config["partition-id"]))), model=network
    )
    app, asked = ClientApp(mods=[mod]), []

    @app.train()
    def train(message, context):
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        asked.append(message.content["config"].get("frozen-layers", 0))
        if freeze:
            freeze_layers(model, message)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        x, y = blobs(labels_of(context.node_config["partition-id"]))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    grid = InProcessGrid(app, 2)
    return strategy.start(grid, ArrayRecord(network().state_dict())), asked


LAYERWISE = LayerwiseGems(neurons=Neurons(directions=20))
BALL = Gems(space=Ball(epsilon=0.1, directions=5))


@pytest.mark.parametrize(
    ("strategy", "changed"), [(LAYERWISE, "'0.weight', '0.bias'"), (BALL, "'0.weight', .*'2.bias'")]
)
def test_a_handler_that_forgets_to_freeze_is_refused_with_what_to_write(strategy, changed):
    wanted = rf"^write freeze_layers\(model, msg\) in the train handler.* changed \[{changed}\]"
    with pytest.raises(RoundFailedError, match=wanted) as caught:
        start(strategy)
    assert "failed on node 0:" in caught.value.failures[0].reason


def test_a_handler_that_freezes_or_changes_nothing_takes_part():
    for options in ({"freeze": True}, {"rate": 0.0}):
        result, asked = start(LAYERWISE, **options)
        assert result.failures == ()
        # Two nodes; of three rounds the second has a frozen layer, the last is a cone's.
        assert asked == [0, 0, 1, 1]
