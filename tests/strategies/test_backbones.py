"""What is below the output layer goes to a node at most once, and to no node that has it."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CLASSES, FEATURES, TEST, blobs
from torch import nn

from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.errors import OptionError, RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.gems import Gems
from gems_flwr.wire.space_requests import Ball

WIDTH = 20_000  # more than a megabyte below the output layer


def net(seed=0, width=WIDTH):
    """A wide random layer of a known seed below a small output layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(8, CLASSES))


BACKBONE_BYTES = sum(p.numel() * 4 for p in net()[:4].parameters())


def node_data(context):
    node = context.node_config["partition-id"]
    labels = [2 * node % CLASSES, (2 * node + 1) % CLASSES]
    return blobs(labels, seed=10 * node), blobs(labels, seed=10 * node + 1)


class App:
    """An app whose nodes build their models from seeds of their own; notes what handlers got."""

    def __init__(self, seeds, model=net, forget=False, **options):
        self.seeds, self.seen, self.forget = seeds, [], forget
        self.options, self.model = options, model

    def __call__(self, message, context):
        node = int(context.node_config["partition-id"])
        if self.forget:
            context.state.clear()
        app = ClientApp(
            mods=[
                good_enough_mod(
                    node_data, model=lambda: self.model(self.seeds[node]), **self.options
                )
            ]
        )

        @app.train()
        def train(message, context):
            arrays = message.content["arrays"]
            self.seen.append((node, list(arrays), list(message.content.array_records)))
            metrics = MetricRecord({"num-examples": 10})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        return app(message, context)


def run(strategy, app, nodes=2, seed=0):
    grid = InProcessGrid(app, nodes)
    return strategy.start(grid, ArrayRecord(net(seed).state_dict()))


def accuracy(arrays):
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        return float((model(TEST[0]).argmax(1) == TEST[1]).float().mean())


def test_nodes_that_have_the_backbone_are_sent_the_head_alone():
    result = run(Gems(verify=True), App([0, 0]))
    assert BACKBONE_BYTES > 1_000_000
    assert result.traffic.bytes_down < 10_000
    assert result.traffic.messages_up == 4  # two spaces, two scores
    # The result is a whole model, whose lower layers nobody has touched.
    assert np.array_equal(result.arrays["0.weight"].numpy(), net()[0].weight.detach().numpy())
    assert accuracy(result.arrays) > 0.9
    assert min(result.details["node_scores"].values()) > 0.9


def test_the_result_is_that_of_sending_everything():
    without, everything = run(Gems(), App([0, 0])), run(Gems(backbone="send"), App([5, 6]))
    for key in without.arrays:
        assert np.array_equal(without.arrays[key].numpy(), everything.arrays[key].numpy())


def test_nodes_without_the_backbone_get_it_once_and_only_they():
    result = run(Gems(verify=True), App([0, 1]))
    assert BACKBONE_BYTES < result.traffic.bytes_down < 1.1 * BACKBONE_BYTES
    assert result.traffic.messages_up == 5  # one said first that it needs the layers
    assert result.history[1].nodes_answered == ("0", "1")
    assert result.failures == ()
    assert accuracy(result.arrays) > 0.9


def test_a_backbone_that_nobody_has_can_come_along_with_the_first_message():
    result = run(Gems(verify=True, backbone="send"), App([3, 1]))
    assert 2 * BACKBONE_BYTES < result.traffic.bytes_down < 2.1 * BACKBONE_BYTES
    assert result.traffic.messages_up == 4


def test_a_small_backbone_comes_along_with_the_first_message():
    def small(seed):
        return net(seed, width=16)

    grid = InProcessGrid(App([3, 1], model=small), 2)
    result = Gems(verify=True).start(grid, ArrayRecord(small(0).state_dict()))
    assert result.traffic.messages_up == 4
    # Once to each, with the head in two messages and the rest of what messages hold.
    whole = sum(len(array.data) for array in result.arrays.values())
    assert whole < result.traffic.bytes_down / 2 < whole + 2000


def test_a_node_that_lost_its_state_is_given_the_backbone_again():
    result = run(Gems(verify=True), App([0, 1], forget=True))
    assert 2 * BACKBONE_BYTES < result.traffic.bytes_down < 2.1 * BACKBONE_BYTES
    assert set(result.details["node_scores"]) == {"0", "1"}


def test_another_backbone_is_refused_by_name_where_none_is_to_be_sent():
    strategy = Gems(backbone="local", min_nodes=1)
    result = run(strategy, App([0, 1]))
    [(_, failure)] = result.failures
    assert failure.node == "1"
    assert "load the same weights" in failure.reason
    assert result.traffic.bytes_down < 10_000
    # Nothing but the answer that it has other layers left the node.
    with pytest.raises(RoundFailedError, match="load the same weights"):
        run(Gems(backbone="local"), App([2, 1]))


def test_handlers_get_whole_models():
    app = App([0, 1])
    run(Gems(space=Ball(epsilon=0.1, directions=3)), app)
    assert {node for node, _, _ in app.seen} == {0, 1}
    for _, keys, records in app.seen:
        assert keys == list(net().state_dict())
        assert records == ["arrays"]


class Tampering:
    """A grid's app between which and the server somebody changes messages."""

    def __init__(self, app, change):
        self.app, self.change = app, change

    def __call__(self, message, context):
        self.change(message.content)
        return self.app(message, context)


def test_layers_that_are_not_those_of_the_digest_are_refused_before_anything_is_sent():
    def change(content):
        if "backbone" in content:
            arrays = content["backbone"]
            content["backbone"] = ArrayRecord(
                {k: v + 1 for k, v in arrays.to_torch_state_dict().items()}
            )

    with pytest.raises(RoundFailedError, match="not those that the server means"):
        run(Gems(), Tampering(App([1, 2]), change))


def test_a_node_that_asks_for_the_backbone_for_ever_is_left_out():
    def drop(content):
        content.pop("backbone", None)

    result = run(Gems(min_nodes=1), Tampering(App([0, 9]), drop))
    [(_, failure)] = result.failures
    assert failure.node == "1"
    assert "asks again" in failure.reason
    assert result.traffic.bytes_down < 1.1 * BACKBONE_BYTES


def test_server_and_node_must_mean_the_same_output_layer():
    class Swapped(nn.Module):
        """Its state dict ends in a layer that is not the last to run."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)
            self.aside = nn.Linear(FEATURES, FEATURES)

        def forward(self, x):
            return self.head(torch.relu(self.aside(x)))

    torch.manual_seed(0)
    initial = ArrayRecord(Swapped().state_dict())
    app = App([0, 0], model=lambda seed: Swapped())
    with pytest.raises(RoundFailedError, match=r"write Gems\(layer='head'\)"):
        Gems().start(InProcessGrid(app, 2), initial)
    result = Gems(layer="head").start(InProcessGrid(app, 2), initial)
    assert result.failures == ()


def test_an_unknown_way_is_refused():
    with pytest.raises(OptionError, match="backbone must be one of"):
        Gems(backbone="guess")


@pytest.mark.slow
def test_five_nodes_share_a_resnet_for_less_than_a_megabyte_down():
    """Torchvision's ResNet-18: 45 MB a copy, of which the head has 20 KB."""
    models = pytest.importorskip("torchvision.models")

    def resnet(seed=0):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = models.resnet18(num_classes=CLASSES)
        return model

    def images(context):
        rng = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        labels = torch.arange(128) % CLASSES
        x = torch.randn(128, 3, 32, 32, generator=rng) + labels.float().reshape(-1, 1, 1, 1)
        return (x, labels), (x, labels)

    app = ClientApp(mods=[good_enough_mod(images, model=resnet)])
    app.train()(lambda message, context: None)
    initial = ArrayRecord(resnet().state_dict())
    result = Gems(verify=True).start(InProcessGrid(app, 5), initial)
    assert len(result.details["node_scores"]) == 5
    assert result.traffic.bytes_down <= 1_000_000
    assert sum(len(array.data) for array in initial.values()) > 44_000_000
