"""Local training and its models: they learn, repeatably, and leave everything else alone."""

import numpy as np
import pytest
import torch
from torch import nn

from gems_flwr.targets import Numbers
from simulations import data
from simulations.data import Examples
from simulations.experiment.experiment import add_noise
from simulations.experiment.training import (
    TrainOptions,
    copy_model,
    fit,
    learn,
    predictions,
    pull,
    tensors,
)
from simulations.models import cnn, lenet, logistic, mlp, random_filters

SCALE = 1 / 16
MNIST = {"input_shape": (1, 28, 28), "classes": 10}


@pytest.fixture(scope="module")
def digits():
    return data.digits(seed=0).train


def build(make=mlp, **options):
    torch.manual_seed(0)
    return make(input_shape=(1, 8, 8), classes=10, **options)


def state(model):
    return [value.numpy().copy() for value in model.state_dict().values()]


def equal(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (logistic(**MNIST), 784 * 10 + 10),
        (mlp(**MNIST, hidden=[20, 30]), 784 * 20 + 20 + 20 * 30 + 30 + 30 * 10 + 10),
        (cnn(**MNIST), 1_199_882),
        (lenet(**MNIST), 61_706),
        (mlp(**MNIST, hidden=[200, 200]), 199_210),
    ],
    ids=["logistic", "mlp", "cnn", "lenet", "McMahan's 2NN"],
)
def test_models_for_mnist_have_the_published_number_of_weights(model, expected):
    """Figures of the papers, or by hand.

    1,199,882 is the dynamic-averaging paper's, 61,706 that of LeNet-5, 199,210 McMahan et al.'s.
    """
    assert sum(weight.numel() for weight in model.parameters()) == expected


@pytest.mark.parametrize("build", [logistic, mlp, cnn, lenet, random_filters])
@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 12, 17)])
def test_image_batches_become_logits_and_the_last_module_is_linear(build, shape):
    model = build(input_shape=shape, classes=7)
    assert model(torch.zeros(4, *shape)).shape == (4, 7)
    assert isinstance(list(model.modules())[-1], nn.Linear)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (cnn, {"input_shape": (320,)}, r"needs images .* of at least 6×6 pixels"),
        (lenet, {"input_shape": (1, 8, 8)}, r"needs images .* of at least 12×12 pixels"),
        (mlp, {"hidden": [0]}, "at least 1"),
        (mlp, {"dropout": 1.0}, r"\[0, 1\)"),
        (mlp, {"classes": 1}, "at least 2"),
        (logistic, {"input_shape": (1, 0, 3)}, "input_shape"),
    ],
)
def test_impossible_models_are_refused_with_the_allowed_values(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**{**MNIST, **options})


@pytest.mark.parametrize("make", [mlp, cnn, random_filters])
def test_a_copy_of_a_model_is_the_same_and_shares_no_weight(make):
    model = build(make)
    model.eval()
    next(model.parameters()).requires_grad_(False)
    copied = copy_model(model)
    inputs = torch.rand(3, 1, 8, 8)
    assert str(copied) == str(model)
    assert torch.equal(copied(inputs), model(inputs))
    trained = [[w.requires_grad for w in each.parameters()] for each in (copied, model)]
    assert trained[0] == trained[1]
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    copied.register_forward_hook(lambda *_: 1 / 0)
    assert model(inputs).abs().sum() > 0


def test_noise_is_relative_to_the_scale_of_the_weights():
    model = nn.Linear(100, 100)
    before = model.weight.detach().clone()
    add_noise(model, 3.0, seed=1)
    ratio = float((model.weight.detach() - before).std() / before.std())
    assert ratio == pytest.approx(3.0, rel=0.05)


# --- passes over data -----------------------------------------------------------------------------


def test_one_full_batch_step_of_sgd_is_the_gradient_step_by_hand():
    """For logits Wx + b with W = b = 0, the gradient in b is the mean of softmax(0) - onehot(y).

    With 2 classes and labels 0, 0, 1 it is (1/2 - 2/3, 1/2 - 1/3); lr = 6 gives b = (1, -1).
    In W (features 1, 2, 3) it is the mean of x (1/2 - [y = c]): (-1 - 2 + 3)/6 = 0.
    """
    model = logistic(input_shape=(1,), classes=2)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    examples = Examples(np.array([[2], [4], [6]], dtype=np.uint8), np.array([0, 0, 1]))
    options = TrainOptions(optimizer="sgd", lr=6.0, batch_size=3)
    metrics = fit(model, examples, scale=0.5, options=options, seed=0)
    weight, bias = state(model)
    np.testing.assert_allclose(bias, [1, -1], atol=1e-6)
    np.testing.assert_allclose(weight, [[0], [0]], atol=1e-6)
    assert metrics["train_loss"] == pytest.approx(np.log(2))


def test_numbers_are_learned_by_gradient_descent_on_the_squared_error():
    """One step on all examples: w - lr · mean of 2 (w x - y) x."""
    inputs = np.array([[1.0], [2.0], [3.0]], np.float32)
    examples = Examples(inputs, np.array([2.0, 4.0, 6.0]))
    model, options = nn.Linear(1, 1, bias=False), TrainOptions("sgd", lr=0.01, batch_size=3)
    nn.init.zeros_(model.weight)
    metrics = fit(model, examples, scale=1.0, options=options, seed=0, target=Numbers())
    assert model.weight.item() == pytest.approx(0.01 * 2 * (2 + 8 + 18) / 3)
    assert metrics == {"train_loss": pytest.approx((4 + 16 + 36) / 3), "epochs": 1.0}
    found = predictions(model, examples, scale=1.0, target=Numbers())
    assert found == pytest.approx(model.weight.item() * inputs[:, 0])


@pytest.mark.parametrize("make", [mlp, cnn])
def test_the_same_seed_gives_the_same_bits_whatever_the_global_state(digits, make):
    part = digits.take(range(64))
    results = []
    for noise, threads, seed in ((1, 1, 5), (2, 2, 5), (1, 1, 6)):
        model = build(make)
        torch.manual_seed(noise)
        before, drawn = torch.get_num_threads(), torch.random.get_rng_state()
        torch.set_num_threads(threads)
        try:
            metrics = fit(model, part, scale=SCALE, options=TrainOptions(epochs=2), seed=seed)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        assert torch.equal(drawn, torch.random.get_rng_state())
        results.append((state(model), metrics))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert not equal(results[0][0], results[2][0])


class Recorder(nn.Module):
    """A linear layer that keeps the batches it sees, and drops out what it throws away."""

    def __init__(self, inputs, rate=0.0):
        super().__init__()
        self.layer, self.drop, self.seen = nn.Linear(inputs, 10), nn.Dropout(rate), []

    def forward(self, batch):
        self.seen.append(batch.flatten(1).clone())
        self.drop(batch)
        return self.layer(batch.flatten(1))


def test_every_epoch_sees_every_example_once_in_another_order_whatever_is_dropped():
    recorders = [Recorder(1, 0.0), Recorder(1, 0.5)]
    examples = Examples(np.arange(10)[:, None], np.zeros(10, int))
    for recorder in recorders:
        fit(recorder, examples, scale=1.0, options=TrainOptions(batch_size=4, epochs=2), seed=0)
    assert [len(batch) for batch in recorders[0].seen] == [4, 4, 2, 4, 4, 2]
    seen = [torch.cat(recorder.seen).flatten() for recorder in recorders]
    assert torch.equal(*seen)
    first, second = seen[0][:10].tolist(), seen[0][10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize("target", [None, Numbers()])
def test_training_stops_when_it_no_longer_gets_better(target):
    """Of zeros all is right at once, and cannot get better: after epoch 1 three more."""
    labels = np.zeros(8) if target else np.zeros(8, int)
    examples = Examples(np.zeros((8, 3), dtype=np.float32), labels)
    model = nn.Linear(3, 1 if target else 2, bias=False)
    options = TrainOptions(optimizer="sgd", batch_size=8, epochs=50, patience=3)
    chosen = {"target": target} if target else {}
    assert fit(model, examples, scale=1.0, options=options, seed=0, **chosen)["epochs"] == 4


def test_frozen_weights_and_modes_stay_as_they_are(digits):
    model = build().train(False)
    model[-1].train(True)
    model[1].requires_grad_(False)
    before = state(model)
    fit(model, digits.take(range(64)), scale=SCALE, options=TrainOptions(), seed=0)
    predictions(model, digits.take(range(10)), scale=SCALE)
    after = state(model)
    assert equal(before[:2], after[:2])
    assert not equal(before[2:], after[2:])
    assert (model.training, model[-1].training) == (False, True)


def test_the_proximal_terms_gradient_is_autograds(digits):
    """μ / 2 · |w − w₀|² written out as a loss, beside what is added to the gradients."""
    model, mu = build(), 0.3
    weights = list(model.parameters())
    start = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.add_(torch.randn_like(weight))
    inputs, labels = tensors(digits.take(np.arange(20)), scale=SCALE)
    loss = nn.functional.cross_entropy(model.eval()(inputs), labels)
    term = sum(((w - s) ** 2).sum() for w, s in zip(weights, start, strict=True))
    expected = torch.autograd.grad(loss + mu / 2 * term, weights, retain_graph=True)
    loss.backward()
    pull(weights, start, mu)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


# --- streams ------------------------------------------------------------------------------------


def batches(count):
    dataset, rng = data.graphical(seed=1, examples=60, public=10), np.random.default_rng(1)
    return [dataset.draw(0, 10, rng) for _ in range(count)]


def net():
    torch.manual_seed(0)
    return nn.Linear(50, 2)


@pytest.mark.parametrize(
    "options",
    [
        TrainOptions(optimizer="sgd", lr=0.1, momentum=0.9),
        TrainOptions(optimizer="adam", lr=0.01),
        TrainOptions(optimizer="rmsprop", lr=0.01, momentum=0.5),
    ],
    ids=lambda o: o.optimizer,
)
def test_an_optimiser_goes_on_where_it_was(options):
    """Six batches at once, or two at a time with the state kept in between: the same bits."""
    at_once, in_parts, memory = net(), net(), {}
    settings = {"scale": 1.0, "options": options, "seed": 0}
    learn(at_once, batches(6), memory={}, **settings)
    for part in range(3):
        chosen = batches(6)[2 * part : 2 * part + 2]
        memory = learn(in_parts, chosen, memory=memory, **settings).memory
    assert memory
    for one, other in zip(at_once.parameters(), in_parts.parameters(), strict=True):
        assert torch.equal(one, other)
