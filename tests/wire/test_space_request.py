"""What a node builds when the server asks for it."""

import numpy as np
import pytest
import torch

from gems_flwr.samples import Samples
from gems_flwr.wire.space_requests import Cone, NodeLayer

RNG = np.random.default_rng(0)
# 50 samples of class 0, 4 of class 1, none of class 2.
INPUTS = torch.from_numpy(RNG.normal(size=(54, 3))).float()
LABELS = torch.from_numpy(np.repeat([0, 1], [50, 4]))


def build(**options):
    samples = Samples(INPUTS, LABELS)
    return Cone(**options).build(NodeLayer(torch.zeros(3, 3), torch.zeros(3), samples, seed=0))


def test_sums_have_one_shape_and_say_nothing_of_a_handful():
    """A class with fewer samples than the minimum looks like one that is not there."""
    sums = build(sums=True, min_count=10)
    assert sums.counts.tolist() == [50, 0, 0]
    assert sums.sums.shape == (3, 3)
    assert not sums.sums[1:].any()
    assert not sums.outers[1:].any()
    assert sums.sums[0] == pytest.approx(INPUTS[:50].sum(dim=0).numpy(), rel=1e-5)
    assert build(sums=True, min_count=2).counts.tolist() == [50, 4, 0]


def test_a_cone_withholds_the_same_classes_and_names_them():
    cone = build(min_count=10)
    assert cone.labels.tolist() == [0]
    assert cone.withheld == (1,)
    assert cone.total_count == 54
