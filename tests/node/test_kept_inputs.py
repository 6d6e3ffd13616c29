"""A node computes the inputs of its layer once: the same bits as without, whatever changes."""

import dataclasses
import stat

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from helpers_blobs import both_parts
from helpers_gems import linear_app
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gems_flwr import Gems, InProcessGrid, RandomFilters
from gems_flwr.networks import LayerReader, inputs
from gems_flwr.node import kept_inputs
from gems_flwr.node.kept_inputs import KeptInputs
from gems_flwr.node.limits import UNLIMITED

COUNT, BATCH, PROBES = 40, 16, 8
ALL, SIZE = COUNT + PROBES, 4 * 16 * COUNT


class Backbone(nn.Module):
    """A lift with a weight and attributes of its own, which counts what it computes."""

    computed = 0

    def __init__(self, seed=0, weight=1.0, power=1.0, noise=0.0):
        super().__init__()
        self.lift = RandomFilters((1, 8, 8), filters=4, grid=2, seed=seed)
        self.weight = nn.Parameter(torch.tensor([weight]))
        self.power, self.noise = power, noise

    def forward(self, x):
        Backbone.computed += len(x)
        return self.weight * self.lift(x) ** self.power + self.noise * torch.randn(16)


def network(**options):
    return nn.Sequential(Backbone(**options), nn.Linear(16, 3))


def images(seed=0):
    x = torch.rand(COUNT, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(COUNT) % 3


def loader(x, y, **options):
    return DataLoader(TensorDataset(x, y), BATCH, **options)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(kept_inputs, "_memory", {})
    return KeptInputs("north", 10**6, None)


@pytest.fixture
def processes(monkeypatch):
    """As if each reading were in a process of its own: no memory, and Python's hashes differ."""
    monkeypatch.setattr(KeptInputs, "_remember", lambda *_: None)
    chance = np.random.default_rng(0)
    monkeypatch.setattr(inputs, "hash", lambda _: chance.integers(2**60), raising=False)


def cost(data, memory, **options):
    """Return how many images a reading computes; what it returns is that without a memory."""
    model = network(**options)
    arrays = {key: value.numpy() for key, value in model.state_dict().items()}
    reader = LayerReader(arrays, model, "1")
    layer, before = reader.output_layer(data), Backbone.computed
    found, computed = reader.read(data, layer, memory), Backbone.computed - before
    expected = reader.read(data, layer)
    assert torch.equal(found.inputs, expected.inputs) is not ("noise" in options)
    assert torch.equal(found.labels, expected.labels)
    return computed


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_run_computes_inputs_once_and_has_the_same_bits(on_disk, tmp_path, request):
    """Two nodes with shuffled loaders, and five requests in three rounds."""

    def play(**limits):
        data = both_parts(lambda context: loader(*images(), shuffle=True))
        limits = dataclasses.replace(UNLIMITED, **limits)
        grid = InProcessGrid(linear_app(data=data, model=network, limits=limits), 2)
        before, arrays = Backbone.computed, ArrayRecord(network().state_dict())
        result = Gems(refine=2).start(grid, arrays, num_rounds=3)
        return [a.data for a in result.arrays.values()], Backbone.computed - before

    if on_disk:
        request.getfixturevalue("processes")
    bits, computed = play(inputs_folder=tmp_path if on_disk else None)
    assert play(keep_inputs=0) == (bits, computed + 2 * (4 * COUNT - 5 * PROBES))


def test_other_data_and_other_modules_are_never_answered_with_what_is_kept(memory):
    x, y = images()
    changed = x.clone()
    changed[-1, 0, 3, 3] += 1e-6
    assert cost((x, y), memory) == ALL
    assert cost((x, 2 - y), memory) == PROBES  # labels are not kept
    assert cost(loader(changed, y), memory) == ALL  # other batches
    assert cost(loader(x, y, shuffle=True), memory) == PROBES + COUNT % BATCH  # one pixel
    assert cost(loader(x[:BATCH], y[:BATCH]), memory) == PROBES
    assert cost(loader(x, y), memory) == ALL - BATCH
    assert cost((x.double(), y), memory) == ALL
    assert cost(images(seed=1), memory) == ALL
    for options in ({}, {"seed": 1}, {"weight": 2.0}, {"power": 2.0}):
        assert [cost((x, y), memory, **options) for _ in "ab"] == [ALL, PROBES]
    assert [cost((x, y), memory, noise=1.0) for _ in "ab"] == [ALL, ALL]


def test_of_all_in_memory_what_was_used_least_recently_goes_first():
    a, b, c = (KeptInputs(owner, 2 * SIZE, None) for owner in "abc")
    costs = [cost(images(), memory) for memory in (a, b, a, c, a, b)]
    assert costs == [ALL, ALL, PROBES, ALL, PROBES, ALL]
    # Nor is what was changed in place used again, or what is too large kept.
    kept_inputs._memory.popitem()[1][0][1].zero_()
    assert [cost(images(), each) for each in (b, *[KeptInputs("d", 9, None)] * 2)] == [ALL] * 3


def test_files_are_private_bounded_and_computed_again_if_damaged(processes, tmp_path):
    memory = KeptInputs("north", 10**6, tmp_path)
    assert [cost(images(), memory) for _ in "ab"] == [ALL, PROBES]
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = path.read_bytes()
    for place in range(0, len(whole), 499):
        for end in (b"", bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(whole[:place] + end)
            assert cost(images(), memory) == ALL
            assert path.read_bytes() == whole
    (tmp_path / ".gems-inputs-left.1.tmp").write_bytes(bytes(len(whole)))
    for owner in "abcd":
        cost(images(), KeptInputs(owner, 2 * len(whole), tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    assert cost(images(), KeptInputs("e", 10**6, path / "in the way")) == ALL
