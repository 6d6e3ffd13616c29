"""The reference is the optimum: softmax regression against scikit-learn and autograd."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import load_file
from sklearn.linear_model import LogisticRegression
from torch import nn

from gems_flwr.scoring import score as score_of
from simulations import data
from simulations.config import compose_config
from simulations.data import Examples
from simulations.experiment.experiment import experiment_of
from simulations.experiment.fixed_lift import LiftMemory
from simulations.experiment.linear_optimum import (
    RIDGES,
    TOLERANCE,
    choose_ridge,
    linear_optimum,
    solve,
)
from simulations.experiment.training import TrainOptions, fit, predictions
from simulations.run import run


def blobs(rows=300, features=6, classes=3, seed=0, scales=1.0):
    """Return classes that overlap, so that the optimum is finite even with a tiny ridge."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    labels[:classes] = np.arange(classes)
    centres = rng.normal(size=(classes, features))
    x = (centres[labels] + rng.normal(size=(rows, features)) * 1.5) * scales
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels)


def objective(x, y, layer, ridge):
    weight, bias = layer[:, :-1], layer[:, -1]
    loss = nn.functional.cross_entropy(x.double() @ weight.T + bias, y)
    return loss + ridge / 2 * (weight**2).sum()


@pytest.mark.parametrize("ridge", [1.0, 1e-2, 1e-5])
@pytest.mark.parametrize("scales", [1.0, 10.0 ** np.arange(-2, 4)])
def test_the_solution_is_scikit_learns(ridge, scales):
    """Its C multiplies the sum of losses: C = 1 / (n · ridge). A common shift of biases is free."""
    x, y = blobs(scales=scales)
    ours = solve(x, y, classes=3, ridge=ridge)
    options = {"tol": 1e-12, "max_iter": 100_000, "solver": "newton-cg"}
    model = LogisticRegression(C=1 / (len(y) * ridge), **options).fit(x.double().numpy(), y.numpy())
    theirs = np.c_[model.coef_, model.intercept_]
    rows = np.c_[x.numpy(), np.ones(len(x))]
    logits, expected = (rows @ layer.T for layer in (ours.layer.numpy(), theirs))
    centred = (each - each.mean(1, keepdims=True) for each in (logits, expected))
    np.testing.assert_allclose(*centred, atol=2e-3, rtol=1e-3)
    assert ours.loss <= float(objective(x, y, torch.from_numpy(theirs), ridge)) + 1e-9


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from([1e-1, 1e-3, 1e-5]), st.integers(2, 5))
def test_the_gradient_that_is_reported_is_autograds_and_within_the_tolerance(seed, ridge, classes):
    x, y = blobs(rows=80, features=4, classes=classes, seed=seed)
    found = solve(x, y, classes=classes, ridge=ridge)
    layer = found.layer.clone().requires_grad_()
    value = objective(x, y, layer, ridge)
    (gradient,) = torch.autograd.grad(value, layer)
    assert found.loss == pytest.approx(value.item(), rel=1e-9)
    assert found.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-3, abs=1e-12)
    assert found.gradient_norm <= TOLERANCE


def test_the_ridge_is_the_one_that_is_right_most_often_on_what_is_held_out():
    """Mostly noise, few rows: a weak ridge fits the noise. Accuracies come from scikit-learn."""
    x, y = blobs(rows=400, features=3)
    noise = torch.randn((400, 37), generator=torch.Generator().manual_seed(0))
    x = torch.hstack([x, noise])
    train, held_out = (x[:80], y[:80]), (x[80:], y[80:])
    choice = choose_ridge(x, y, classes=3, folds=[torch.arange(80, 400)])
    accuracies = {}
    for ridge in RIDGES:
        model = LogisticRegression(C=1 / (80 * ridge), tol=1e-8, max_iter=10**5)
        model.fit(*(part.numpy() for part in train))
        accuracies[ridge] = model.score(*(part.numpy() for part in held_out))
    assert choice.accuracy == pytest.approx(max(accuracies.values()), abs=0.004)
    assert accuracies[choice.ridge] == pytest.approx(choice.accuracy, abs=0.004)
    assert choice.ridge > RIDGES[-1]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(6, 3), nn.ReLU()),
        nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
        nn.Linear(6, 3, bias=False),
    ],
)
def test_what_has_more_to_learn_than_its_output_layer_is_not_solved(model):
    assert linear_optimum(model, blobs(), 0) is None


def finish(folder, *overrides):
    config = compose_config(["strategy=global", "progress=false", *overrides])
    return run(config, folder, Console(quiet=True)), load_file(folder / "model.safetensors"), config


def test_global_is_the_optimum_and_says_how_it_was_found(tmp_path):
    result, _, config = finish(tmp_path)
    details = result["details"]
    assert details["converged"]
    assert details["gradient_norm"] <= details["gradient_tolerance"] == TOLERANCE
    assert 0 < details["validation_accuracy"] <= 1
    experiment = experiment_of(config.to_json())
    pooled = Examples.concatenate([share.train for share in experiment.shares])
    inputs, labels = (part.numpy() for part in experiment.tensors(pooled))
    inputs = inputs.reshape(len(inputs), -1)
    sklearn = LogisticRegression(C=1 / (len(labels) * details["ridge"]), tol=1e-10, max_iter=10**5)
    sklearn.fit(inputs, labels)
    test_inputs, test_labels = (
        part.numpy() for part in experiment.tensors(experiment.dataset.test)
    )
    theirs = sklearn.predict_proba(test_inputs.reshape(len(test_inputs), -1))
    assert result["accuracy"] == pytest.approx(score_of(theirs, test_labels)["accuracy"], abs=1e-9)
    assert result["loss"] == pytest.approx(score_of(theirs, test_labels)["loss"], abs=1e-3)


SCALE = 1 / 16


class Lift(nn.Module):
    """Rectified random features of an image; counts how often it runs."""

    def __init__(self):
        super().__init__()
        weight = torch.randn((64, 30), generator=torch.Generator().manual_seed(0))
        self.register_buffer("weight", weight, persistent=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(x.flatten(1) @ self.weight)


def network():
    torch.manual_seed(0)
    return nn.Sequential(Lift(), nn.Linear(30, 10))


@pytest.fixture(scope="module")
def digits():
    return data.digits(seed=0).train


def test_training_on_what_the_lift_gives_is_training_through_it(digits):
    options = TrainOptions(optimizer="sgd", lr=0.05, epochs=2)
    plain, quick = network(), network()
    fit(plain, digits, scale=SCALE, options=options, seed=1)
    layer, seen = LiftMemory().lifted(quick, digits, architecture="a", scale=SCALE)
    fit(layer, seen, scale=1.0, options=options, seed=1)
    for ours, theirs in zip(quick.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        predictions(layer, seen, scale=1.0), predictions(plain, digits, scale=SCALE), atol=1e-4
    )


def test_the_lift_runs_once_for_the_same_examples(digits):
    memory, model = LiftMemory(), network()
    keywords = {"architecture": "a", "scale": SCALE}
    memory.lifted(model, digits, **keywords)
    before = model[0].calls
    assert before > 0
    _, again = memory.lifted(network(), digits, **keywords)
    assert model[0].calls == before
    # Other examples, and another lift, are others.
    few = digits.take(np.arange(20))
    assert len(memory.lifted(model, few, **keywords)[1]) == 20
    other = memory.lifted(model, digits, **keywords | {"architecture": "b"})[1]
    assert other is not again
