"""Ordinary apps in the shapes of Flower's own quickstarts, with one line on each side changed."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gems_flwr import Gems, InProcessGrid, good_enough_mod
from gems_flwr.errors import MissingModError, RoundFailedError
from gems_flwr.networks import LayerReader


def partition(context):
    return context.node_config["partition-id"], context.node_config["num-partitions"]


def reply_to(message, arrays, count):
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(content), reply_to=message)


# --- scikit-learn on iris: four arrays of float64, a record without names --------------------


# --- a table: one output, a sigmoid at the end, labels of shape (n, 1) ------------------------


class Tabular(nn.Module):
    """Two hidden layers and the probability of the second class."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(30, 128), nn.Linear(128, 64)
        self.output = nn.Linear(64, 1)
        self.relu, self.sigmoid = nn.ReLU(), nn.Sigmoid()

    def forward(self, x):
        x = self.relu(self.layer2(self.relu(self.layer1(x))))
        return self.sigmoid(self.output(x))


def table(number, parts):
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return x[number::parts].astype(np.float32), y[number::parts].astype(np.float32)[:, None]


def load_table(number, parts):
    halves = train_test_split(*table(number, parts), test_size=0.2, random_state=0)
    x, held_x, y, held_y = map(torch.tensor, halves)
    loaders = (DataLoader(TensorDataset(*pair), 32) for pair in ((x, y), (held_x, held_y)))
    return tuple(loaders)


@pytest.mark.parametrize("ending", [nn.LogSoftmax(dim=1), nn.Flatten(0)], ids=type)
def test_the_output_layer_is_found_below_what_makes_probabilities(ending):
    """Also where the one score of a sample has lost its axis."""
    outputs = 1 if isinstance(ending, nn.Flatten) else 3
    net = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, outputs), ending)
    arrays = {key: value.numpy() for key, value in net.state_dict().items()}
    layer = LayerReader(arrays, net).output_layer((np.ones((2, 5)), np.zeros(2)))
    assert (layer.weight, layer.bias) == ("2.weight", "2.bias")


# --- what is refused, and how it is said ------------------------------------------------------


def refusal(data, **options):
    app = ClientApp(mods=[good_enough_mod(data, **options)])

    @app.train()
    def train(message, context):
        return reply_to(message, message.content["arrays"], 1)

    with pytest.raises(RoundFailedError) as caught:
        Gems(verify=True).start(InProcessGrid(app, 3), ArrayRecord(Tabular().state_dict()))
    assert len(caught.value.failures) == 3
    return str(caught.value)


def test_what_is_wrong_on_all_nodes_is_said_once_and_first():
    text = refusal(lambda context: load_table(*partition(context)))
    assert text.startswith("write good_enough_mod(data, model=Net): the model has arrays below")
    assert text.count("good_enough_mod") == 1
    assert "0 of 3 nodes gave a usable reply" in text
    assert refusal(None, model=Tabular).startswith("write good_enough_mod(data, model=Net): the se")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.linspace(0, 1, 8), "labels must be class numbers"),
        (np.eye(8), "labels must be one class number per sample"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, words):
    pair = np.zeros((8, 30), np.float32), labels
    assert refusal(lambda _: (pair, pair), model=Tabular).startswith(words)


@pytest.mark.parametrize("strategy", [Gems(), Gems(space="ball")])
def test_an_app_without_the_mod_is_told_which_to_add(strategy):
    """Its handler gets what it cannot load, or trains and sends a model that was not asked for."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        net = Tabular()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return reply_to(message, message.content["arrays"], 1)

    with pytest.raises(MissingModError, match=r"^write ClientApp\(mods=\[good_enough_mod\(data, "):
        strategy.start(InProcessGrid(app, 3), ArrayRecord(Tabular().state_dict()))
