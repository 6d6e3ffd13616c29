"""A tensor that is left behind on another device is noticed: by xla, which refuses to mix them."""

import pytest
import torch
from helpers_device_cases import (
    CASES,
    blobs,
    evaluation,
    hidden,
    refinement_sums,
    solved_full,
    training_sgd,
)

from gems_flwr import devices
from gems_flwr.intersect import cone_objective
from gems_flwr.moments import loss_sums as loss_sums_module
from gems_flwr.networks.inputs import watch
from simulations.experiment import training

MIXED = "(?i)device|xla|cpu"


@pytest.mark.parametrize(
    ("compute", "module", "name"),
    [
        (training_sgd, training, "tensors"),
        (solved_full, cone_objective.ConeObjective, "_tensor"),
        (refinement_sums, loss_sums_module, "_chunks"),
    ],
    ids=["data of training", "moments of the objective", "samples of a gradient"],
)
def test_what_stays_behind_makes_a_computation_fail(
    compute, module, name, monkeypatch, strict_device
):
    """A part that forgets the device, as if somebody had removed its ``.to(device)``."""
    real = getattr(module, name)
    forgetful = {
        "tensors": lambda examples, *, scale, device: real(examples, scale=scale, device="cpu"),
        "_tensor": lambda self, array: torch.from_numpy(array),
        "_chunks": lambda samples, scale, device: real(samples, scale, torch.device("cpu")),
    }[name]
    monkeypatch.setattr(module, name, forgetful)
    with pytest.raises(RuntimeError, match=MIXED):
        compute(str(strict_device))


def test_a_model_that_stays_behind_makes_an_evaluation_fail(monkeypatch, strict_device):
    monkeypatch.setattr(training, "moved", lambda model, device: devices.moved(model, _CPU))
    with pytest.raises(RuntimeError, match=MIXED):
        evaluation(str(strict_device))


def test_what_a_mod_reads_comes_back_to_the_cpu(strict_device):
    """The model's own steps are on the device: it is not that everything runs on the CPU."""
    model = hidden().to(strict_device)
    assert watch(model, blobs().inputs, ["0"])[0].outputs.device.type == strict_device.type


def test_a_device_without_double_precision_never_gets_any(monkeypatch, strict_device):
    """As on Apple's GPUs: what is exact is computed on the CPU, and nothing else is left over."""
    monkeypatch.setattr(devices, "_has_double", lambda device: device.type == "cpu")
    for case in CASES:
        if case.name in _ON_APPLE:
            with _NoDouble(strict_device.type):
                case.compute(str(strict_device))


_CPU = torch.device("cpu")
_ON_APPLE = (
    "training: SGD with momentum, FedProx",
    "evaluation: predictions",
    "streams: Adam with its state",
    "merging: RegMean",
    "tuning: last layer, whole network",
    "several models: a node's loss",
    "a run: Gems, cones, refined, tuned, verified",
    "a run: Gems, balls, tuned",
    "a run: LayerwiseGems",
)


class _NoDouble(torch.overrides.TorchFunctionMode):
    """Refuses tensors of double precision on a kind of device."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            assert result.device.type != self.kind, f"{func} made float64 on {self.kind}"
        return result
