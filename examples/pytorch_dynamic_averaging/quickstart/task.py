"""The model, the data of a node, training and testing."""

import numpy as np
import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEST_IMAGES = 360


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a score for each digit."""
        return self.output(torch.relu(self.hidden(images)))


def training_data(context: Context) -> DataLoader:
    """Return four fifths of the node's digits."""
    rows = _rows(context)
    return _loader(rows[rows % 5 > 0], shuffle=True)


def validation_data(context: Context) -> DataLoader:
    """Return the other fifth."""
    rows = _rows(context)
    return _loader(rows[rows % 5 == 0])


def test_data() -> DataLoader:
    """Return the digits that no node has."""
    return _loader(np.arange(TEST_IMAGES))


def _rows(context: Context) -> np.ndarray:
    node, nodes = context.node_config["partition-id"], context.node_config["num-partitions"]
    # Sorted by digit, so that every node knows a few of the ten only.
    images = TEST_IMAGES + np.argsort(load_digits().target[TEST_IMAGES:], kind="stable")
    return np.array_split(images, int(nodes))[int(node)]


def _loader(rows: np.ndarray, shuffle: bool = False) -> DataLoader:
    digits = load_digits()
    images = torch.tensor(digits.data[rows] / 16, dtype=torch.float32)
    return DataLoader(
        TensorDataset(images, torch.tensor(digits.target[rows])), batch_size=32, shuffle=shuffle
    )


def train(net: Net, data: DataLoader, learning_rate: float) -> float:
    """Train for one epoch; return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    losses = []
    for images, labels in data:
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def accuracy(net: Net, data: DataLoader) -> float:
    """Return the share of digits that the model gets right."""
    with torch.no_grad():
        right = [(net(images).argmax(1) == labels).float() for images, labels in data]
    return float(torch.cat(right).mean())
