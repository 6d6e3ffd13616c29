"""The model, the data of a node, training and testing."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

TEST_IMAGES = 360


class Net(nn.Module):
    """Two convolutions and three linear layers, for images of 8 × 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        """Return a score for each digit."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 2 * 2)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the node's training and test data, four fifths and one fifth of its images."""
    # Half of the images are dealt out by digit: a node knows some digits better than others.
    labels = load_digits().target
    images = np.random.default_rng(0).permutation(np.arange(TEST_IMAGES, len(labels)))
    by_digit, at_random = np.array_split(images, 2)
    by_digit = by_digit[np.argsort(labels[by_digit], kind="stable")]
    parts = [np.array_split(half, num_partitions) for half in (by_digit, at_random)]
    rows = np.concatenate([part[partition_id] for part in parts])
    trainloader = DataLoader(examples(rows[rows % 5 > 0]), batch_size=batch_size, shuffle=True)
    testloader = DataLoader(examples(rows[rows % 5 == 0]), batch_size=batch_size)
    return trainloader, testloader


def load_centralized_dataset():
    """Return the images that no node has."""
    return DataLoader(examples(np.arange(TEST_IMAGES)), batch_size=128)


def examples(rows):
    """Return images and their digits, as batches hold them."""
    digits = load_digits()
    images = torch.tensor(digits.images[rows] / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target[rows])
    return [{"img": image, "label": label} for image, label in zip(images, labels, strict=True)]


def train(net, trainloader, epochs, lr, device):
    """Train the model; return the mean loss."""
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    losses = []
    for _ in range(epochs):
        for batch in trainloader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net, testloader, device):
    """Return loss and accuracy."""
    net.to(device)
    net.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for batch in testloader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            scores = net(images)
            loss += F.cross_entropy(scores, labels).item()
            correct += (scores.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
