"""Statistics of convolutions against autograd, and what merging makes of them."""

import numpy as np
import pytest
import torch
from helpers_merging import arrays_of, with_labels
from torch import nn
from torch.func import functional_call, grad, vmap

from gems_flwr.errors import ModelError
from gems_flwr.model_merging import measure as measuring
from gems_flwr.model_merging.layer_statistics import check_statistics, statistics_shapes
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.model_merging.merge_models import merge_models
from gems_flwr.model_merging.regmean import merge_by_regmean

CONVOLUTIONS = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"stride": 2, "padding": (1, 0)},
    "dilated": {"dilation": 2},
    "without bias": {"bias": False},
}


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


def measure(method, module, x, labels="exact", **options):
    return measure_statistics(
        method, labels, arrays_of(module), with_labels(x), model=module, **options
    )


def per_sample_gradients(module, x):
    """Log-likelihood gradients of every sample and label, and the labels' chances, by vmap."""
    weights = {name: each.detach().double() for name, each in module.named_parameters()}
    module = module.double()

    def log_chance(given, image, label):
        return functional_call(module, given, (image[None],)).log_softmax(dim=1)[0, label]

    by_label = [
        vmap(grad(log_chance), in_dims=(None, 0, None))(weights, x.double(), label)
        for label in range(3)
    ]
    chances = module(x.double()).softmax(dim=1).detach()
    module.float()
    return by_label, chances


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_the_fisher_diagonal_is_the_expected_squared_gradient_of_each_sample(options):
    module, x = convolutional(**options), images(5)
    by_label, chances = per_sample_gradients(module, x)
    found = measure("fisher", module, x)
    for name, parameter in module.named_parameters():
        expected = sum(
            (chances[:, label].reshape(-1, *[1] * parameter.ndim) * each[name] ** 2).mean(0)
            for label, each in enumerate(by_label)
        )
        layer = name.rpartition(".")[0] + ".weight"
        fisher = found[layer]["fisher"]
        width = len(parameter)
        ours = fisher[:, -1] if name.endswith("bias") else fisher[:, : parameter[0].numel()]
        assert np.allclose(ours, expected.reshape(width, -1).squeeze().numpy(), atol=1e-6), name


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_the_inputs_are_those_by_which_the_layer_computes_its_outputs(options):
    """Of images x: sum over positions of (w a)^2 is w A w^T, for filters w of any values."""
    module, x = convolutional(**options), images(6)
    found = measure("kfac", module, x)
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


def test_the_gradients_are_averaged_over_positions():
    """Their trace is the mean squared gradient in a pixel, by autograd in the feature maps."""
    module, x = convolutional(), images(4)
    found = measure("kfac", module, x)["0.weight"]["gradients"]
    maps = module[0](x).detach().requires_grad_()
    logs = module[1:](maps).log_softmax(dim=1)
    expected = 0.0
    for label in range(3):
        (each,) = torch.autograd.grad(logs[:, label].sum(), maps, retain_graph=True)
        chances = logs[:, label].detach().exp()[:, None, None, None]
        expected += float((chances * each**2).sum(dim=1).mean(dim=(1, 2)).mean())
    assert np.trace(found) == pytest.approx(expected, rel=1e-4)


def test_a_convolution_that_sees_its_image_once_is_a_linear_layer():
    """A kernel as large as the image has one position: all statistics are those of a layer."""
    torch.manual_seed(0)
    kernel = nn.Sequential(nn.Conv2d(2, 4, 7), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3))
    flat = nn.Sequential(nn.Flatten(), nn.Linear(98, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        flat[1].weight.copy_(kernel[0].weight.reshape(4, -1))
        flat[1].bias.copy_(kernel[0].bias)
        flat[3].load_state_dict(kernel[3].state_dict())
    x = images(8)
    for method in ("fisher", "kfac"):
        ours, linear = measure(method, kernel, x), measure(method, flat, x)
        for weight, other in (("0.weight", "1.weight"), ("3.weight", "3.weight")):
            for kind, array in linear[other].items():
                assert np.allclose(ours[weight][kind], array, atol=1e-6), (weight, kind)


def test_parts_of_the_images_add_up(monkeypatch):
    module, x = convolutional(), images(11)
    whole = {method: measure(method, module, x) for method in ("kfac", "fisher")}
    monkeypatch.setattr(measuring, "CHUNK_VALUES", 3000)
    monkeypatch.setattr("gems_flwr.networks.patches.CHUNK_VALUES", 700)
    for method, expected in whole.items():
        found = measure(method, module, x)
        for weight, kinds in expected.items():
            for kind, array in kinds.items():
                assert np.allclose(found[weight][kind], array, atol=1e-7), (weight, kind)


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac", "fedfisher_kfac"])
def test_what_was_measured_passes_the_check_and_has_the_promised_shapes(method):
    module = convolutional(stride=2)
    statistics, arrays = measure(method, module, images(3), "sampled"), arrays_of(module)
    check_statistics(statistics, method, arrays)
    shapes = {w: {kind: a.shape for kind, a in kinds.items()} for w, kinds in statistics.items()}
    assert shapes == statistics_shapes(method, arrays)


def test_regmean_gives_on_every_nodes_patches_what_least_squares_do():
    """min_W of the squared differences to what each node's own filters give, solved by lstsq."""
    modules = [convolutional(seed) for seed in range(2)]
    data = [images(20, seed) for seed in range(2)]
    models = [arrays_of(module) for module in modules]
    statistics = [measure("regmean", m, x) for m, x in zip(modules, data, strict=True)]
    merged = merge_by_regmean(models, statistics, [1, 1], shrink=1.0, ridge=1e-12)
    rows, wanted = [], []
    for module, x in zip(modules, data, strict=True):
        with torch.no_grad():
            seen = module[:3](x)
            patches = nn.functional.unfold(seen, 2).transpose(1, 2).reshape(-1, 12).numpy()
            out = module[3](seen).flatten(2).transpose(1, 2).reshape(-1, 2).numpy()
        rows.append(np.column_stack([patches, np.ones(len(patches))]))
        wanted.append(out)
    best, *_ = np.linalg.lstsq(np.concatenate(rows), np.concatenate(wanted), rcond=None)
    assert np.allclose(merged["3.weight"].reshape(2, -1), best[:-1].T, atol=1e-3)
    assert np.allclose(merged["3.bias"], best[-1], atol=1e-3)


@pytest.mark.parametrize(
    "method", ["regmean", "fisher", "kfac", "matching", "fedfisher_diagonal", "fedfisher_kfac"]
)
def test_identical_networks_stay_as_they_are(method):
    module = convolutional()
    arrays = arrays_of(module)
    statistics = [measure(method, module, images(10, seed)) for seed in range(3)]
    merged = merge_models(method, [arrays] * 3, statistics, [1, 2, 3], steps=150).arrays
    assert all(np.allclose(merged[key], arrays[key], atol=1e-5) for key in arrays)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 2, groups=2),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.Conv2d(2, 4, 2, padding=1, padding_mode="circular"),
    ],
    ids=["groups", "same", "circular"],
)
def test_convolutions_whose_filters_see_something_else_are_refused(layer):
    outputs = layer(torch.zeros(1, 2, 7, 7)).numel()
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(outputs, 3))
    with pytest.raises(ModelError, match="without groups and with plain zero padding"):
        measure("fisher", module, images(2))


def test_other_layers_are_refused_by_name():
    module = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Flatten(), nn.Linear(24, 3))
    with pytest.raises(ModelError, match="'0' is neither linear nor a convolution of images"):
        measure("fisher", module, images(2)[:, :, 0])
