"""The device that these tests run on: the CPU, unless ``GEMS_FLWR_TEST_DEVICE`` names another.

On the CPU they check the plumbing (the option arrives everywhere, nothing changes by it). They mean
something on xla (``make test-device``) or on a GPU (``GEMS_FLWR_TEST_DEVICE=cuda``).
"""

import os

import pytest
import torch
from helpers_device_cases import start_device

DEVICE = os.environ.get("GEMS_FLWR_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session")
def device() -> str:
    """The name of the device, which is there and started."""
    start_device(DEVICE)
    return DEVICE


@pytest.fixture
def strict_device(device) -> torch.device:
    """A device that is not the CPU, or the test is skipped."""
    if device == "cpu":
        pytest.skip("needs another device than the CPU: make test-device")
    return start_device(device)
