"""A quick copy of a model is a deep copy."""

import copy

import pytest
import torch
from torch import nn

from simulations.experiment.model_copies import copy_model
from simulations.models import cnn, mlp, random_filters


class Odd(nn.Module):
    """Attributes of many kinds, a tied weight and a module that is there twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.table = {"list": [1, 2], "tensor": torch.arange(3)}
        self.register_buffer("mean", torch.ones(3))

    def forward(self, inputs):
        return self.tied(self.again(inputs) - self.mean)


@pytest.mark.parametrize(
    "make",
    [
        Odd,
        lambda: mlp(input_shape=(3,), classes=2),
        lambda: cnn(input_shape=(1, 8, 8), classes=2),
        lambda: random_filters(input_shape=(1, 8, 8), classes=2, filters=4),
        lambda: nn.LSTM(3, 3),
    ],
)
def test_it_is_the_same_and_shares_nothing(make):
    model = make()
    model.eval()
    next(model.parameters()).requires_grad_(False)
    quick, deep = copy_model(model), copy.deepcopy(model)
    assert str(quick) == str(deep)
    assert [name for name, _ in quick.named_modules()] == [name for name, _ in deep.named_modules()]
    for (name, one), (_, other), (_, source) in zip(
        quick.named_parameters(), deep.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        assert one.requires_grad == other.requires_grad
        assert one.data_ptr() != source.data_ptr()
    for one, source in zip(quick.buffers(), model.buffers(), strict=True):
        assert torch.equal(one, source)
        assert one.data_ptr() != source.data_ptr()
    assert [m.training for m in quick.modules()] == [m.training for m in deep.modules()]


def test_tied_weights_stay_tied_and_hooks_stay_with_their_model():
    model = Odd()
    copied = copy_model(model)
    assert copied.tied.weight is copied.first.weight
    assert copied.again is copied.first
    copied.first.register_forward_hook(lambda *_: 1 / 0)
    copied.table["list"].append(3)
    assert model.table["list"] == [1, 2]
    assert model(torch.ones(1, 3)).shape == (1, 3)
    with pytest.raises(ZeroDivisionError):
        copied(torch.ones(1, 3))
