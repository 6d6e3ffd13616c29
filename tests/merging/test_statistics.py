"""Statistics against autograd, of linear layers and of convolutions; and some that no data have."""

import numpy as np
import pytest
import torch
from helpers_fisher import fisher_diagonal
from helpers_merging import arrays_of, network, samples, with_labels
from torch import nn

from gems_flwr import merging as internals
from gems_flwr.errors import ModelError
from gems_flwr.merging import NEEDED, check_statistics, measure_statistics, statistics_shapes

WIDTHS = (5, 4, 3, 3)
ALL = ("inputs", "gradients", "fisher")
CONVOLUTIONS = {
    "strided": {"stride": 2, "padding": (1, 0)},
    "without bias": {"bias": False, "dilation": 2},
}


def measure(module, x, kinds=ALL):
    return measure_statistics(kinds, arrays_of(module), with_labels(x), model=module)


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


def test_the_kronecker_factors_are_the_second_moments_of_inputs_and_output_gradients():
    """The gradient of a layer is g aᵀ with a one behind a: its last column is g itself."""
    module, x = network(WIDTHS), samples(6)
    statistics, seen = measure(module, x), x
    for layer in (1, 3, 5):
        rows = torch.column_stack([seen, torch.ones(len(x))]).double().numpy()
        outer = 0.0
        for each in x:
            logs = module(each[None]).log_softmax(dim=1)[0]
            for log in logs:
                module.zero_grad()
                log.backward(retain_graph=True)
                g = module[layer].bias.grad.double().numpy()
                outer = outer + float(log.detach().exp()) * np.outer(g, g)
        found = statistics[f"{layer}.weight"]
        assert np.allclose(found["inputs"], rows.T @ rows / len(x), atol=1e-6)
        assert np.allclose(found["gradients"], outer / len(x), atol=1e-6)
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


def test_gradients_of_convolutions_are_averaged_over_positions():
    """Their trace is the mean squared gradient in a pixel, by autograd in the feature maps."""
    module, x = convolutional(), images(4)
    found = measure(module, x)["0.weight"]["gradients"]
    maps = module[0](x).detach().requires_grad_()
    logs = module[1:](maps).log_softmax(dim=1)
    expected = 0.0
    for label in range(3):
        (each,) = torch.autograd.grad(logs[:, label].sum(), maps, retain_graph=True)
        chances = logs[:, label].detach().exp()[:, None, None, None]
        expected += float((chances * each**2).sum(dim=1).mean(dim=(1, 2)).mean())
    assert np.trace(found) == pytest.approx(expected, rel=1e-4)


def same(found, expected):
    return all(
        np.allclose(found[weight][kind], array, atol=1e-6)
        for weight, kinds in expected.items()
        for kind, array in kinds.items()
    )


def test_batches_and_parts_of_images_add_up(monkeypatch):
    module, x = network(WIDTHS), samples(50)
    parts = [(part, torch.zeros(len(part))) for part in x.split(7)]
    pieces = measure_statistics(ALL, arrays_of(module), parts, model=module)
    assert same(pieces, measure(module, x))
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


def test_a_single_layer_needs_no_module():
    for width in (1, 3):
        module, x = network((5, width)), samples(20)
        alone = measure_statistics(ALL, arrays_of(module), with_labels(x))
        assert same(alone, measure(module, x))
        assert np.trace(alone["1.weight"]["gradients"]) > 0.01


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_models_that_cannot_be_measured_are_refused_with_the_reason():
    x = with_labels(samples(3))
    with pytest.raises(ModelError, match=r"^write good_enough_mod\(data, model=Net\): "):
        measure_statistics(ALL, arrays_of(network(WIDTHS)), x)
    with pytest.raises(ModelError, match="no data"):
        measure_statistics(ALL, arrays_of(network(WIDTHS)), [], model=network(WIDTHS))
    with pytest.raises(ModelError, match="once each"):
        measure_statistics(ALL, arrays_of(Twice()), x, model=Twice())
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


@pytest.mark.parametrize("method", NEEDED)
def test_what_was_measured_passes_the_check_and_has_the_promised_shapes(method):
    """With fewer samples than inputs: singular moments are no mistake."""
    for module, x in (CASES["strided"], (network(WIDTHS), samples(2))):
        arrays, found = arrays_of(module), measure(module, x[:2], NEEDED[method])
        check_statistics(found)
        shapes = {w: {kind: a.shape for kind, a in kinds.items()} for w, kinds in found.items()}
        assert shapes == statistics_shapes(method, arrays)


@pytest.mark.parametrize(
    ("method", "kind", "where", "value", "match"),
    [
        ("regmean", "inputs", [(0, 1)], 9.0, "symmetric"),
        ("fedfisher_kfac", "gradients", [(0, 1), (1, 0)], 100.0, "a negative variance"),
        ("fedfisher_kfac", "inputs", [(0, 0)], np.inf, "NaN or infinity"),
        ("regmean", "inputs", [(1, 1)], -0.1, "not be negative, got -0.1"),
        ("fisher", "fisher", [(1, 1)], -0.1, "not be negative, got -0.1"),
    ],
)
def test_impossible_statistics_are_refused_by_layer_and_kind(method, kind, where, value, match):
    module = network(WIDTHS)
    statistics = measure(module, samples(20), NEEDED[method])
    for place in where:
        statistics["3.weight"][kind][place] = value
    with pytest.raises(ValueError, match=rf"'{kind}' of '3.weight': .*{match}"):
        check_statistics(statistics)
