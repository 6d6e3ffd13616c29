"""Names of devices, what they can do, and draws that repeat."""

import pytest
import torch
from torch import nn

from gems_flwr.devices import (
    check_device,
    chosen_device,
    exact,
    exact_device,
    has_fused_optimizers,
    home_device,
    seeded_draws,
    sum_type,
)
from gems_flwr.errors import OptionError

CPU = torch.device("cpu")


def test_names_of_devices_are_those_of_pytorch_or_auto():
    for name in ("cpu", "cuda", "cuda:1", "mps", "xpu:0", "auto"):
        assert check_device(name) == name
    for name in ("tpu", "cuda:", "cuda:x", "gpu", "", "auto:1"):
        with pytest.raises(OptionError, match="one of cpu, cuda, mps, xpu, xla or auto"):
            check_device(name)


def test_auto_takes_an_accelerator_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert chosen_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen_device("auto") == torch.device("cuda")


def test_a_number_beyond_those_that_there_are_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(OptionError, match="there are 2, from cuda:0"):
        chosen_device("cuda:2")


def test_double_precision_is_computed_where_there_is_one():
    assert exact_device(torch.device("mps")) == CPU
    assert exact_device(torch.device("cuda")) == torch.device("cuda")
    assert sum_type(torch.device("mps")) == torch.float32
    assert sum_type(CPU) == torch.float64
    assert exact(torch.ones(1)).dtype == torch.float64
    assert has_fused_optimizers(CPU)
    assert not has_fused_optimizers(torch.device("mps"))


def test_draws_repeat_and_generators_are_as_they_were_afterwards():
    torch.manual_seed(5)
    before, drawn = torch.get_rng_state(), []
    for seed in (0, 0, 1):
        with seeded_draws(seed, CPU):
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_used_where_it_is_built_and_looking_draws_nothing():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert home_device(lambda: nn.Linear(2, 2, device="meta")) == "meta"
    assert home_device(lambda: nn.Linear(2, 2)) == home_device(None) == "cpu"
    assert home_device(nn.Flatten) == "cpu"
    assert torch.equal(torch.rand(1), expected)
