"""Local training: it learns, it is repeatable, and it leaves everything else alone."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import nn

from simulations import data
from simulations.data.examples import Examples
from simulations.experiment.training import (
    OPTIMIZERS,
    Proximal,
    TrainOptions,
    fit,
    predictions,
    tensors,
)
from simulations.models import cnn, logistic, mlp

SCALE = 1 / 16


@pytest.fixture(scope="module")
def digits() -> Examples:
    return data.digits(seed=0).train


def build(make: Callable[..., nn.Sequential] = mlp, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return make(input_shape=(1, 8, 8), classes=10, **options)


def state(model: nn.Module) -> list[np.ndarray]:
    return [value.numpy().copy() for value in model.state_dict().values()]


def equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_the_digits(digits: Examples, optimizer: str) -> None:
    """Guessing is right for a tenth."""
    lr = 0.1 if optimizer == "sgd" else 0.005
    options = TrainOptions(optimizer=optimizer, lr=lr, epochs=15)
    metrics = fit(build(logistic), digits, scale=SCALE, options=options, seed=0)
    assert metrics["train_accuracy"] > 0.9
    assert metrics["epochs"] == 15


def test_logistic_regression_reaches_what_scikit_learn_reaches() -> None:
    dataset = data.digits(seed=0)
    model = build(logistic)
    fit(
        model,
        dataset.train,
        scale=dataset.scale,
        options=TrainOptions(lr=0.01, epochs=30),
        seed=0,
    )
    ours = predictions(model, dataset.test, scale=dataset.scale).argmax(1)
    with threadpool_limits(1):  # threads that wait for each other take seconds on a busy machine
        reference = LogisticRegression(max_iter=200).fit(
            dataset.train.features.reshape(len(dataset.train), -1) * dataset.scale,
            dataset.train.labels,
        )
    theirs = reference.predict(dataset.test.features.reshape(len(dataset.test), -1) * dataset.scale)
    accuracy, expected = (np.mean(p == dataset.test.labels) for p in (ours, theirs))
    assert accuracy == pytest.approx(expected, abs=0.02)


def test_one_full_batch_step_of_sgd_is_the_gradient_step_by_hand() -> None:
    """For logits Wx + b with W = b = 0, the gradient in b is the mean of softmax(0) - onehot(y).

    With 2 classes and labels 0, 0, 1 it is (1/2 - 2/3, 1/2 - 1/3); lr = 6 gives b = (1, -1).
    In W (features 1, 2, 3) it is the mean of x (1/2 - [y = c]): (-1 - 2 + 3)/6 = 0.
    """
    model = logistic(input_shape=(1,), classes=2)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    examples = Examples(np.array([[2], [4], [6]], dtype=np.uint8), np.array([0, 0, 1]))
    metrics = fit(
        model,
        examples,
        scale=0.5,
        options=TrainOptions(optimizer="sgd", lr=6.0, batch_size=3),
        seed=0,
    )
    weight, bias = state(model)
    np.testing.assert_allclose(bias, [1, -1], atol=1e-6)
    np.testing.assert_allclose(weight, [[0], [0]], atol=1e-6)
    assert metrics["train_loss"] == pytest.approx(np.log(2))


@pytest.mark.parametrize("make", [logistic, mlp, cnn])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_seed_gives_the_same_bits_whatever_the_global_state(
    digits: Examples, make: Callable[..., nn.Sequential], optimizer: str
) -> None:
    part = digits.take(range(100))
    options = TrainOptions(optimizer=optimizer, epochs=2)
    results = []
    for noise, threads, seed in ((1, 1, 5), (2, 2, 5), (1, 1, 6)):
        model = build(make)
        torch.manual_seed(noise)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            metrics = fit(model, part, scale=SCALE, options=options, seed=seed)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        results.append((state(model), metrics))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert not equal(results[0][0], results[2][0])


def test_the_callers_random_state_is_left_alone(digits: Examples) -> None:
    model = build()
    before = torch.random.get_rng_state()
    fit(model, digits.take(range(64)), scale=SCALE, options=TrainOptions(), seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_order_of_examples_does_not_depend_on_dropout(digits: Examples) -> None:
    """Dropout whose result is thrown away uses up random numbers, and must change nothing else."""

    class Recorder(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.layer, self.drop, self.seen = nn.Linear(64, 10), nn.Dropout(rate), []

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.seen.append(batch.clone())
            self.drop(batch)
            return self.layer(batch.flatten(1))

    recorders = [Recorder(0.0), Recorder(0.5)]
    for recorder in recorders:
        fit(recorder, digits, scale=SCALE, options=TrainOptions(epochs=2), seed=1)
    assert torch.equal(*(torch.cat(recorder.seen) for recorder in recorders))


def test_every_epoch_sees_every_example_once_in_another_order() -> None:
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(1, 2), []

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.seen.append(batch.flatten().tolist())
            return self.layer(batch)

    recorder = Recorder()
    examples = Examples(np.arange(10)[:, None], np.zeros(10, int))
    options = TrainOptions(batch_size=4, epochs=2)
    fit(recorder, examples, scale=1.0, options=options, seed=0)
    assert [len(batch) for batch in recorder.seen] == [4, 4, 2, 4, 4, 2]
    first, second = (
        np.concatenate(seen).tolist() for seen in (recorder.seen[:3], recorder.seen[3:])
    )
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_training_stops_when_accuracy_no_longer_rises() -> None:
    """Equal logits predict class 0, the only label: epoch 1 has accuracy 1, which cannot rise."""
    examples = Examples(np.ones((8, 3), dtype=np.float32), np.zeros(8, int))
    model = logistic(input_shape=(3,), classes=2)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    options = TrainOptions(lr=0.1, batch_size=8, epochs=50, patience=3)
    assert fit(model, examples, scale=1.0, options=options, seed=0)["epochs"] == 4


def test_frozen_weights_stay_and_the_others_move(digits: Examples) -> None:
    model = build()
    first = model[1]
    assert isinstance(first, nn.Linear)
    first.requires_grad_(False)
    before = state(model)
    fit(model, digits.take(range(64)), scale=SCALE, options=TrainOptions(), seed=0)
    after = state(model)
    assert equal(before[:2], after[:2])
    assert not equal(before[2:], after[2:])


@pytest.mark.parametrize("mode", [True, False])
def test_models_keep_their_mode(digits: Examples, mode: bool) -> None:
    model = build().train(mode)
    model[-1].train(not mode)
    fit(model, digits.take(range(10)), scale=SCALE, options=TrainOptions(), seed=0)
    predictions(model, digits.take(range(10)), scale=SCALE)
    assert model.training is mode
    assert model[-1].training is not mode


def test_probabilities_are_the_softmax_without_dropout_in_any_batch_size(digits: Examples) -> None:
    model = build().train()
    part = digits.take(range(50))
    found = predictions(model, part, scale=SCALE)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)
    with torch.no_grad():
        expected = model.eval()(tensors(part, scale=SCALE)[0]).softmax(1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    in_sevens = predictions(model, part, scale=SCALE, batch_size=7)
    np.testing.assert_allclose(found, in_sevens, rtol=1e-6)


def test_probabilities_of_no_examples_have_the_right_width(digits: Examples) -> None:
    assert predictions(build(), digits.take([]), scale=SCALE).shape == (0, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lbfgs"}, "one of adam, sgd, rmsprop"),
        ({"lr": 0.0}, "above 0"),
        ({"lr": float("nan")}, "above 0"),
        ({"momentum": 1.0, "optimizer": "sgd"}, r"\[0, 1\)"),
        ({"momentum": 0.9}, "0 with optimizer adam"),
        ({"batch_size": 0}, "at least 1"),
        ({"epochs": 0}, "at least 1"),
        ({"epochs": 1.5}, "whole number"),
        ({"patience": 0}, "or null"),
        ({"weight_decay": -1.0}, "at least 0"),
    ],
)
def test_options_out_of_range_are_refused_with_the_allowed_values(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**options)  # type: ignore[arg-type]


def test_training_without_examples_or_weights_is_refused(digits: Examples) -> None:
    with pytest.raises(ValueError, match="at least one example"):
        fit(build(), digits.take([]), scale=SCALE, options=TrainOptions(), seed=0)
    frozen = build().requires_grad_(False)
    with pytest.raises(ValueError, match="at least one weight"):
        fit(frozen, digits, scale=SCALE, options=TrainOptions(), seed=0)


def test_devices_and_threads_that_are_not_there_are_refused(
    digits: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds none; there is cpu, and device=auto"):
        fit(build(), digits, scale=SCALE, options=TrainOptions(), seed=0, device="cuda")
    with pytest.raises(ValueError, match="must be one of cpu, cuda"):
        predictions(build(), digits, scale=SCALE, device="tpu")
    with pytest.raises(ValueError, match="threads must be a whole number of at least 1"):
        predictions(build(), digits, scale=SCALE, threads=0)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
        predictions(build(), digits, scale=SCALE, batch_size=0)


@pytest.mark.deep
def test_pooled_logistic_regression_reaches_the_known_accuracy_on_mnist() -> None:
    """The GEMS paper's Table 5 has .926 for the global model."""
    folder = os.environ.get(data.DATA_VARIABLE)
    if not folder:
        pytest.skip(f"real data are not there: {data.DATA_VARIABLE} is not set")
    dataset = data.mnist(data_dir=folder, seed=0)
    model = logistic(input_shape=dataset.input_shape, classes=dataset.classes)
    options = TrainOptions(epochs=5)
    fit(model, dataset.train, scale=dataset.scale, options=options, seed=0)
    predicted = predictions(model, dataset.test, scale=dataset.scale).argmax(1)
    assert np.mean(predicted == dataset.test.labels) >= 0.92


def test_the_proximal_terms_gradient_is_autograds(digits: Examples) -> None:
    """μ / 2 · |w − w₀|² written out as a loss, beside what is added to the gradients."""
    model, mu = build(), 0.3
    weights = list(model.parameters())
    pull = Proximal(weights, mu)
    start = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.add_(torch.randn_like(weight))
    inputs, labels = tensors(digits.take(np.arange(20)), scale=SCALE)
    model.eval()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    term = sum(((w - s) ** 2).sum() for w, s in zip(weights, start, strict=True))
    expected = torch.autograd.grad(loss + mu / 2 * term, weights, retain_graph=True)
    loss.backward()
    pull.add_gradient()
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_the_stronger_the_proximal_term_the_nearer_the_model_stays(digits: Examples) -> None:
    moved = []
    for mu in (0.0, 0.1, 1.0):
        model = build(logistic)
        before = state(model)
        options = TrainOptions(optimizer="sgd", lr=0.1, epochs=3)
        fit(model, digits, scale=SCALE, options=options, seed=0, proximal_mu=mu)
        moved.append(sum(np.square(a - b).sum() for a, b in zip(before, state(model), strict=True)))
    assert moved[0] > moved[1] > moved[2] > 0


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_proximal_term_out_of_range_is_refused(digits: Examples, mu: float) -> None:
    with pytest.raises(ValueError, match="proximal_mu must be a number of at least 0"):
        fit(build(), digits, scale=SCALE, options=TrainOptions(), seed=0, proximal_mu=mu)
