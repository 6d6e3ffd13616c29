"""The model, the data of a node, training and testing."""

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """Two hidden layers, and the probability of the second class."""

    def __init__(self, input_dim: int = 30):
        super().__init__()
        self.layer1 = nn.Linear(input_dim, 128)
        self.layer2 = nn.Linear(128, 64)
        self.output = nn.Linear(64, 1)
        self.relu = nn.ReLU()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        """Return the probability that a tumour is benign."""
        x = self.relu(self.layer1(x))
        x = self.relu(self.layer2(x))
        return self.sigmoid(self.output(x))


def load_data(partition_id: int, num_partitions: int):
    """Return the node's training and test data, four fifths and one fifth of its patients."""
    table = load_breast_cancer()
    patients = np.random.default_rng(0).permutation(len(table.target))
    rows = np.array_split(patients, num_partitions)[partition_id]
    train, test = np.split(rows, [int(0.8 * len(rows))])
    scaler = StandardScaler().fit(table.data[train])
    train_set, test_set = (
        TensorDataset(
            torch.tensor(scaler.transform(table.data[part]), dtype=torch.float32),
            torch.tensor(table.target[part], dtype=torch.float32).view(-1, 1),
        )
        for part in (train, test)
    )
    return DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(test_set, batch_size=32)


def trainer(model, train_loader, num_epochs=1):
    """Train the model."""
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    model.train()
    for _ in range(num_epochs):
        for features, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()


def evaluator(model, test_loader):
    """Return loss and accuracy."""
    criterion = nn.BCELoss()
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for features, labels in test_loader:
            outputs = model(features)
            loss += criterion(outputs, labels).item()
            correct += ((outputs > 0.5).float() == labels).sum().item()
    return loss / len(test_loader), correct / len(test_loader.dataset)
