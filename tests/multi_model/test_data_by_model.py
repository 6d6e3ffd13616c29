"""Data for several models: examples are counted and losses computed from what a loader returns."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gems_flwr import InProcessGrid, MultiModel, good_enough_mod
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.errors import ModelError, RoundFailedError
from gems_flwr.node import NodeOptions
from gems_flwr.strategies.multi_model import join_models
from gems_flwr.strategies.multi_model.question import DataByModel


def deep():
    """A network that returns probabilities."""
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Softmax(1))


MODELS = {"deep": deep, "line": lambda: nn.Linear(6, 1)}


def data_of(node):
    rng = np.random.default_rng(node)
    count = 10 + node
    rows = torch.tensor(rng.normal(size=(count, 4)), dtype=torch.float32)
    flat = rng.normal(size=(7, 6)).astype(np.float32), np.arange(7.0)[:, None] % 2
    return {"deep": (rows, torch.arange(count) % 3), "line": flat}


def data(context):
    """One model's data come as loaders, the other's as arrays; node 2 has none for the latter."""
    node = int(context.node_config["partition-id"])
    parts = data_of(node)
    loader = DataLoader(TensorDataset(*parts["deep"]), 4)
    flat = None if node == 2 else parts["line"]
    return {"deep": (loader, loader), "line": (flat, None)}


def app_with(mod):
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 5})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def initial():
    torch.manual_seed(0)
    models = {name: to_numpy(ArrayRecord(build().state_dict())) for name, build in MODELS.items()}
    return models, to_record(join_models(models))


def context(node):
    return Context(1, 1, {"partition-id": node}, RecordDict(), {})


def test_examples_are_counted_and_losses_drawn_by_without_a_function_of_the_users():
    app = app_with(good_enough_mod(data, model=MODELS))
    strategy = MultiModel(budget=3, sampling="lvr")
    result = strategy.start(InProcessGrid(app, 3), initial()[1], num_rounds=2)
    assert result.failures == ()
    assert result.details["examples"] == {
        "0": {"deep": 10, "line": 7},
        "1": {"deep": 11, "line": 7},
        "2": {"deep": 12},
    }


def loss(node, name, arrays, models=MODELS):
    return DataByModel(NodeOptions(data, models), context(node)).loss(name, arrays, "cpu")


def test_the_loss_is_the_cross_entropy_of_the_scores_below_the_probabilities():
    models, _ = initial()
    parts = data_of(1)
    net = deep()
    net.load_state_dict({key: torch.from_numpy(a) for key, a in models["deep"].items()})
    theirs = F.cross_entropy(net[:3](parts["deep"][0]), parts["deep"][1])
    assert loss(1, "deep", models["deep"]) == pytest.approx(theirs.item())
    x, y = map(torch.from_numpy, parts["line"])
    weight, bias = (torch.from_numpy(models["line"][key]) for key in ("weight", "bias"))
    theirs = F.binary_cross_entropy_with_logits(x @ weight.T + bias, y.float())
    assert loss(1, "line", models["line"]) == pytest.approx(theirs.item())


def test_what_is_missing_is_named():
    with pytest.raises(ModelError, match=r"^write good_enough_mod\(data, model="):
        loss(1, "deep", initial()[0]["deep"], {})
    app = app_with(good_enough_mod(lambda c: data_of(0)["deep"], model=MODELS))
    with pytest.raises(RoundFailedError, match=r"return \{name of the model"):
        MultiModel(budget=3).start(InProcessGrid(app, 3), initial()[1], num_rounds=1)
