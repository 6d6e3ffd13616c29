"""Nodes that train together come to the same on every device; `device` is conftest's."""

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file

from simulations.config import compose_config
from simulations.data.examples import Examples
from simulations.experiment.batched_training import Trainee, fit_together
from simulations.experiment.training import TrainOptions, fit
from simulations.models import lenet, mlp
from simulations.run import run

# Steps amplify the rounding of single precision.
RELATIVE = 1e-3


def trained(make, data, options, device, together):
    models = []
    for number in range(len(data)):
        torch.manual_seed(number)
        models.append(make())
    shared = {"scale": 1 / 255, "options": TrainOptions(**options), "device": device}
    if together:
        trainees = [Trainee(m, e, s) for s, (m, e) in enumerate(zip(models, data, strict=True))]
        reports = fit_together(trainees, **shared, proximal_mu=0.1)
    else:
        reports = [
            fit(m, e, seed=s, **shared, proximal_mu=0.1)
            for s, (m, e) in enumerate(zip(models, data, strict=True))
        ]
    assert {weight.device.type for model in models for weight in model.parameters()} == {"cpu"}
    return [model.state_dict() for model in models], reports


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_training_together_on_a_device_is_training_alone_on_the_cpu(optimizer, device):
    """With dropout, whose masks do not depend on the device, and shares of two sizes."""
    draws = np.random.default_rng(0)
    data = [
        Examples(draws.integers(0, 256, (size, 1, 12, 12)).astype(np.uint8), np.arange(size) % 3)
        for size in (10, 6, 10)
    ]
    options = {"optimizer": optimizer, "lr": 0.005, "batch_size": 8, "epochs": 2}
    make = lambda: mlp(input_shape=(1, 12, 12), classes=3, hidden=(4,))  # noqa: E731
    if optimizer == "sgd":
        make = lambda: lenet(input_shape=(1, 12, 12), classes=3)  # noqa: E731
    alone, reports = trained(make, data, options, "cpu", together=False)
    joint, found = trained(make, data, options, device, together=True)
    for one, other in zip(alone, joint, strict=True):
        for name, weight in one.items():
            gap = (other[name] - weight).abs().max()
            assert gap <= RELATIVE * weight.abs().max(), name
    for one, other in zip(reports, found, strict=True):
        assert other == pytest.approx(one, rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=fedavg", "rounds=2", "train.batch_size=128"],
        ["strategy=dynamic", "strategy.delta=0.05", "rounds=4", "stream.batches_per_round=1"],
    ],
    ids=["nodes of a round", "nodes of a stream"],
)
def test_a_run_in_lockstep_on_a_device_is_the_run_one_by_one(overrides, device, tmp_path):
    def finish(*more):
        config = compose_config(["nodes=3", "partition=iid", "progress=false", *overrides, *more])
        folder = tmp_path / config.names["backend"]
        result = run(config, folder, Console(quiet=True))
        return result, load_file(folder / "model.safetensors")

    slow, one = finish("backend=inprocess")
    quick, other = finish("backend=lockstep", f"backend.device={device}")
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, atol=RELATIVE * np.abs(array).max())
    assert quick["bytes_up"] == slow["bytes_up"]
