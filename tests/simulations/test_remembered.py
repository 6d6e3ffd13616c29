"""Remembered training changes how long a run takes, and nothing else."""

import itertools

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from gems_flwr.client.gradients import corrected_gradients
from gems_flwr.networks.surgery import freeze_lowest
from simulations.config import compose_config
from simulations.data.examples import Examples
from simulations.experiment import remembered
from simulations.experiment.remembered import TrainingMemory, fit_once, remember_training
from simulations.experiment.training import TrainOptions
from simulations.run import run

SHORT = ["progress=false", "train.epochs=3", "train.patience=3", "own_initial_weights=true"]
BALL = ["strategy=gems", "strategy/space=ball", "strategy.space.directions=20"]
LAYERS = ["strategy=gems_layerwise", "strategy.neurons.directions=20", "train.output_epochs=2"]


@pytest.fixture
def fits(monkeypatch):
    """A list that grows by one whenever training is really done."""
    calls = []
    real = remembered.fit

    def counted(*arguments, **options):
        calls.append(options["seed"])
        return real(*arguments, **options)

    monkeypatch.setattr(remembered, "fit", counted)
    return calls


def finish(folder, *overrides):
    """Return what a run came to, without times."""
    result = run(compose_config([*SHORT, *overrides]), folder, Console(quiet=True))
    kept = {k: result[k] for k in ("accuracy", "loss", "bytes_up", "bytes_down", "messages")}
    return kept, (folder / "model.safetensors").read_bytes()


def test_the_average_needs_no_training_where_the_local_models_are_known(tmp_path, fits):
    methods = ["strategy=local"], ["strategy=one_shot_average", "strategy.tune=50"]
    plain = [finish(tmp_path / f"plain-{i}", "nodes=2", *m) for i, m in enumerate(methods)]
    assert len(fits) == 4
    with remember_training():
        again = [finish(tmp_path / f"again-{i}", "nodes=2", *m) for i, m in enumerate(methods)]
    assert again == plain
    assert len(fits) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "methods"),
    [
        # How often nodes train: five times in the first run, and where the task is another one.
        (
            "logistic",
            [
                (["strategy=local"], 5),
                (["strategy=one_shot_average"], 0),
                (["strategy=one_shot_average", "strategy.tune=100"], 0),
                (["strategy=ensemble"], 0),
                (BALL, 0),
                (["strategy=gems", "strategy/space=ellipsoid", "strategy.space.directions=20"], 0),
                (["strategy=global", "strategy.converged=false"], 1),
                (["strategy=global", "strategy.converged=false", "label=again"], 0),
                # Solved, not trained.
                (["strategy=global"], 0),
            ],
        ),
        (
            "mlp",
            [
                (["strategy=local"], 5),
                (["strategy=ensemble"], 0),
                # The hidden layers as everybody's, then the output layers on the merged ones.
                ([*LAYERS, "strategy/head=ball"], 5),
                ([*LAYERS, "strategy/head=ball", "strategy.tune=100"], 0),
                # A cone trains no output layer.
                ([*LAYERS, "strategy/head=cone"], 0),
                # One round of GEMS: the output layer alone, on hidden layers that all share.
                (BALL, 5),
            ],
        ),
    ],
)
def test_methods_that_begin_alike_train_once_and_give_the_same_bits(tmp_path, fits, model, methods):
    numbers = itertools.count()
    plain = [finish(tmp_path / f"{next(numbers)}", f"model={model}", *m) for m, _ in methods]
    with remember_training() as memory:
        for (overrides, expected), without in zip(methods, plain, strict=True):
            before = len(fits)
            found = finish(tmp_path / f"{next(numbers)}", f"model={model}", *overrides)
            assert found == without, overrides
            assert len(fits) - before == expected, overrides
    assert memory.trained == sum(expected for _, expected in methods)
    assert memory.recalled > 0


def network(dropout=0.5):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3))


def examples(seed=0):
    rng = np.random.default_rng(seed)
    return Examples(rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40))


def train(model=None, data=None, **changed):
    """Return the state after training and what was reported."""
    model = model or network()
    options = TrainOptions(epochs=2, **changed.pop("options", {}))
    arguments = {"architecture": "net", "scale": 1.0, "seed": 0, "options": options} | changed
    metrics = fit_once(model, data or examples(), **arguments)
    return {k: v.clone() for k, v in model.state_dict().items()}, metrics


def frozen():
    model = network()
    freeze_lowest(model, 1)
    return model


def other_weights():
    model = network()
    with torch.no_grad():
        model[0].bias[0] += 1e-6
    return model


def other_label():
    labels = examples().labels.copy()
    labels[-1] = (labels[-1] + 1) % 3
    return Examples(examples().features, labels)


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"scale": 0.5},
        {"architecture": "another net"},
        {"options": {"lr": 0.01}},
        {"options": {"patience": 1}},
        {"model": frozen},
        {"model": other_weights},
        {"model": lambda: network(dropout=0.1)},
        {"data": lambda: examples(seed=1)},
        {"data": other_label},
    ],
    # Not by str, in which a function has its address: workers would collect other tests.
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_training_depends_on_makes_it_another_training(fits, changed):
    changed = {k: v() if callable(v) else v for k, v in changed.items()}
    with remember_training():
        train()
        train(**changed)
    assert len(fits) == 2


def test_what_training_does_not_depend_on_makes_no_difference(fits):
    """Equal examples in another object, and options that only tell nodes what to train."""
    with remember_training() as memory:
        state, metrics = train()
        again, told = train(options={"output_epochs": 7, "subclasses": 4})
    assert len(fits) == memory.trained == memory.recalled == 1
    assert told == metrics
    assert all(torch.equal(state[key], again[key]) for key in state)


def test_a_model_that_is_trained_on_does_not_change_what_is_remembered():
    with remember_training():
        model = network()
        first, _ = train(model)
        train(model, seed=5)
        again, _ = train()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_hooks_on_weights_see_every_gradient(fits):
    """SCAFFOLD's corrections would be lost if training were looked up."""
    with remember_training():
        train()
        model = network()
        size = sum(weight.numel() for weight in model.parameters())
        with corrected_gradients(model, np.ones(size)) as gradients:
            train(model)
    assert len(fits) == 2
    assert np.abs(gradients.mean()).max() > 0


def test_nothing_is_remembered_outside_and_an_inner_context_is_the_outer_one(fits):
    train()
    train()
    with remember_training() as outer:
        train()
        with remember_training() as inner:
            train()
        train()
    train()
    assert inner is outer
    assert len(fits) == 4
    with pytest.raises(RuntimeError, match="stop"), remember_training():
        raise RuntimeError("stop")
    assert remembered._memory is None


def test_the_least_recently_used_is_forgotten_first(fits):
    """Room for two models: the third pushes out the one that was not asked for again."""
    one = sum(tensor.nbytes for tensor in network().state_dict().values())
    with remember_training(2 * one) as memory:
        for seed in (0, 1, 0, 2, 0):
            train(seed=seed)
        assert fits == [0, 1, 2]
        train(seed=1)
        assert fits == [0, 1, 2, 1]
        assert memory.held_bytes == 2 * one
    with remember_training(one - 1) as memory:
        train()
        train()
    assert memory.held_bytes == memory.recalled == 0
    with pytest.raises(ValueError, match="limit_bytes must be at least 0, got -1"):
        TrainingMemory(-1)


def test_a_folder_outlives_the_process(tmp_path, fits):
    """The second memory finds what the first one kept, bit for bit, and trains nothing."""
    methods = ["strategy=local"], ["strategy=one_shot_average"]
    with remember_training(folder=tmp_path / "trained"):
        first = finish(tmp_path / "a", "nodes=2", *methods[0])
    assert len(fits) == 2
    with remember_training(folder=tmp_path / "trained") as memory:
        again = finish(tmp_path / "b", "nodes=2", *methods[0])
        finish(tmp_path / "c", "nodes=2", *methods[1])
    assert again == first
    assert (len(fits), memory.trained, memory.recalled) == (2, 0, 4)


def test_examples_are_read_once(monkeypatch):
    read = []
    real = remembered._add
    monkeypatch.setattr(remembered, "_add", lambda d, n, a: (read.append(n), real(d, n, a)))
    data = examples()
    with remember_training():
        train(data=data)
        train(data=data, seed=1)
    assert read.count("features") == 1
