"""The ready ClientApp with several tasks, and SCAFFOLD on it."""

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn import functional as F

from gems_flwr import InProcessGrid, MultiModel, Report, Task, TaskSet, task_client_app
from gems_flwr.averaging import data_shares, draw_assignment, optimal_probabilities
from gems_flwr.core import generator
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.node.scaffold import (
    CORRECTION,
    GRADIENT,
    corrected_gradients,
    vector_in,
    vector_record,
)
from gems_flwr.strategies.multi_model import join_models, split_models

RATE, NODES = 0.1, 5
SIZES = {"small": (4, 2), "large": (6, 3)}


def data(node, model):
    inputs, classes = SIZES[model]
    rng = np.random.default_rng([node, inputs])
    x = torch.from_numpy(rng.normal(size=(5 + node, inputs)))
    return x, torch.from_numpy(rng.integers(0, classes, size=5 + node))


class LinearTask(Task):
    """Logistic regression in double precision, plain SGD on all data, `steps` times."""

    def __init__(self, node, model, steps=1):
        self.model, self.steps = model, steps
        self.inputs, self.labels = data(node, model)

    def build_model(self):
        return nn.Linear(*SIZES[self.model]).double()

    def train(self, model, *, seed, config):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(self.steps):
            optimizer.zero_grad()
            F.cross_entropy(model(self.inputs), self.labels).backward()
            optimizer.step()
        return Report(len(self.labels), {"seed": float(seed % 1000)})

    def evaluate(self, model, *, config):
        return Report(len(self.labels), {"loss": self.loss(model)})

    def validation_data(self):
        return self.inputs, self.labels


def app(steps=1):
    def make_tasks(context):
        node = int(context.node_config["partition-id"])
        tasks = {model: LinearTask(node, model, steps) for model in SIZES}
        return TaskSet(tasks, {m: len(t.labels) for m, t in tasks.items()}, 2)

    return task_client_app(make_tasks)


def start():
    return {
        model: {"weight": np.zeros((classes, inputs)), "bias": np.zeros(classes)}
        for model, (inputs, classes) in SIZES.items()
    }


def gradient(node, model, vector):
    """∇f_i at a vector of weights, by torch's own functional interface."""
    inputs, classes = SIZES[model]
    x, y = data(node, model)
    w = torch.from_numpy(vector).requires_grad_()
    weight, bias = w[: inputs * classes].reshape(classes, inputs), w[inputs * classes :]
    F.cross_entropy(x @ weight.T + bias, y).backward()
    return w.grad.numpy()


def flat(arrays):
    return np.concatenate([arrays["weight"].ravel(), arrays["bias"]])


def textbook_scaffold(rounds, steps, budget, seed):
    """Karimireddy et al. 2020, Algorithm 1, option II, on the same draws.

    Sampled clients count d/p, which is the textbook's 1/|S| if data are equal and |S| = m; c moves
    by d instead of 1/N.
    """
    names = list(SIZES)
    counts = np.array([[5 + node] * 2 for node in range(NODES)])
    shares, p = data_shares(counts), optimal_probabilities(counts > 0, budget, 2)
    x = {m: flat(start()[m]) for m in names}
    c = {m: np.zeros_like(x[m]) for m in names}
    c_i = {(i, m): np.zeros_like(x[m]) for i in range(NODES) for m in names}
    for number in range(1, rounds + 1):
        drawn = draw_assignment(p, generator(seed, "assign", number))
        for s, m in enumerate(names):
            step, change = np.zeros_like(x[m]), np.zeros_like(x[m])
            for i in np.flatnonzero(drawn[:, s]):
                y = x[m].copy()
                for _ in range(steps):
                    y -= RATE * (gradient(i, m, y) - c_i[i, m] + c[m])
                new = c_i[i, m] - c[m] + (x[m] - y) / (steps * RATE)
                step += shares[i, s] / p[i, s] * (y - x[m])
                change += shares[i, s] * (new - c_i[i, m])
                c_i[i, m] = new
            x[m], c[m] = x[m] + step, c[m] + change
    return x


@pytest.mark.parametrize(("steps", "budget"), [(1, 10), (3, 4)])
def test_scaffold_equals_its_textbook_form(steps, budget):
    strategy = MultiModel(sampling="scaffold", budget=budget, seed=2)
    grid = InProcessGrid(app(steps), NODES)
    result = strategy.start(grid, to_record(join_models(start())), num_rounds=5)
    assert result.failures == ()
    models = split_models(to_numpy(result.arrays))
    for model, expected in textbook_scaffold(5, steps, budget, 2).items():
        assert flat(models[model]) == pytest.approx(expected, abs=1e-12)


class Boasting(InProcessGrid):
    """Node 0 claims that its mean gradient is 1e25."""

    def _deliver(self, message, timeout):
        reply = super()._deliver(message, timeout)
        if self._configs[message.metadata.dst_node_id]["partition-id"] == 0:
            for key in [k for k in reply.content if k.startswith("control/")]:
                [vector] = to_numpy(reply.content[key]).values()
                reply.content[key] = to_record({"c": np.full_like(vector, 1e25)})
        return reply


def test_a_boasted_gradient_counts_as_the_largest_that_there_may_be():
    """Node 0 has 5 of the 35 examples: c is 5/35 of 1e9, but for the others' gradients."""
    strategy = MultiModel(sampling="scaffold", budget=10)
    grid, state = Boasting(app(), NODES), {}
    strategy.play_round, play = lambda *a: state.setdefault("it", play(*a)), strategy.play_round
    strategy.start(grid, to_record(join_models(start())), num_rounds=1)
    control = state["it"].memory["control/small"]
    assert control == pytest.approx(np.full_like(control, 1e9 / 7), abs=10)


def test_the_ready_app_trains_models_of_different_shapes_and_reports_their_losses():
    grid = InProcessGrid(app(steps=5), NODES)
    arrays = to_record(join_models(start()))
    result = MultiModel(sampling="lvr", budget=6, seed=1).start(grid, arrays, num_rounds=30)
    assert result.failures == ()
    for model, trained in split_models(to_numpy(result.arrays)).items():
        losses = []
        for arrays_of in (start()[model], trained):
            task = LinearTask(0, model)
            net = task.build_model()
            net.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in arrays_of.items()})
            losses.append(task.loss(net))
        assert losses[1] < losses[0] == pytest.approx(np.log(SIZES[model][1]))


def test_a_set_of_tasks_names_what_it_has():
    tasks = TaskSet({"small": LinearTask(0, "small")}, {"small": 5})
    with pytest.raises(ValueError, match=r"has the models \['small'\].* about 'faces'"):
        tasks.task("faces")
    with pytest.raises(ValueError, match="none in particular"):
        tasks.task(None)


def test_hooks_leave_no_trace_and_frozen_weights_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    floats = [a for a in model.state_dict().values() if a.is_floating_point()]
    size = sum(a.numel() for a in floats)
    inputs = torch.ones(3, 2) * torch.arange(3)[:, None]
    model(inputs).sum().backward()
    plain = model[2].bias.grad.clone()
    ones = vector_record(np.ones(size, dtype=np.float32))
    with corrected_gradients(model, RecordDict({CORRECTION: ones})) as answer:
        model.zero_grad()
        model(inputs).sum().backward()
        assert torch.equal(model[2].bias.grad, plain + 1)
        assert model[0].weight.grad is None
    mean = vector_in(answer[GRADIENT])
    assert mean.shape == (size,)
    assert mean[-1] == plain
    model.zero_grad()
    model(inputs).sum().backward()
    assert torch.equal(model[2].bias.grad, plain)
    with (
        pytest.raises(ValueError, match="the correction has 3 numbers"),
        corrected_gradients(model, RecordDict({CORRECTION: vector_record(np.ones(3))})),
    ):
        pass
