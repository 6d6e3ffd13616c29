"""A digest says which layers are below the output layer."""

import numpy as np
import pytest
import torch
from torch import nn

from gems_flwr.networks.backbone import SplitModel, backbone_digest

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.zeros(0, np.float32),
    "count": np.array(7, dtype=np.int64),
}


def test_the_order_of_the_arrays_and_of_their_bytes_does_not_matter():
    digest = backbone_digest(ARRAYS)
    assert backbone_digest(dict(reversed(ARRAYS.items()))) == digest
    assert backbone_digest({**ARRAYS, "a": np.asfortranarray(ARRAYS["a"])}) == digest
    assert backbone_digest({**ARRAYS, "a": ARRAYS["a"].astype(">f4")}) == digest
    assert len(digest) == 32


@pytest.mark.parametrize(
    "changed",
    [
        {"a": ARRAYS["a"] + np.float32(1e-6)},
        {"a": ARRAYS["a"].astype(np.float64)},
        {"a": ARRAYS["a"].reshape(3, 2)},
        {"count": np.array(8)},
        {"c": np.zeros(0, np.float32)},
    ],
)
def test_whatever_differs_changes_the_digest(changed):
    assert backbone_digest({**ARRAYS, **changed}) != backbone_digest(ARRAYS)


def test_names_and_values_cannot_trade_places():
    left = {"ab": np.zeros(1, np.int8), "c": np.zeros(2, np.int8)}
    right = {"a": np.zeros(1, np.int8), "bc": np.zeros(2, np.int8)}
    assert backbone_digest(left) != backbone_digest(right)


def test_buffers_belong_to_the_backbone():
    """A batch norm that has seen other data gives the output layer other inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def split():
        state = {key: value.numpy().copy() for key, value in net.state_dict().items()}
        return SplitModel.of(state, ("2.weight", "2.bias"))

    before = split()
    assert set(before.head) == {"2.weight", "2.bias"}
    net(torch.randn(8, 3))
    assert split().digest != before.digest
    assert before.backbone_bytes == 4 * (12 + 4 + 4 * 4) + 8
