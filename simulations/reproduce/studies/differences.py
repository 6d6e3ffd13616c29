"""Why some numbers differ from the papers': the experiments behind the explanations.

``python -m simulations.reproduce differences``: HAM10000 balanced before or after it is split,
CIFAR-10 with weaker features, and networks that are averaged from a common start or their own.
Behind the sentences of ``papers/explanations.yaml``; a few minutes, one seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from gems_flwr import scoring
from gems_flwr.runtime.seeding import derive_seed
from simulations.config import compose_config
from simulations.data.examples import Examples
from simulations.data.splits import balanced_sample
from simulations.experiment.experiment import Experiment
from simulations.experiment.training import TrainOptions, fit, predictions
from simulations.models import logistic
from simulations.report.tables import TextTable, print_table
from simulations.run import run as run_one

PER_CLASS = 2000
DIMENSIONS = (320, 120, 60)
NODES = (2, 3, 5)


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the folder of its runs."""
    seed = compose_config([*overrides]).seed
    given = [each for each in overrides if each.startswith("data_dir=")]
    _show("HAM10000, pooled logistic regression", _leakage(given, seed), console)
    _show("CIFAR-10, two nodes, fewer features", _weaker_features(given, seed), console)
    _show("MNIST, networks averaged once", _starts(overrides, output), console)
    return output


def _show(title: str, rows: Sequence[tuple[str, float]], console: Console) -> None:
    texts = ((name, f"{value:.3f}") for name, value in rows)
    print_table(TextTable.of(("case", "accuracy"), texts), console, title=title)


def _leakage(given: Sequence[str], seed: int) -> list[tuple[str, float]]:
    """Return balanced accuracy when copies of an image, or of a lesion, are on both sides."""
    words = ["dataset=ham10000_features", "dataset.public=0", f"seed={seed}", *given]
    dataset = Experiment(compose_config(words)).dataset
    rng = np.random.default_rng(seed)
    whole = Examples.concatenate([dataset.train, dataset.test])
    order = rng.permutation(len(whole))
    cut = len(dataset.train)
    even = rng.permutation(balanced_sample(whole.labels, PER_CLASS, rng))
    some = len(even) * cut // len(whole)
    splits = {
        "split by lesion, then balanced (ours)": (_even(dataset.train, rng), dataset.test),
        "split by image, then balanced": (
            _even(whole.take(order[:cut]), rng),
            whole.take(order[cut:]),
        ),
        "balanced, then split (the paper's order)": (
            whole.take(even[:some]),
            whole.take(even[some:]),
        ),
    }
    rows = []
    for name, (train, test) in splits.items():
        with warnings.catch_warnings():
            # Three hundred steps are near enough to the end for a comparison.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(max_iter=300).fit(_floats(train), train.labels)
        found = model.predict(_floats(test))
        rows.append((name, scoring.balanced_accuracy(found, test.labels)))
    return rows


def _even(examples: Examples, rng: np.random.Generator) -> Examples:
    return examples.take(balanced_sample(examples.labels, PER_CLASS, rng))


def _floats(examples: Examples) -> np.ndarray:
    return examples.features.astype(np.float32)


def _weaker_features(given: Sequence[str], seed: int) -> list[tuple[str, float]]:
    """Return accuracies of pooled data and of the average, for random projections."""
    dataset = Experiment(compose_config(["dataset=cifar10_features", *given])).dataset
    options = TrainOptions(optimizer="adam", lr=0.001, batch_size=32, epochs=12)
    rows = []
    for size in DIMENSIONS:
        draw = np.random.default_rng(derive_seed(seed, "projection", size))
        mix = np.eye(size) if size == 320 else draw.normal(size=(320, size)) / np.sqrt(size)
        train, test = (
            Examples(_floats(part) @ mix.astype(np.float32), part.labels)
            for part in (dataset.train, dataset.test)
        )
        halves = [train.take(np.flatnonzero(train.labels // 5 == half)) for half in (0, 1)]
        models = []
        for part in (train, *halves):
            torch.manual_seed(seed)  # a common start
            model = logistic(input_shape=(size,), classes=10)
            fit(model, part, scale=1.0, options=options, seed=seed)
            models.append(model)
        pooled, first, second = models
        with torch.no_grad():
            for weight, other in zip(first.parameters(), second.parameters(), strict=True):
                weight.add_(other).div_(2)
        for name, model in (("pooled", pooled), ("average of two nodes", first)):
            score = scoring.score(predictions(model, test, scale=1.0), test.labels)
            rows.append((f"{size} features, {name}", score["accuracy"]))
    return rows


def _starts(overrides: Sequence[str], output: Path) -> list[tuple[str, float]]:
    """Return the average of networks that began alike, or each by itself."""
    rows = []
    for own, name in (("false", "common start"), ("true", "own starts")):
        for nodes in NODES:
            words = ["experiment=gems2019_neural", "strategy=one_shot_average", f"nodes={nodes}"]
            more = ["strategy.weighted=false", f"own_initial_weights={own}", "progress=false"]
            config = compose_config([*words, *more, *overrides])
            result = run_one(config, output / config.run_name(), Console(quiet=True))
            rows.append((f"{nodes} nodes, {name}", result["accuracy"]))
    return rows
