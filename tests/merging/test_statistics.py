"""Statistics against autograd, of linear layers and of convolutions; and some that no data have."""

import numpy as np
import pytest
import torch
from helpers_fisher import fisher_diagonal
from helpers_merging import arrays_of, network, samples, with_labels
from torch import nn

from gems_flwr import merging as internals
from gems_flwr.errors import ModelError
from gems_flwr.merging import check_statistics, measure_statistics, statistics_shapes

WIDTHS = (5, 4, 3, 3)
ALL = ("inputs", "fisher")
CONVOLUTIONS = {
    "strided": {"stride": 2, "padding": (1, 0)},
    "without bias": {"bias": False, "dilation": 2},
}


def measure(module, x):
    """Return both kinds by the name of a layer's weight."""
    data = (arrays_of(module), with_labels(x))
    found = {kind: measure_statistics(kind, *data, model=module) for kind in ALL}
    return {weight: {kind: found[kind][weight] for kind in ALL} for weight in found["inputs"]}


def convolutional(seed=0, **options):
    """Two convolutions, pooled in between, and a linear layer: 7x7 pixels of two channels."""
    torch.manual_seed(seed)
    below = nn.Sequential(
        nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2, **options)
    )
    outputs = below(torch.zeros(1, 2, 7, 7)).numel()
    return nn.Sequential(*below, nn.Tanh(), nn.Flatten(), nn.Linear(outputs, 3))


def images(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 2, 7, 7))).float()


CASES = {"linear": (network(WIDTHS), samples(20))} | {
    name: (convolutional(**options), images(5)) for name, options in CONVOLUTIONS.items()
}


@pytest.mark.parametrize("case", CASES)
def test_the_fisher_diagonal_is_the_expected_squared_gradient_of_each_sample(case):
    module, x = CASES[case]
    expected, found = fisher_diagonal(module, x), measure(module, x)
    for name, parameter in module.named_parameters():
        layer = name.rpartition(".")[0] + ".weight"
        fisher, width = found[layer]["fisher"], len(parameter)
        ours = fisher[:, -1] if name.endswith("bias") else fisher[:, : parameter[0].numel()]
        theirs = expected[name].reshape(width, -1).squeeze().numpy()
        assert np.allclose(ours, theirs, atol=1e-6), name


def test_inputs_of_linear_layers_are_their_second_moments():
    module, x = network(WIDTHS), samples(6)
    statistics, seen = measure(module, x), x
    for layer in (1, 3, 5):
        rows = torch.column_stack([seen, torch.ones(len(x))]).double().numpy()
        expected = rows.T @ rows / len(x)
        assert np.allclose(statistics[f"{layer}.weight"]["inputs"], expected, atol=1e-6)
        with torch.no_grad():
            seen = module[: layer + 2](x)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_inputs_of_convolutions_are_those_by_which_they_compute_their_outputs(case):
    """Of images x: sum over positions of (w a)^2 is w A w^T, for filters w of any values."""
    module, x = CASES[case]
    found = measure(module, x)
    for name in ("0", "3"):
        layer = dict(module.named_modules())[name]
        with torch.no_grad():
            out = module[: int(name) + 1](x).double()
        rows = layer.weight.detach().reshape(len(layer.weight), -1)
        if layer.bias is not None:
            rows = torch.column_stack([rows, layer.bias.detach()])
        rows = rows.double().numpy()
        expected = torch.einsum("nvhw,nuhw->vu", out, out).numpy() / len(x)
        assert np.allclose(rows @ found[f"{name}.weight"]["inputs"] @ rows.T, expected, atol=1e-4)


def same(found, expected):
    return all(
        np.allclose(found[weight][kind], array, atol=1e-6)
        for weight, kinds in expected.items()
        for kind, array in kinds.items()
    )


def test_batches_and_parts_of_images_add_up(monkeypatch):
    module, x = network(WIDTHS), samples(50)
    parts, whole = [(part, torch.zeros(len(part))) for part in x.split(7)], measure(module, x)
    for kind in ALL:
        for weight, piece in measure_statistics(
            kind, arrays_of(module), parts, model=module
        ).items():
            assert np.allclose(piece, whole[weight][kind], atol=1e-6)
    module, x = convolutional(), images(11)
    whole = measure(module, x)
    monkeypatch.setattr(internals, "CHUNK_VALUES", 3000)
    monkeypatch.setattr("gems_flwr.networks.hidden.CHUNK_VALUES", 700)
    assert same(measure(module, x), whole)


def test_dropout_is_off_and_frozen_weights_make_no_difference():
    module, x = network(WIDTHS), samples(20)
    noisy = nn.Sequential(*module[:5], nn.Dropout(0.9), *module[5:]).train()
    noisy.requires_grad_(False)
    found = measure(noisy, x)
    assert same({**found, "5.weight": found["6.weight"]}, measure(module, x))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_models_that_cannot_be_measured_are_refused_with_the_reason():
    x = with_labels(samples(3))
    with pytest.raises(ModelError, match=r"^write good_enough_mod\(data, model=Net\): "):
        measure_statistics("fisher", arrays_of(network(WIDTHS)), x)
    with pytest.raises(ModelError, match="no data"):
        measure_statistics("fisher", arrays_of(network(WIDTHS)), [], model=network(WIDTHS))
    with pytest.raises(ModelError, match="once each"):
        measure_statistics("fisher", arrays_of(Twice()), x, model=Twice())
    for layer in (
        nn.Conv2d(2, 4, 2, groups=2),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.Conv2d(2, 4, 2, padding=1, padding_mode="circular"),
    ):
        outputs = layer(torch.zeros(1, 2, 7, 7)).numel()
        with pytest.raises(ModelError, match="without groups and with plain zero padding"):
            measure(nn.Sequential(layer, nn.Flatten(), nn.Linear(outputs, 3)), images(2))
    module = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Flatten(), nn.Linear(24, 3))
    with pytest.raises(ModelError, match="'0' is neither linear nor a convolution of images"):
        measure(module, images(2)[:, :, 0])


# --- as they arrive -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_what_was_measured_passes_the_check_and_has_the_promised_shapes(kind):
    """With fewer samples than inputs: singular moments are no mistake."""
    for module, x in (CASES["strided"], (network(WIDTHS), samples(2))):
        arrays = arrays_of(module)
        found = measure_statistics(kind, arrays, with_labels(x[:2]), model=module)
        check_statistics(kind, found)
        assert {w: array.shape for w, array in found.items()} == statistics_shapes(kind, arrays)


@pytest.mark.parametrize(
    ("kind", "where", "value", "match"),
    [
        ("inputs", [(0, 1), (1, 0)], 100.0, "a negative variance"),
        ("inputs", [(0, 0)], np.inf, "NaN or infinity"),
        ("inputs", [(1, 1)], -0.1, "not be negative, got -0.1"),
        ("fisher", [(1, 1)], -0.1, "not be negative, got -0.1"),
    ],
)
def test_impossible_statistics_are_refused_by_layer_and_kind(kind, where, value, match):
    found = {weight: kinds[kind] for weight, kinds in measure(network(WIDTHS), samples(20)).items()}
    for place in where:
        found["3.weight"][place] = value
    with pytest.raises(ValueError, match=rf"'{kind}' of '3.weight': .*{match}"):
        check_statistics(kind, found)
