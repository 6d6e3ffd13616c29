"""What is computed on a device is what the CPU computes, within a tolerance that each case says."""

import pytest
from helpers_device_cases import CASES, difference


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_device_computes_what_the_cpu_does(case, device):
    assert difference(case.compute("cpu"), case.compute(device)) <= case.tolerance


def test_a_comparison_sees_a_difference():
    """The largest difference is 0.5 of a largest number of 10; other shapes never agree."""
    assert difference({"a": [10.0, 1.0]}, {"a": [10.0, 1.5]}) == pytest.approx(0.05)
    assert difference({"a": [1.0]}, {"a": [float("nan")]}) == float("inf")
    assert difference({"a": [1.0]}, {"a": [1.0, 2.0]}) == float("inf")
