"""Data for several models: examples are counted and losses computed from what a loader returns."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gems_flwr import (
    InProcessGrid,
    ModelError,
    MultiModel,
    OptionError,
    RoundFailedError,
    join_models,
    multi_model_mod,
)
from gems_flwr.client.several_data import cross_entropy_loss
from gems_flwr.wire.records import to_numpy, to_record


class Deep(nn.Module):
    """A network that returns probabilities."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def scores(self, x):
        return self.head(torch.relu(self.body(x)))

    def forward(self, x):
        return self.scores(x).softmax(1)


def line():
    return nn.Linear(6, 1)


MODELS = {"deep": Deep, "line": line}


def data_of(node):
    rng = np.random.default_rng(node)
    count = 10 + node
    deep = torch.tensor(rng.normal(size=(count, 4)), dtype=torch.float32), torch.arange(count) % 3
    flat = rng.normal(size=(7, 6)).astype(np.float32), np.arange(7.0)[:, None] % 2
    return {"deep": deep, "line": flat}


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
    app = app_with(multi_model_mod(data, model=MODELS))
    strategy = MultiModel(budget=3, sampling="lvr")
    result = strategy.start(InProcessGrid(app, 3), initial()[1], num_rounds=2)
    assert result.failures == ()
    assert result.details["examples"] == {
        "0": {"deep": 10, "line": 7},
        "1": {"deep": 11, "line": 7},
        "2": {"deep": 12},
    }


def test_the_loss_is_the_cross_entropy_of_the_scores_below_the_probabilities():
    loss, (models, _) = cross_entropy_loss(data, MODELS), initial()
    parts = data_of(1)
    deep = Deep()
    deep.load_state_dict({key: torch.from_numpy(a) for key, a in models["deep"].items()})
    theirs = F.cross_entropy(deep.scores(parts["deep"][0]), parts["deep"][1])
    assert loss(context(1), "deep", to_record(models["deep"])) == pytest.approx(theirs.item())
    x, y = map(torch.from_numpy, parts["line"])
    weight, bias = (torch.from_numpy(models["line"][key]) for key in ("weight", "bias"))
    theirs = F.binary_cross_entropy_with_logits(x @ weight.T + bias, y.float())
    assert loss(context(1), "line", to_record(models["line"])) == pytest.approx(theirs.item())


def test_what_is_missing_is_said():
    with pytest.raises(OptionError, match=r"^write multi_model_mod\(data, model="):
        multi_model_mod(model=MODELS)
    deep = to_record(initial()[0]["deep"])
    with pytest.raises(ModelError, match=r"^write multi_model_mod\(data, model=\{'deep': Net"):
        cross_entropy_loss(data, {})(context(1), "deep", deep)
    app = app_with(multi_model_mod(lambda c: data_of(0)["deep"], model=MODELS))
    with pytest.raises(RoundFailedError, match=r"return \{name of the model"):
        MultiModel(budget=3).start(InProcessGrid(app, 3), initial()[1], num_rounds=1)
