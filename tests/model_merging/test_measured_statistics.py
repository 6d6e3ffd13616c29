"""Statistics against autograd, sample by sample; statistics that no data can have."""

import numpy as np
import pytest
import torch
from helpers_fisher import fisher_diagonal
from helpers_merging import arrays_of, network, samples, with_labels
from torch import nn

from gems_flwr.model_merging.layer_statistics import check_statistics, statistics_shapes
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.wire.requests import StatisticsRequest

WIDTHS = (5, 4, 3, 3)
LAYERS = ("1", "3", "5")


def measure(method, module, x, labels="exact", **options):
    request = StatisticsRequest(method, labels)
    return measure_statistics(
        request.method, request.labels, arrays_of(module), with_labels(x), model=module, **options
    )


def gradients(module, x):
    """For every sample and label: its chance, and the gradient of its log-likelihood."""
    for each in x:
        logs = module(each[None]).log_softmax(dim=1)[0]
        for label in range(len(logs)):
            module.zero_grad()
            logs[label].backward(retain_graph=True)
            yield (
                float(logs[label].detach().exp()),
                {
                    layer: torch.column_stack(
                        [module[int(layer)].weight.grad, module[int(layer)].bias.grad]
                    )
                    .numpy()
                    .copy()
                    for layer in LAYERS
                },
            )


def test_the_fisher_diagonal_is_the_expected_squared_gradient():
    module, x = network(WIDTHS), samples(6)
    statistics = measure("fisher", module, x)
    for layer in LAYERS:
        expected = sum(p * g[layer].astype(float) ** 2 for p, g in gradients(module, x)) / len(x)
        assert np.allclose(statistics[f"{layer}.weight"]["fisher"], expected, atol=1e-7)


@pytest.mark.parametrize("labels", ["exact", "sampled"])
def test_the_fisher_diagonal_is_that_of_the_ellipsoids(labels):
    """One seed draws the same labels in both, as long as all samples are drawn at once."""
    module, x = network(WIDTHS), samples(50)
    statistics = measure("fisher", module, x, labels, seed=3)
    other = fisher_diagonal(module, x, labels, seed=3)
    for layer in LAYERS:
        fisher = statistics[f"{layer}.weight"]["fisher"]
        assert np.allclose(fisher[:, :-1], other[f"{layer}.weight"].numpy(), atol=1e-6)
        assert np.allclose(fisher[:, -1], other[f"{layer}.bias"].numpy(), atol=1e-6)


def test_the_kronecker_factors_are_the_second_moments_of_inputs_and_output_gradients():
    """The gradient of a layer is g aᵀ with a one behind a: its last column is g itself."""
    module, x = network(WIDTHS), samples(6)
    statistics = measure("kfac", module, x)
    seen = x
    for position, layer in enumerate(LAYERS):
        a = np.column_stack([seen.numpy(), np.ones(len(x))]).astype(float)
        outer = [p * np.outer(g[layer][:, -1], g[layer][:, -1]) for p, g in gradients(module, x)]
        found = statistics[f"{layer}.weight"]
        assert np.allclose(found["inputs"], a.T @ a / len(x), atol=1e-6)
        assert np.allclose(found["gradients"], sum(outer) / len(x), atol=1e-6)
        with torch.no_grad():
            seen = module[: 2 * position + 3](x)


def test_for_a_single_sample_the_kronecker_product_is_the_fisher_matrix():
    """Then nothing is averaged apart: its diagonal is the Fisher diagonal."""
    module, x = network(WIDTHS), samples(1)
    fisher, factors = measure("fisher", module, x), measure("kfac", module, x)
    for weight, kinds in factors.items():
        product = np.outer(np.diagonal(kinds["gradients"]), np.diagonal(kinds["inputs"]))
        assert np.allclose(product, fisher[weight]["fisher"], atol=1e-7)


def test_drawn_labels_tend_to_the_expectation():
    module = network(WIDTHS)
    x = samples(5).repeat(4000, 1)
    exact, drawn = (measure("kfac", module, x, labels) for labels in ("exact", "sampled"))
    for weight in exact:
        assert np.allclose(drawn[weight]["gradients"], exact[weight]["gradients"], atol=0.01)


def test_batches_add_up():
    module, x = network(WIDTHS), samples(50)
    whole = measure("kfac", module, x)
    parts = [(part, torch.zeros(len(part))) for part in x.split(7)]
    request = StatisticsRequest("kfac")
    pieces = measure_statistics(
        request.method, request.labels, arrays_of(module), parts, model=module
    )
    for weight, kinds in whole.items():
        assert all(np.allclose(kinds[kind], pieces[weight][kind], atol=1e-6) for kind in kinds)


def test_dropout_is_off_and_frozen_weights_make_no_difference():
    module, x = network(WIDTHS), samples(20)
    expected = measure("kfac", module, x)
    noisy = nn.Sequential(*module[:3], nn.Dropout(0.9), *module[3:]).train()
    noisy.requires_grad_(False)
    found = measure("kfac", noisy, x)
    for layer, other in zip(LAYERS, ("1", "4", "6"), strict=True):
        for kind in ("inputs", "gradients"):
            ours, theirs = found[f"{other}.weight"][kind], expected[f"{layer}.weight"][kind]
            assert np.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_a_single_layer_needs_no_module(width):
    module, x = network((5, width)), samples(20)
    request = StatisticsRequest("kfac")
    alone = measure_statistics(request.method, request.labels, arrays_of(module), with_labels(x))
    for kind, expected in measure("kfac", module, x)["1.weight"].items():
        assert np.array_equal(alone["1.weight"][kind], expected)
    assert alone["1.weight"]["gradients"].min() < 0 or width == 1
    assert np.trace(alone["1.weight"]["gradients"]) > 0.01


def test_matching_asks_for_nothing():
    assert measure("matching", network(WIDTHS), samples(3)) == {}


def test_models_that_cannot_be_measured_are_refused_with_the_reason():
    x = with_labels(samples(3))
    request = StatisticsRequest("regmean")
    with pytest.raises(ValueError, match=r"^write statistics_mod\(data, model=Net\): "):
        measure_statistics(request.method, request.labels, arrays_of(network(WIDTHS)), x)
    with pytest.raises(ValueError, match="no data"):
        measure_statistics(
            request.method, request.labels, arrays_of(network(WIDTHS)), [], model=network(WIDTHS)
        )

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x):
            return self.layer(self.layer(x))

    with pytest.raises(ValueError, match="once each"):
        measure_statistics(request.method, request.labels, arrays_of(Twice()), x, model=Twice())


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac", "matching"])
def test_what_was_measured_passes_the_check_and_has_the_promised_shapes(method):
    module = network(WIDTHS)
    # Fewer samples than inputs: singular moments are no mistake.
    statistics = measure(method, module, samples(2))
    request, arrays = StatisticsRequest(method), arrays_of(module)
    check_statistics(statistics, request.method, arrays)
    shapes = {w: {kind: a.shape for kind, a in kinds.items()} for w, kinds in statistics.items()}
    assert shapes == statistics_shapes(request.method, arrays)


def asymmetric(a):
    a[0, 1] += 1


def infinite(a):
    a[0, 0] = np.inf


def negative(a):
    a[1, 1] = -0.1


def impossible(a):
    a[0, 1] = a[1, 0] = 100


@pytest.mark.parametrize(
    ("method", "kind", "spoil", "match"),
    [
        ("regmean", "inputs", asymmetric, "symmetric"),
        ("kfac", "gradients", impossible, "a negative variance"),
        ("kfac", "inputs", infinite, "NaN or infinity"),
        ("regmean", "inputs", negative, "not be negative, got -0.1"),
        ("fisher", "fisher", negative, "not be negative, got -0.1"),
    ],
)
def test_impossible_statistics_are_refused_by_layer_and_kind(method, kind, spoil, match):
    module = network(WIDTHS)
    statistics = measure(method, module, samples(20))
    spoil(statistics["3.weight"][kind])
    with pytest.raises(ValueError, match=rf"'{kind}' of '3.weight': .*{match}"):
        check_statistics(statistics, method, arrays_of(module))


def test_statistics_of_other_layers_or_kinds_are_refused():
    module = network(WIDTHS)
    arrays, statistics = arrays_of(module), measure("kfac", network(WIDTHS), samples(9))
    with pytest.raises(ValueError, match=r"'1.weight': expected .'inputs'., got"):
        check_statistics(statistics, "regmean", arrays)
    del statistics["3.weight"]
    with pytest.raises(ValueError, match=r"3\.weight"):
        check_statistics(statistics, "kfac", arrays)


@pytest.mark.parametrize("option", [{"method": "mean"}, {"method": "kfac", "labels": "true"}])
def test_a_request_for_something_else_is_refused_with_what_is_allowed(option):
    with pytest.raises(ValueError, match="must be one of"):
        StatisticsRequest(**option)
