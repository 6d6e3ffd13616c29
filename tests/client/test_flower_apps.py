"""Ordinary apps in the shapes of Flower's own quickstarts, with one line on each side changed."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gems_flwr import (
    Ball,
    Gems,
    InProcessGrid,
    LayerwiseGems,
    MissingModError,
    OptionError,
    RoundFailedError,
    good_enough_mod,
    statistics_mod,
)
from gems_flwr.networks.inputs import LayerReader


def partition(context):
    return context.node_config["partition-id"], context.node_config["num-partitions"]


def reply_to(message, arrays, count):
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(content), reply_to=message)


# --- scikit-learn on iris: four arrays of float64, a record without names --------------------


def load_iris_part(number, parts):
    x, y = load_iris(return_X_y=True)
    mine = np.random.default_rng(0).permutation(len(y))[number::parts]
    x, y = x[mine], y[mine]
    cut = int(0.8 * len(y))
    return x[:cut], y[:cut], x[cut:], y[cut:]


def iris_app():
    app = ClientApp(mods=[good_enough_mod(lambda context: load_iris_part(*partition(context)))])

    @app.train()
    def train(message, context):
        x, y, _, _ = load_iris_part(*partition(context))
        model = LogisticRegression(max_iter=500).fit(x, y)
        return reply_to(message, ArrayRecord([model.coef_, model.intercept_]), len(y))

    return app


@pytest.mark.parametrize("nodes", [3, 5, 10])
def test_iris_in_one_round_however_small_the_nodes(nodes):
    """Of ten nodes each has twelve training samples, about four of a class."""
    start = ArrayRecord([np.zeros((3, 4)), np.zeros(3)])
    result = Gems(verify=True).start(InProcessGrid(iris_app(), nodes), start)
    assert result.failures == ()
    weight, bias = result.arrays.to_numpy_ndarrays()
    assert weight.dtype == bias.dtype == np.float64
    x, y = load_iris(return_X_y=True)
    assert np.mean((x @ weight.T + bias).argmax(1) == y) > 0.9
    assert len(result.details["node_scores"]) == nodes


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


def table_app():
    mod = good_enough_mod(lambda context: load_table(*partition(context)), model=Tabular)
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message, context):
        net = Tabular()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        batches, _ = load_table(*partition(context))
        optimizer = torch.optim.Adam(net.output.parameters(), lr=0.05)
        for _ in range(5):
            for x, y in batches:
                optimizer.zero_grad()
                nn.BCELoss()(net(x), y).backward()
                optimizer.step()
        return reply_to(message, ArrayRecord(net.state_dict()), len(batches.dataset))

    return app


def right(arrays):
    """Return the share of right answers of the app's own network on all of the table."""
    net = Tabular()
    net.load_state_dict(arrays.to_torch_state_dict())
    x, y = map(torch.tensor, table(0, 1))
    with torch.no_grad():
        return float(((net(x) > 0.5).float() == y).float().mean())


@pytest.mark.parametrize("space", ["cone", Ball(epsilon=0.7, directions=20)])
def test_one_output_below_a_sigmoid_is_a_model_of_two_classes(space):
    torch.manual_seed(0)
    start = ArrayRecord(Tabular().state_dict())
    seen = []

    def evaluate(server_round, arrays):
        seen.append(right(arrays))
        return MetricRecord({"accuracy": seen[-1]})

    strategy = Gems(space=space, verify=True)
    result = strategy.start(InProcessGrid(table_app(), 4), start, evaluate_fn=evaluate)
    assert result.failures == ()
    # 63 % are of one class.
    assert seen[0] < 0.7 < 0.9 < seen[1]
    assert min(result.details["node_scores"].values()) > 0.8


@pytest.mark.parametrize(
    "ending",
    [
        nn.Identity(),
        nn.Sigmoid(),
        nn.Softmax(dim=1),
        nn.LogSoftmax(dim=1),
    ],
)
def test_the_output_layer_is_found_below_what_makes_probabilities(ending):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3), ending)
    arrays = {key: value.numpy() for key, value in net.state_dict().items()}
    layer = LayerReader(arrays, net).output_layer((np.ones((2, 5)), np.zeros(2)))
    assert (layer.weight, layer.bias) == ("2.weight", "2.bias")


@pytest.mark.parametrize("axis", [None, 1])
def test_one_score_per_sample_may_have_lost_its_axis(axis):
    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 1)

        def forward(self, x):
            return torch.sigmoid(self.head(torch.relu(self.body(x)))).flatten(0, axis or -1)

    net = Squeezed()
    arrays = {key: value.numpy() for key, value in net.state_dict().items()}
    layer = LayerReader(arrays, net).output_layer((np.ones((2, 5)), np.zeros(2)))
    assert layer.weight == "head.weight"


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


def test_what_differs_from_node_to_node_is_listed():
    def data(context):
        return None if partition(context)[0] else (None, None)

    lines = refusal(data, model=Tabular).splitlines()
    assert lines[0] == "round 1 failed: 0 of 3 nodes gave a usable reply, min_nodes is 2"
    assert [line[:10] for line in lines[1:4]] == ["  node 0: ", "  node 1: ", "  node 2: "]


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


@pytest.mark.parametrize("mod", [good_enough_mod, statistics_mod])
@pytest.mark.parametrize("old", ["train", "validation"])
def test_old_keywords_are_refused_with_what_to_write(mod, old):
    with pytest.raises(OptionError, match=rf"^write {mod.__name__}\(data, model=Net\) with data"):
        mod(load_table, **{old: load_table})


@pytest.mark.parametrize("strategy", [Gems(), LayerwiseGems(), Gems(space="ball")])
def test_an_app_without_the_mod_is_told_which_to_add(strategy):
    """Its handler gets what it cannot load, or trains and sends a model that nobody wants."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        net = Tabular()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return reply_to(message, message.content["arrays"], 1)

    with pytest.raises(MissingModError, match=r"^write ClientApp\(mods=\[good_enough_mod\(data, "):
        strategy.start(InProcessGrid(app, 3), ArrayRecord(Tabular().state_dict()))
