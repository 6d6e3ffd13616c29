"""A harder task for hidden layers, and new starts for what is not frozen."""

import pytest
import torch
from torch import nn

from gems_flwr.networks.subclasses import other_output_layer, split_classes
from gems_flwr.networks.surgery import freeze_lowest, start_afresh


def clouds(seed=0):
    """Two classes of three clearly separate clouds each; class 4 and class 7."""
    generator = torch.Generator().manual_seed(seed)
    centers = 20 * torch.eye(6)
    cloud = torch.arange(6).repeat_interleave(30)
    x = centers[cloud] + torch.randn(180, 6, generator=generator)
    return x.reshape(180, 2, 3), torch.tensor([4, 7])[cloud // 3], cloud


def test_clusters_of_a_class_become_classes_of_their_own():
    x, y, cloud = clouds()
    split = split_classes(x, y, 3, seed=1)
    assert sorted(torch.unique(split).tolist()) == list(range(int(split.max()) + 1))
    pairs = set(zip(split.tolist(), y.tolist(), strict=True))
    assert len(pairs) == len(torch.unique(split)), "no cluster has two classes"
    assert split_classes(x, y, 3, seed=1).tolist() == split.tolist()
    found = {tuple(sorted(cloud[split == k].unique().tolist())) for k in split.unique().tolist()}
    assert len(found) >= 5, "well separated clouds are told apart, but for a bad start"


def test_one_cluster_per_class_is_the_class():
    x, y, _ = clouds()
    split = split_classes(x, y, 1, seed=0)
    assert torch.equal(split, (y == 7).long())


def test_equal_samples_leave_no_gap_in_the_labels():
    x, y = torch.zeros(10, 2), torch.tensor([0] * 5 + [1] * 5)
    assert split_classes(x, y, 4, seed=0).tolist() == [0] * 5 + [1] * 5
    with pytest.raises(ValueError, match="at least 1"):
        split_classes(x, y, 0, seed=0)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))


def test_the_own_output_layer_comes_back_as_it_was():
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with other_output_layer(model, 7, seed=3):
        assert model(torch.randn(5, 3)).shape == (5, 7)
        first = model[2][0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight += 1
    after = model.state_dict()
    assert torch.equal(after["2.0.weight"], before["2.0.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])
    with other_output_layer(model, 7, seed=3):
        assert torch.equal(model[2][0].weight, first)


def test_it_comes_back_after_an_error_as_well():
    model = network()
    with pytest.raises(RuntimeError), other_output_layer(model, 7, seed=3):
        raise RuntimeError
    assert model[2][0].out_features == 2


def test_only_layers_that_are_not_frozen_start_afresh():
    model = nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 4), nn.Linear(4, 2))
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    freeze_lowest(model, 1)
    start_afresh(model, other, seed=1)
    after = model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["2.weight"], other.state_dict()["2.weight"])
    # Its inputs are the frozen layer's nine neurons, not the five of the new model.
    assert not torch.equal(after["1.weight"], before["1.weight"])
    assert 0.2 < float(after["1.weight"].abs().max()) <= 1 / 3
    once_more = after["1.weight"].clone()
    start_afresh(model, other, seed=1)
    assert torch.equal(model.state_dict()["1.weight"], once_more)
