"""What is computed on a device is what the CPU computes, within a tolerance that each case says."""

import pytest
import torch
from helpers_device_cases import CASES, difference


class Noted(torch.overrides.TorchFunctionMode):
    """Notes on which kinds of device there was a result."""

    def __init__(self):
        super().__init__()
        self.kinds = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.kinds.add(result.device.type)
        return result


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_device_computes_what_the_cpu_does(case, device):
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
