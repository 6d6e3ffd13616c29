"""Federated averaging with one full-batch step per round converges as gradient descent does.

The slides (CMU 18-786, "Convergence of GD"): for F that is L-smooth and c-strongly convex and
η ≤ 1/L, F(x_t) − F* ≤ (1 − ηc)^t (F(x_0) − F*). If all nodes take part and count by their examples,
the mean of their steps is a step along the gradient of the *global* objective, so L and c are
those of the global objective, however different the nodes are.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

from gems_flwr.averaging.means import weighted_mean
from simulations.data.examples import Examples
from simulations.experiment.training import TrainOptions, fit

ROUNDS = 8


@dataclass(frozen=True)
class Nodes:
    """Ridge regression on several nodes: F_i(w) = ‖X_i w − y_i‖² / 2n_i + ridge ‖w‖² / 2."""

    features: list
    targets: list
    ridge: float

    @classmethod
    def drawn(cls, counts, dimension, ridge, seed):
        """Return nodes with inputs and targets around places of their own."""
        rng = np.random.default_rng(seed)
        scales = 2.0 ** rng.uniform(-2, 2, size=dimension)
        features = [
            scales * (rng.normal(size=dimension) + rng.normal(size=(n, dimension))) for n in counts
        ]
        return cls(features, [rng.normal() + rng.normal(size=n) for n in counts], ridge)

    @cached_property
    def counts(self):
        return [len(y) for y in self.targets]

    @cached_property
    def hessian(self):
        x = np.concatenate(self.features)
        return x.T @ x / len(x) + self.ridge * np.eye(x.shape[1])

    @cached_property
    def constants(self):
        """Return c and L: the extreme eigenvalues of the global objective's Hessian."""
        eigenvalues = np.linalg.eigvalsh(self.hessian)
        return eigenvalues[0], eigenvalues[-1]

    @cached_property
    def optimum(self):
        x, y = np.concatenate(self.features), np.concatenate(self.targets)
        return np.linalg.solve(self.hessian, x.T @ y / len(x))

    def gap(self, w):
        """Return F(w) − F*; for a quadratic without any cancellation."""
        off = w - self.optimum
        return float(off @ self.hessian @ off) / 2


def local_step(features, targets, ridge, w, eta):
    """Return what one full-batch step of torch's SGD makes of w."""
    weight = torch.tensor(w, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=eta, weight_decay=ridge)
    rest = torch.as_tensor(features) @ weight - torch.as_tensor(targets)
    (rest.square().mean() / 2).backward()
    optimizer.step()
    return weight.detach().numpy()


def gaps(nodes, start, eta, rounds=ROUNDS, weights=None):
    """Return F(x_t) − F* for t = 0 … rounds of federated averaging with all nodes."""
    w, found = start, [nodes.gap(start)]
    for _ in range(rounds):
        parts = zip(nodes.features, nodes.targets, strict=True)
        trained = [{"w": local_step(x, y, nodes.ridge, w, eta)} for x, y in parts]
        w = weighted_mean(trained, weights or nodes.counts)["w"]
        found.append(nodes.gap(w))
    return np.array(found)


def rounding(nodes, start):
    """Return a gap that is nothing but rounding."""
    size = np.linalg.norm(start) + np.linalg.norm(nodes.optimum)
    return 1e-20 * nodes.constants[1] * size**2


federations = st.builds(
    Nodes.drawn,
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    dimension=st.integers(1, 4),
    ridge=st.floats(0.01, 2),
    seed=st.integers(0, 2**32 - 1),
)


@given(federations, st.floats(0.05, 1), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_gap_falls_at_the_slides_rate(nodes, fraction, seed):
    c, largest = nodes.constants
    eta = fraction / largest
    start = 3 * np.random.default_rng(seed).normal(size=len(nodes.optimum))
    found = gaps(nodes, start, eta)
    bound = (1 - eta * c) ** np.arange(ROUNDS + 1) * found[0]
    assert (found <= bound * (1 + 1e-9) + rounding(nodes, start)).all()
    # The theorem's own step: it holds from each round to the next as well.
    assert (found[1:] <= (1 - eta * c) * found[:-1] * (1 + 1e-9) + rounding(nodes, start)).all()


@given(federations, st.floats(0.05, 1))
@settings(max_examples=25, deadline=None)
def test_in_the_flattest_direction_the_gap_falls_by_the_square_of_the_slides_rate(nodes, fraction):
    """Off by c's eigenvector, every round multiplies the gap by exactly (1 − ηc)².

    No start is slower, so for quadratics the slides' bound holds with room to spare; an isotropic
    one reaches it only if ηc = 1, where both are 0.
    """
    c, largest = nodes.constants
    eta = fraction / largest
    start = nodes.optimum + np.linalg.eigh(nodes.hessian)[1][:, 0]
    found = gaps(nodes, start, eta)
    exact = (1 - eta * c) ** (2 * np.arange(ROUNDS + 1)) * found[0]
    assert found == pytest.approx(exact, rel=1e-6, abs=1e6 * rounding(nodes, start))


@given(federations, st.floats(2.05, 4))
@settings(max_examples=25, deadline=None)
def test_with_steps_above_two_over_l_the_gap_grows(nodes, fraction):
    """Off by L's eigenvector, every round multiplies the gap by (1 − ηL)² > 1."""
    start = nodes.optimum + np.linalg.eigh(nodes.hessian)[1][:, -1]
    found = gaps(nodes, start, fraction / nodes.constants[1])
    assert (found[1:] > found[:-1]).all()


@given(federations)
@settings(max_examples=25, deadline=None)
def test_at_the_optimum_it_stays_there_and_only_with_the_weights_of_the_examples(nodes):
    """Means that count every node the same belong to another objective, if nodes differ in size."""
    assume(len(set(nodes.counts)) > 1)
    eta = 1 / nodes.constants[1]
    optimum = nodes.optimum
    equal = gaps(nodes, optimum, eta, rounds=1, weights=[1.0] * len(nodes.counts))
    ours = gaps(nodes, optimum, eta, rounds=1)
    assert ours[1] <= rounding(nodes, optimum)
    assert equal[1] > 1e3 * ours[1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_projects_own_training_obeys_the_rate_on_a_logistic_model(seed):
    """Softmax regression: c is the ridge, L at most the ridge + half the largest of XᵀX / n.

    (The Hessian of log-sum-exp is at most 1/2.) `fit` computes in single precision, so the gap is
    known to about 1e-6.
    """
    rng, counts, classes, dimension, ridge = np.random.default_rng(seed), [40, 7, 20], 3, 4, 0.1
    places = rng.normal(size=(len(counts), dimension))
    nodes = [
        Examples(
            (place + rng.normal(size=(n, dimension))).astype(np.float32),
            rng.choice(classes, size=n, p=rng.dirichlet(np.ones(classes))),
        )
        for place, n in zip(places, counts, strict=True)
    ]
    x = np.concatenate([node.features for node in nodes]).astype(np.float64)
    labels = np.concatenate([node.labels for node in nodes])
    eta = 1 / (ridge + np.linalg.eigvalsh(x.T @ x / len(x))[-1] / 2)

    def objective(flat_weight):
        weight = torch.tensor(flat_weight.reshape(classes, dimension), requires_grad=True)
        scores = torch.as_tensor(x) @ weight.T
        value = nn.functional.cross_entropy(scores, torch.as_tensor(labels))
        value = value + ridge / 2 * weight.square().sum()
        value.backward()
        return value.item(), weight.grad.numpy().ravel()

    best = minimize(objective, np.zeros(classes * dimension), jac=True, options={"gtol": 1e-9}).fun
    weight = rng.normal(size=(classes, dimension)).astype(np.float32)
    options = TrainOptions(optimizer="sgd", lr=eta, batch_size=10**6, weight_decay=ridge)
    found = [objective(weight.astype(np.float64))[0] - best]
    for _ in range(ROUNDS):
        trained = []
        for node in nodes:
            model = nn.Linear(dimension, classes, bias=False)
            model.load_state_dict({"weight": torch.as_tensor(weight)})
            fit(model, node, scale=1.0, options=options, seed=0)
            trained.append({"w": model.weight.detach().numpy()})
        weight = weighted_mean(trained, counts)["w"]
        found.append(objective(weight.astype(np.float64))[0] - best)
    bound = (1 - eta * ridge) ** np.arange(ROUNDS + 1) * found[0]
    assert (np.array(found) <= bound + 1e-6).all()
    assert found[-1] < found[0]
