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

from gems_flwr.errors import OptionError
from gems_flwr.scoring import score as score_of
from simulations.config import compose_config
from simulations.data.examples import Examples
from simulations.experiment.experiment import experiment_of
from simulations.experiment.linear_optimum import linear_optimum
from simulations.experiment.softmax_regression import (
    RIDGES,
    TOLERANCE,
    choose_ridge,
    solve,
    stratified_folds,
)
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
    model = LogisticRegression(
        C=1 / (len(y) * ridge), tol=1e-12, max_iter=100_000, solver="newton-cg"
    )
    model.fit(x.double().numpy(), y.numpy())
    weight, bias = ours.layer[:, :-1].numpy(), ours.layer[:, -1].numpy()
    ours_logits = x.numpy() @ weight.T + bias
    theirs = x.numpy() @ model.coef_.T + model.intercept_
    np.testing.assert_allclose(
        ours_logits - ours_logits.mean(1, keepdims=True),
        theirs - theirs.mean(1, keepdims=True),
        atol=2e-3,
        rtol=1e-3,
    )
    their_layer = torch.from_numpy(np.c_[model.coef_, model.intercept_])
    assert ours.loss <= float(objective(x, y, their_layer, ridge)) + 1e-9


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-1, 1e-3, 1e-5]), st.integers(2, 5))
def test_the_gradient_that_is_told_is_autograds_and_within_the_tolerance(seed, ridge, classes):
    x, y = blobs(rows=80, features=4, classes=classes, seed=seed)
    found = solve(x, y, classes=classes, ridge=ridge)
    layer = found.layer.clone().requires_grad_()
    value = objective(x, y, layer, ridge)
    (gradient,) = torch.autograd.grad(value, layer)
    assert found.loss == pytest.approx(value.item(), rel=1e-9)
    assert found.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-3, abs=1e-12)
    assert found.gradient_norm <= TOLERANCE


def test_where_it_starts_does_not_matter():
    x, y = blobs()
    start = torch.randn((3, 7), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (solve(x, y, classes=3, ridge=1e-3, start=s) for s in (None, start))
    torch.testing.assert_close(one.layer, other.layer, atol=1e-3, rtol=1e-3)


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


def test_of_ridges_that_are_right_equally_often_the_least_loss_is_taken():
    x, y = blobs(rows=90, features=2)
    ridges = (1.0, 0.1, 0.01)
    found = choose_ridge(x, y, classes=3, folds=[torch.arange(3)], ridges=ridges)
    losses = {}
    for ridge in ridges:
        layer = solve(x[3:], y[3:], classes=3, ridge=ridge).layer
        right = (x[:3].double() @ layer[:, :-1].T + layer[:, -1]).argmax(1) == y[:3]
        losses[ridge] = (-float(right.double().mean()), float(objective(x[:3], y[:3], layer, 0.0)))
    assert found.ridge == min(losses, key=losses.get)


def test_folds_hold_out_every_row_once_and_every_class_evenly():
    y = torch.tensor([0] * 20 + [1] * 11 + [2] * 4)
    folds = stratified_folds(y, 5, seed=3)
    assert sorted(torch.cat(folds).tolist()) == list(range(35))
    for label, least, most in ((0, 4, 4), (1, 2, 3), (2, 0, 1)):
        assert all(least <= int((y[fold] == label).sum()) <= most for fold in folds)
    assert not torch.equal(folds[0], stratified_folds(y, 5, seed=4)[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"ridge": 0.0}, "above 0"), ({"ridge": 1e-3, "tolerance": 0}, "above 0")],
)
def test_what_cannot_be_solved_is_refused(arguments, said):
    x, y = blobs()
    with pytest.raises(OptionError, match=said):
        solve(x, y, classes=3, **arguments)
    with pytest.raises(OptionError, match="at least one row"):
        solve(x[:0], y[:0], classes=3, ridge=1.0)


class Lifted(nn.Module):
    """A fixed lift whose weights are in no state, and a linear layer."""

    def __init__(self):
        super().__init__()
        lift = torch.randn((6, 20), generator=torch.Generator().manual_seed(1))
        self.register_buffer("lift", lift, persistent=False)
        self.output = nn.Linear(20, 3)

    def forward(self, x):
        return self.output(torch.relu(x @ self.lift))


def test_a_layer_on_a_fixed_lift_is_solved_on_what_it_sees():
    x, y = blobs()
    model = Lifted()
    arrays, told = linear_optimum(model, (x, y), 0)
    assert arrays.keys() == model.state_dict().keys()
    assert told["converged"]
    lifted = torch.relu(x @ model.lift)
    layer = torch.from_numpy(np.c_[arrays["output.weight"], arrays["output.bias"]]).double()
    value = objective(lifted, y, layer, told["ridge"])
    # Arrays travel in single precision, which moves the loss by as little.
    assert float(value) == pytest.approx(told["objective"], abs=1e-6)
    best = solve(lifted, y, classes=3, ridge=told["ridge"])
    assert told["objective"] == pytest.approx(best.loss, abs=1e-9)


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


def test_the_papers_reference_is_trained_by_epochs(tmp_path):
    result, _, _ = finish(tmp_path, "strategy.converged=false", "train.epochs=2")
    assert "ridge" not in result["details"]
    assert result["details"]["label"] == "global converged=False train.epochs=2"


def test_a_network_is_trained_as_before(tmp_path):
    """Solved or not is no question for it: the same weights to the last bit."""
    _, one, _ = finish(tmp_path / "one", "model=mlp", "train.epochs=2")
    _, other, _ = finish(
        tmp_path / "two", "model=mlp", "train.epochs=2", "strategy.converged=false"
    )
    assert all(np.array_equal(one[name], other[name]) for name in one)
