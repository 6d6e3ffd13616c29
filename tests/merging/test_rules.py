"""What merging computes, against independent ways of computing it."""

import numpy as np
import pytest
from helpers_merging import arrays_of, network, samples, with_labels
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.averaging import weighted_mean
from gems_flwr.merging import NEEDED, check_statistics, measure_statistics, merge_models

METHODS = list(NEEDED)
WIDTHS, WEIGHTS = (5, 4, 3), [1, 2, 3]


def measured(method, module, inputs):
    arrays = arrays_of(module)
    return arrays, measure_statistics(NEEDED[method], arrays, with_labels(inputs), model=module)


def nodes(method, same_model=False):
    pairs = [
        measured(method, network(WIDTHS, 0 if same_model else k), samples(30, seed=10 + k))
        for k in range(3)
    ]
    return [a for a, _ in pairs], [s for _, s in pairs]


def one_layer(rows, grams, weights, **options):
    """Merge single layers without bias by RegMean."""
    models = [{"weight": row} for row in rows]
    statistics = [{"weight": gram} for gram in grams]
    return merge_models("regmean", models, statistics, weights, **options)["weight"]


# --- RegMean ----------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_regmean_of_least_squares_solutions_is_that_of_the_stacked_problem(seed):
    """G_k W_k = X_kᵀY_k, so the sum over nodes has the normal equations of all data."""
    rng = np.random.default_rng(seed)
    data = [(rng.normal(size=(n, 4)), rng.normal(size=(n, 3))) for n in (7, 12, 30)]
    rows = [np.linalg.lstsq(x, y, rcond=None)[0].T for x, y in data]
    grams = [x.T @ x / len(x) for x, _ in data]
    merged = one_layer(rows, grams, [len(x) for x, _ in data], shrink=1.0)
    stacked = np.linalg.lstsq(*(np.vstack(part) for part in zip(*data, strict=True)), rcond=None)
    # But for the ridge of a millionth.
    assert np.allclose(merged, stacked[0].T, atol=1e-4)


def test_regmean_without_off_diagonals_weighs_every_input_by_its_mean_square():
    rows = [np.array([[1.0, 1.0]]), np.array([[3.0, 3.0]])]
    grams = [np.array([[3.0, 9.0], [9.0, 30.0]]), np.array([[1.0, 0.0], [0.0, 30.0]])]
    merged = one_layer(rows, grams, [1, 1], shrink=0.0)
    assert merged == pytest.approx(np.array([[(3 * 1 + 1 * 3) / 4, 2.0]]), rel=1e-4)


def test_regmean_gives_an_input_that_no_node_saw_its_mean_weight():
    rows = [np.array([[1.0, 5.0]]), np.array([[3.0, 9.0]])]
    grams = [np.diag([2.0, 0.0]), np.diag([6.0, 0.0])]
    merged = one_layer(rows, grams, [1, 3])
    assert merged[0, 1] == pytest.approx((5 + 3 * 9) / 4)
    assert merged[0, 0] == pytest.approx((2 * 1 + 3 * 6 * 3) / 20, rel=1e-4)


def test_moments_that_are_negative_by_rounding_still_give_a_finite_layer():
    """Two inputs go together more than fully, by as much as is forgiven as rounding.

    Their block [[1, 1 + e], [1 + e, 1]] has an eigenvalue of -e; the moment is so large that the
    ridge does not make up for it. Along the three good inputs the second node, a million times as
    sure, has its way.
    """
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(2, 5)) for _ in range(2)]
    moment = np.eye(5)
    moment[-1, -2] = moment[-2, -1] = 1 + 0.9e-6 * 5
    grams = [np.eye(5, dtype=np.float32), (1e6 * moment).astype(np.float32)]
    check_statistics("inputs", {"weight": grams[1]})
    merged = one_layer(rows, grams, [1, 1], shrink=1.0)
    assert np.isfinite(merged).all()
    np.testing.assert_allclose(merged[:, :3], rows[1][:, :3], atol=1e-4)


# --- Fisher -----------------------------------------------------------------------------------


def test_equal_fisher_diagonals_give_the_plain_mean_and_weights_must_be_above_0():
    models, _ = nodes("fisher")
    _, statistics = measured("fisher", network(WIDTHS), samples(30))
    merged = merge_models("fisher", models, [statistics] * 3, WEIGHTS)
    mean = weighted_mean(models, WEIGHTS)
    assert all(np.allclose(merged[key], mean[key], atol=1e-6) for key in mean)
    with pytest.raises(ValueError, match="weights must be above 0 and finite"):
        merge_models("fisher", models, [statistics] * 3, [1, 0, 1])


def test_a_weight_is_that_of_the_only_node_that_depends_on_it():
    models, statistics = nodes("fisher")
    sure = {w: np.full_like(s, 1e6) for w, s in statistics[0].items()}
    unsure = {w: np.zeros_like(s) for w, s in statistics[1].items()}
    merged = merge_models("fisher", models[:2], [sure, unsure], [1, 1])
    assert all(np.allclose(merged[key], models[0][key], atol=1e-6) for key in merged)


# --- all --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_identical_models_stay_as_they_are_and_others_are_not_just_averaged(method):
    models, statistics = nodes(method, same_model=True)
    merged = merge_models(method, models, statistics, [1, 20, 3])
    for key, array in models[0].items():
        assert np.allclose(merged[key], array, atol=1e-6)
        assert merged[key].dtype == array.dtype
    models, statistics = nodes(method)
    merged = merge_models(method, models, statistics, WEIGHTS)
    mean = weighted_mean(models, WEIGHTS)
    assert max(np.abs(merged[key] - mean[key]).max() for key in mean) > 0.01
    turned = merge_models(method, models[::-1], statistics[::-1], [30, 20, 10])
    assert all(np.allclose(merged[key], turned[key], atol=1e-4) for key in merged)
