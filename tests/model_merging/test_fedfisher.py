"""FedFisher's steps lead from the average towards the minimum of the Fisher objective."""

import itertools

import numpy as np
import pytest
from helpers_merging import arrays_of, network, samples, with_labels

from gems_flwr.averaging.means import weighted_mean
from gems_flwr.model_merging.fedfisher import fedfisher_models
from gems_flwr.model_merging.layer_statistics import NEEDED
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.model_merging.merge_models import merge_models

WIDTHS, WEIGHTS = (5, 4, 3), [1, 3]
METHODS = {"diagonal": "fedfisher_diagonal", "kfac": "fedfisher_kfac"}


def nodes(method):
    """Two networks of one start, a little apart, and their statistics on data of their own."""
    rng = np.random.default_rng(0)
    modules = [network(WIDTHS) for _ in range(2)]
    models = [
        {k: (a + 0.3 * rng.normal(size=a.shape)).astype("f4") for k, a in arrays_of(m).items()}
        for m in modules
    ]
    statistics = [
        measure_statistics(method, "exact", model, with_labels(samples(40, seed=n)), model=module)
        for n, (model, module) in enumerate(zip(models, modules, strict=True))
    ]
    return models, statistics


def row(model, weight):
    bias = model[weight.replace("weight", "bias")]
    return np.column_stack([model[weight], bias]).astype(float)


def objective(shape, merged, models, statistics):
    """Sum of n_k (w - w_k)^T F_k (w - w_k), with F_k written out as a matrix."""
    total = 0.0
    for n, model, found in zip(WEIGHTS, models, statistics, strict=True):
        for weight, kinds in found.items():
            step = (row(merged, weight) - row(model, weight)).ravel()
            if shape == "diagonal":
                matrix = np.diag(kinds["fisher"].ravel())
            else:
                matrix = np.kron(kinds["gradients"], kinds["inputs"])
            total += n * step @ matrix @ step
    return total


@pytest.mark.parametrize("shape", METHODS)
def test_the_first_model_is_the_average_and_looks_are_every_hundred_steps(shape):
    models, statistics = nodes(METHODS[shape])
    found = list(fedfisher_models(shape, models, statistics, WEIGHTS, steps=250))
    assert [steps for steps, _ in found] == [0, 100, 200, 250]
    mean = weighted_mean(models, [0.25, 0.75])
    assert all(np.allclose(found[0][1][key], mean[key], atol=1e-6) for key in mean)


@pytest.mark.parametrize("shape", METHODS)
def test_steps_lower_the_objective_to_its_minimum(shape):
    """Near the least value of the quadratic form, which a dense solver gives layer by layer."""
    models, statistics = nodes(METHODS[shape])
    found = [
        objective(shape, merged, models, statistics)
        for _, merged in fedfisher_models(shape, models, statistics, WEIGHTS, steps=2000)
    ]
    assert all(after < before for before, after in itertools.pairwise(found[:5]))
    best = dict(models[0])
    for weight in statistics[0]:
        left, right = 0.0, 0.0
        for n, model, each in zip(WEIGHTS, models, statistics, strict=True):
            kinds = each[weight]
            matrix = (
                np.diag(kinds["fisher"].ravel())
                if shape == "diagonal"
                else np.kron(kinds["gradients"], kinds["inputs"])
            )
            left = left + n * matrix
            right = right + n * matrix @ row(model, weight).ravel()
        solved = np.linalg.lstsq(left, right, rcond=1e-12)[0].reshape(row(models[0], weight).shape)
        best |= {weight: solved[:, :-1], weight.replace("weight", "bias"): solved[:, -1]}
    least = objective(shape, best, models, statistics)
    assert least - 1e-9 < found[-1] < least + 0.02 * (found[0] - least)


def test_the_model_that_scores_best_is_taken_and_the_earlier_one_of_equals():
    models, statistics = nodes("fedfisher_diagonal")
    seen = []

    def score(arrays):
        seen.append(arrays)
        return [0.1, 0.7, 0.4, 0.7][len(seen) - 1]

    merged = merge_models("fedfisher_diagonal", models, statistics, WEIGHTS, steps=300, score=score)
    assert merged.arrays is seen[1]
    assert merged.details == {"steps": 100, "tried": 4, "public_score": 0.7}


@pytest.mark.parametrize(("method", "tried"), [("regmean", 2), ("kfac", 4), ("fisher", 1)])
def test_what_is_given_is_not_chosen(method, tried):
    models, statistics = nodes(method)
    chosen = merge_models(method, models, statistics, WEIGHTS, score=lambda _: 0.0)
    assert chosen.details["tried"] == tried
    # All score the same: the first is the default.
    plain = merge_models(method, models, statistics, WEIGHTS)
    assert all(np.array_equal(chosen.arrays[key], plain.arrays[key]) for key in plain.arrays)
    given = {"shrink": 0.5, "damping": 0.1}
    fixed = merge_models(method, models, statistics, WEIGHTS, score=lambda _: 0.0, **given)
    assert fixed.details["tried"] == 1


def test_every_method_is_known_to_the_request():
    assert set(METHODS.values()) < set(NEEDED)


def test_no_steps_at_all_are_refused():
    models, statistics = nodes("fedfisher_diagonal")
    with pytest.raises(ValueError, match="steps must be at least 1"):
        list(fedfisher_models("diagonal", models, statistics, WEIGHTS, steps=0))
