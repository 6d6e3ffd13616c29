"""Scores against scikit-learn, votes by hand; what is predicted decides loss and score."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, mean_squared_error

from gems_flwr import Report, Task, scoring
from gems_flwr.errors import ModelError
from gems_flwr.targets import Classes, Numbers

OUTPUTS = torch.tensor([[0.5], [-1.0], [2.0]])
TRUTH = torch.tensor([0.0, 1.0, 2.0])


def test_the_loss_of_numbers_is_the_mean_squared_error_of_scikit_learn():
    expected = mean_squared_error(TRUTH.numpy(), OUTPUTS[:, 0].numpy())
    assert Numbers().loss(OUTPUTS, TRUTH).item() == pytest.approx(expected)
    score = Numbers().score(Numbers().predictions(OUTPUTS).numpy(), TRUTH.numpy())
    assert score == {"rmse": pytest.approx(expected**0.5), "loss": pytest.approx(expected)}
    assert tuple(score) == Numbers.metrics


def test_every_example_is_compared_with_its_own_number_alone():
    """(n, 1) minus (n,) would broadcast to (n, n): errors here are 0.5, -2 and 0."""
    assert Numbers().losses(OUTPUTS, TRUTH).tolist() == [0.25, 4.0, 0.0]
    with pytest.raises(ModelError, match=r"one output for each example, shape \(n, 1\), got"):
        Numbers().losses(torch.zeros(3, 2), TRUTH)


def test_the_score_of_classes_is_what_it_was():
    logits, labels = torch.randn(20, 3, generator=torch.manual_seed(0)), torch.arange(20) % 3
    probabilities = Classes().predictions(logits).numpy()
    np.testing.assert_array_equal(probabilities, torch.softmax(logits.double(), dim=1).numpy())
    score = Classes().score(probabilities, labels.numpy())
    assert score == scoring.score(probabilities, labels.numpy())
    assert tuple(score) == Classes.metrics
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.equal(Classes().loss(logits, labels), loss)
    assert Classes().losses(logits, labels).mean().item() == pytest.approx(loss.item())


class Line(Task):
    """y = 2 x, and a model that says 0."""

    def build_model(self):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    def train(self, model, *, seed, config):
        return Report(3)

    def evaluate(self, model, *, config):
        return Report(3)

    def validation_data(self):
        return torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2.0, 4.0, 6.0])


def test_a_tasks_loss_is_that_of_its_target():
    """Errors of 2, 4 and 6: (4 + 16 + 36) / 3."""
    task = Line()
    with pytest.raises(ModelError, match=r"target = Numbers\(\)"):
        task.loss(task.build_model())
    task.target = Numbers()
    assert task.loss(task.build_model()) == pytest.approx(56 / 3)


def test_the_mean_of_several_models_can_be_that_of_numbers():
    members = [np.array([1.0, 1.0]), np.array([0.0, 0.0])]
    labels = np.array([1.0, 1.0])
    assert scoring.mean_score(members, labels, scoring.number_score) == {"rmse": 0.5, "loss": 0.5}


def random_predictions(seed, samples=200, classes=4):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(classes), size=samples)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])
    return probabilities, labels


def test_scores_equal_scikit_learns():
    probabilities, labels = random_predictions(0)
    predicted = probabilities.argmax(axis=1)
    score = scoring.score(probabilities, labels)
    assert score["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert score["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert score["loss"] == pytest.approx(log_loss(labels, probabilities))


def test_an_impossible_class_gives_a_large_but_finite_loss():
    assert scoring.cross_entropy(np.array([[1.0, 0.0]]), np.array([1])) == pytest.approx(
        -np.log(1e-12)
    )


def one_hot(*classes, count=3):
    return np.eye(count)[list(classes)]


def test_the_majority_wins():
    members = [one_hot(0, 2), one_hot(0, 1), one_hot(1, 1)]
    assert scoring.majority_vote(members, np.random.default_rng(0)).tolist() == [0, 1]


def test_ties_are_broken_evenly_and_by_the_seed():
    """Two members that always disagree: each wins half of 4000 samples, ± 5 sd of 31.6."""
    members = [one_hot(*[0] * 4000), one_hot(*[2] * 4000)]
    votes = scoring.majority_vote(members, np.random.default_rng(1))
    assert set(votes) == {0, 2}
    assert abs((votes == 0).sum() - 2000) < 160
    assert (votes == scoring.majority_vote(members, np.random.default_rng(1))).all()
    assert (votes != scoring.majority_vote(members, np.random.default_rng(2))).any()
