"""An app in the shape of Flower's PyTorch quickstart, on the digits that scikit-learn brings.

Its network has sizes written into `forward`, its batches are dicts, its learning rate comes from
the server's config. What our strategies need is marked: nothing else differs from a plain app.
"""

from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gems_flwr import freeze_layers, good_enough_mod


class Net(nn.Module):
    """Two convolutions, each with pooling, and three linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 40)
        self.fc2 = nn.Linear(40, 24)
        self.fc3 = nn.Linear(24, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 2 * 2)
        x = F.relu(self.fc1(x))
        return self.fc3(F.relu(self.fc2(x)))


class FlexibleNet(Net):
    """The same without sizes in `forward`."""

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = torch.flatten(self.pool(F.relu(self.conv2(x))), 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


@lru_cache
def digits():
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    return images[order], torch.tensor(y)[order]


def loader(rows, batch_size=32):
    images, labels = digits()
    samples = [{"img": images[i], "label": labels[i]} for i in rows]
    return DataLoader(samples, batch_size=batch_size)


def load_data(number, parts):
    """Return loaders of one node's training and held-out images, split at random."""
    rows = list(range(len(digits()[1]) - 400))[number::parts]
    cut = int(0.8 * len(rows))
    return loader(rows[:cut]), loader(rows[cut:])


def partition(context):
    return context.node_config["partition-id"], context.node_config["num-partitions"]


def quickstart_app(freeze=True, net=Net, steps=None, epochs=8):
    """Return the client; `steps` counts training steps by round and node."""
    mod = good_enough_mod(lambda context: load_data(*partition(context)), model=net)
    app = ClientApp(mods=[mod])  # was: ClientApp()

    @app.train()
    def train(msg, context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        if freeze:
            freeze_layers(model, msg)  # the one new line
        batches, _ = load_data(*partition(context))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=msg.content["config"]["lr"], momentum=0.9
        )
        key = (msg.content["config"]["server-round"], partition(context)[0])
        for _ in range(epochs):
            for batch in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(batch["img"]), batch["label"]).backward()
                if steps is not None:
                    steps[key] = steps.get(key, 0) + 1
                optimizer.step()
        metrics = MetricRecord({"train_loss": 0.0, "num-examples": len(batches.dataset)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=msg)

    return app


def initial_arrays(net=Net):
    torch.manual_seed(0)
    return ArrayRecord(net().state_dict())


def evaluate_with(net=Net):
    """Return the server's own evaluation: it loads arrays into the module as it is."""

    def global_evaluate(server_round, arrays):
        model = net()
        model.load_state_dict(arrays.to_torch_state_dict())
        images, labels = (part[-400:] for part in digits())
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean()
        return MetricRecord({"accuracy": float(right)})

    return global_evaluate
