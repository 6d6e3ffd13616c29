"""Matching undoes any order of hidden neurons, and changes no network's function."""

import itertools

import numpy as np
import pytest
import torch
from helpers_merging import arrays_of, network, samples
from torch import nn

from gems_flwr.averaging.means import weighted_mean
from gems_flwr.model_merging.matching import (
    SIGMAS,
    align_to,
    match_and_average,
    sigmas_below_chance,
)


def shuffled(arrays, weights, seed):
    """The same function with hidden neurons in another order, computed by hand."""
    rng = np.random.default_rng(seed)
    out = {key: array.copy() for key, array in arrays.items()}
    for below, above in itertools.pairwise(weights):
        order = rng.permutation(len(out[below]))
        out[below] = out[below][order]
        out[below.replace("weight", "bias")] = out[below.replace("weight", "bias")][order]
        # Kernels and blocks of a flattened convolution move as a whole.
        above_array = out[above]
        blocks = above_array.reshape(len(above_array), len(order), -1)[:, order]
        out[above] = blocks.reshape(above_array.shape)
    return out


def predictions(module, arrays, x):
    module.load_state_dict({key: torch.from_numpy(a) for key, a in arrays.items()})
    with torch.no_grad():
        return module(x).numpy()


@pytest.mark.parametrize("widths", [(5, 8, 2), (5, 8, 7, 6, 3)])
def test_a_permutation_of_hidden_neurons_is_undone_exactly(widths):
    module = network(widths)
    arrays = arrays_of(module)
    weights = [key for key in arrays if key.endswith("weight")]
    other = shuffled(arrays, weights, seed=1)
    assert not all(np.array_equal(other[key], arrays[key]) for key in arrays)
    aligned = align_to(arrays, other)
    assert all(np.array_equal(aligned[key], arrays[key]) for key in arrays)
    merged = match_and_average([arrays, other, shuffled(arrays, weights, seed=2)], [1, 2, 3])
    assert all(np.allclose(merged[key], arrays[key], atol=1e-6) for key in arrays)


def test_filters_of_a_convolution_are_matched_with_what_they_feed():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 3)
    )
    arrays = arrays_of(module)
    other = shuffled(arrays, ["0.weight", "2.weight", "4.weight"], seed=1)
    aligned = align_to(arrays, other)
    assert all(np.array_equal(aligned[key], arrays[key]) for key in arrays)


def test_aligning_leaves_a_networks_function_as_it_was():
    widths = (5, 9, 7, 3)
    reference, module = arrays_of(network(widths, seed=1)), network(widths, seed=2)
    arrays, x = arrays_of(module), samples(20)
    aligned = align_to(reference, arrays)
    assert not np.array_equal(aligned["1.weight"], arrays["1.weight"])
    assert np.allclose(predictions(module, aligned, x), predictions(module, arrays, x), atol=1e-5)


def test_aligned_neurons_are_nearer_to_the_reference_than_in_any_other_order():
    """Against all permutations of a layer with five neurons."""
    reference, arrays = (arrays_of(network((3, 5, 2), seed=seed)) for seed in (1, 2))
    rows = [np.column_stack([a["1.weight"], a["1.bias"]]) for a in (reference, arrays)]
    best = min(
        ((rows[0] - rows[1][list(order)]) ** 2).sum() for order in itertools.permutations(range(5))
    )
    aligned = align_to(reference, arrays)
    found = np.column_stack([aligned["1.weight"], aligned["1.bias"]])
    assert ((rows[0] - found) ** 2).sum() == pytest.approx(best, rel=1e-6)


def test_the_order_of_the_other_nodes_does_not_matter():
    models = [arrays_of(network((5, 8, 6, 2), seed=seed)) for seed in range(4)]
    weights = [4, 1, 2, 3]
    merged = match_and_average(models, weights)
    order = [2, 3, 0, 1]
    turned = match_and_average(
        [models[i] for i in order], [weights[i] for i in order], reference=order.index(0)
    )
    assert all(np.allclose(merged[key], turned[key], atol=1e-6) for key in merged)


def test_without_hidden_layers_it_is_the_mean():
    models = [arrays_of(network((5, 3), seed=seed)) for seed in range(3)]
    merged, mean = match_and_average(models, [1, 2, 3]), weighted_mean(models, [1, 2, 3])
    assert all(np.allclose(merged[key], mean[key], atol=1e-7) for key in mean)


# --- a common start ---------------------------------------------------------------------------


def trained(module, seed, steps, rate=0.01):
    """A copy of a network after training on two of three blobs, which depend on the seed."""
    rng = np.random.default_rng(seed)
    copy = network((5, 12, 9, 3))
    copy.load_state_dict(module.state_dict())
    centres = np.random.default_rng(99).normal(size=(3, 5)) * 2
    y = np.array([seed % 3, (seed + 1) % 3])[rng.integers(2, size=200)]
    x = torch.from_numpy(centres[y] + rng.normal(size=(200, 5))).float()
    optimizer = torch.optim.Adam(copy.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(copy(x), torch.from_numpy(y)).backward()
        optimizer.step()
    return arrays_of(copy)


@pytest.mark.parametrize("steps", [1, 20, 400])
@pytest.mark.parametrize("start", range(2))
def test_from_a_common_start_neurons_keep_their_places_and_the_result_is_the_average(start, steps):
    """After 400 steps the nearest neuron is often another one: the assignment alone would move."""
    module = network((5, 12, 9, 3), seed=start)
    models = [trained(module, seed, steps) for seed in range(3)]
    weights = [3, 1, 2]
    merged, mean = match_and_average(models, weights), weighted_mean(models, [3 / 6, 1 / 6, 2 / 6])
    assert all(np.array_equal(merged[key], mean[key]) for key in mean)


def test_in_chance_order_the_number_of_deviations_is_a_standard_one():
    """Networks from starts of their own: mean 0 and deviation 1, as of a standard normal one."""
    found = [
        sigmas_below_chance(*(arrays_of(network((5, 12, 9, 3), seed=s)) for s in (i, 1000 + i)))
        for i in range(100)
    ]
    assert abs(np.mean(found)) < 0.25
    assert np.std(found) == pytest.approx(1.0, abs=0.15)
    assert max(found) < SIGMAS + 1


def test_networks_from_starts_of_their_own_are_still_matched():
    module, other = network((5, 12, 9, 3), seed=1), network((5, 12, 9, 3), seed=2)
    reference, model = trained(module, 0, 50), trained(other, 0, 50)
    aligned = align_to(reference, model)
    assert not np.array_equal(aligned["1.weight"], model["1.weight"])


def test_a_copy_with_few_neurons_exchanged_is_put_in_order():
    """Most positions mean something, but matching brings the distance to zero."""
    arrays = arrays_of(network((5, 12, 9, 3)))
    other = {key: array.copy() for key, array in arrays.items()}
    order = [1, 0, *range(2, 12)]
    other["1.weight"], other["1.bias"] = other["1.weight"][order], other["1.bias"][order]
    other["3.weight"] = other["3.weight"][:, order]
    assert sigmas_below_chance(arrays, other) > SIGMAS
    aligned = align_to(arrays, other)
    assert all(np.array_equal(aligned[key], arrays[key]) for key in arrays)
