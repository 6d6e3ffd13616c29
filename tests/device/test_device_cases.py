"""What is computed on a device is what the CPU computes, within a tolerance that each case says."""

import pytest
import torch
from helpers_device_cases import CASES, Case, difference, evaluation

from gems_flwr import devices
from simulations.experiment import training


class Noted(torch.overrides.TorchFunctionMode):
    """Notes on which devices there was a result, and of which types."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add((result.device.type, result.dtype))
        return result

    @property
    def kinds(self):
        return {kind for kind, _ in self.seen}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_device_computes_what_the_cpu_does(case: Case, device):
    """And it is the device that computes: what forgets it altogether would agree, too."""
    with Noted() as noted:
        found = case.compute(device)
    assert difference(case.compute("cpu"), found) <= case.tolerance
    # On the CPU some of it is NumPy's alone.
    assert device == "cpu" or device.partition(":")[0] in noted.kinds


def test_a_comparison_sees_a_difference():
    """The largest difference is 0.5 of a largest number of 10; other shapes never agree."""
    assert difference({"a": [10.0, 1.0]}, {"a": [10.0, 1.5]}) == pytest.approx(0.05)
    assert difference({"a": [1.0]}, {"a": [float("nan")]}) == float("inf")
    assert difference({"a": [1.0]}, {"a": [1.0, 2.0]}) == float("inf")


def test_a_model_that_stays_behind_makes_an_evaluation_fail(monkeypatch, strict_device):
    """Xla refuses to mix devices, as every GPU does."""
    cpu, moved = torch.device("cpu"), devices.moved
    monkeypatch.setattr(training, "moved", lambda model, device: moved(model, cpu))
    with pytest.raises(RuntimeError, match=r"(?i)device|xla|cpu"):
        evaluation(str(strict_device))


def test_a_device_without_double_precision_never_gets_any(monkeypatch, strict_device):
    """As on Apple's GPUs: what is exact is computed on the CPU."""
    monkeypatch.setattr(devices, "_has_double", lambda device: device.type == "cpu")
    for case in CASES:
        if case.name.startswith(("training", "streams", "evaluation", "tuning", "a run")):
            with Noted() as noted:
                case.compute(str(strict_device))
            assert (strict_device.type, torch.float64) not in noted.seen, case.name
