"""What merging computes, against independent ways of computing it."""

import numpy as np
import pytest
from helpers_merging import arrays_of, network, samples, with_labels
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.averaging.means import weighted_mean
from gems_flwr.model_merging.fisher_mean import merge_by_fisher
from gems_flwr.model_merging.kfac import merge_by_kfac, solve_kfac
from gems_flwr.model_merging.layer_statistics import check_statistics
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.model_merging.merge_models import merge_models
from gems_flwr.model_merging.regmean import merge_by_regmean, solve_regmean
from gems_flwr.wire.requests import StatisticsRequest

METHODS = ["regmean", "fisher", "kfac", "matching"]


def measured(method, module, inputs):
    request = StatisticsRequest(method)
    arrays = arrays_of(module)
    return arrays, measure_statistics(
        request.method, request.labels, arrays, with_labels(inputs), model=module
    )


def nodes(method, count=3, same_model=False):
    pairs = [
        measured(method, network(seed=0 if same_model else k), samples(30, seed=10 + k))
        for k in range(count)
    ]
    return [a for a, _ in pairs], [s for _, s in pairs]


def moment(rng, size, rank):
    x = rng.normal(size=(rank, size))
    return x.T @ x / rank


# --- RegMean ----------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_regmean_of_least_squares_solutions_is_that_of_the_stacked_problem(seed):
    """G_k W_k = X_kᵀY_k, so the sum over nodes has the normal equations of all data."""
    rng = np.random.default_rng(seed)
    data = [(rng.normal(size=(n, 4)), rng.normal(size=(n, 3))) for n in (7, 12, 30)]
    rows = [np.linalg.lstsq(x, y, rcond=None)[0].T for x, y in data]
    merged = solve_regmean(
        rows, [x.T @ x / len(x) for x, _ in data], [len(x) for x, _ in data], shrink=1.0, ridge=0.0
    )
    stacked = np.linalg.lstsq(*(np.vstack(part) for part in zip(*data, strict=True)), rcond=None)
    assert np.allclose(merged, stacked[0].T, atol=1e-8)


def test_regmean_without_off_diagonals_weighs_every_input_by_its_mean_square():
    rows = [np.array([[1.0, 1.0]]), np.array([[3.0, 3.0]])]
    grams = [np.array([[3.0, 9.0], [9.0, 30.0]]), np.array([[1.0, 0.0], [0.0, 30.0]])]
    merged = solve_regmean(rows, grams, [1, 1], shrink=0.0, ridge=0.0)
    assert merged == pytest.approx(np.array([[(3 * 1 + 1 * 3) / 4, 2.0]]))


def test_regmean_gives_an_input_that_nobody_saw_its_mean_weight():
    rows = [np.array([[1.0, 5.0]]), np.array([[3.0, 9.0]])]
    grams = [np.diag([2.0, 0.0]), np.diag([6.0, 0.0])]
    merged = solve_regmean(rows, grams, [1, 3])
    assert merged[0, 1] == pytest.approx((5 + 3 * 9) / 4)
    assert merged[0, 0] == pytest.approx((2 * 1 + 3 * 6 * 3) / 20, rel=1e-4)
    with pytest.raises(ValueError, match="above 0"):
        solve_regmean(rows, grams, [1, 3], ridge=0.0)


# --- Fisher -----------------------------------------------------------------------------------


def test_equal_fisher_diagonals_give_the_plain_mean():
    models, _ = nodes("fisher")
    _, statistics = measured("fisher", network(), samples(30))
    merged = merge_by_fisher(models, [statistics] * 3, [1, 2, 3])
    mean = weighted_mean(models, [1, 2, 3])
    assert all(np.allclose(merged[key], mean[key], atol=1e-6) for key in mean)


def test_a_weight_is_that_of_the_only_node_that_depends_on_it():
    models, statistics = nodes("fisher", count=2)
    sure = {w: {"fisher": np.full_like(s["fisher"], 1e6)} for w, s in statistics[0].items()}
    unsure = {w: {"fisher": np.zeros_like(s["fisher"])} for w, s in statistics[1].items()}
    merged = merge_by_fisher(models, [sure, unsure], [1, 1])
    assert all(np.allclose(merged[key], models[0][key], atol=1e-6) for key in merged)


# --- K-FAC ------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_the_kfac_solution_solves_the_dense_kronecker_system(seed):
    """With row-major vec, vec(B W A) = (B ⊗ A) vec(W) for symmetric A."""
    rng = np.random.default_rng(seed)
    width, size, weights, damping = 3, 4, np.array([1.0, 2.0, 5.0]), 1e-3
    rows = [rng.normal(size=(width, size)) for _ in weights]
    inputs = [moment(rng, size, 3) for _ in weights]
    gradients = [moment(rng, width, 2) for _ in weights]
    damped = [
        [m + damping * np.trace(m) / len(m) * np.eye(len(m)) for m in moments]
        for moments in (inputs, gradients)
    ]
    blocks = [n * np.kron(b, a) for n, a, b in zip(weights, *damped, strict=True)]
    wanted = sum(block @ row.ravel() for block, row in zip(blocks, rows, strict=True))
    dense = np.linalg.solve(sum(blocks), wanted)
    solved = solve_kfac(rows, inputs, gradients, weights, damping=damping, tolerance=1e-12)
    assert np.allclose(solved.rows.ravel(), dense, atol=1e-6)
    assert solved.residual < 1e-10


def test_kfac_with_equal_output_factors_is_regmean():
    """B cancels: what is left are RegMean's normal equations."""
    rng = np.random.default_rng(3)
    rows = [rng.normal(size=(3, 4)) for _ in range(3)]
    inputs = [moment(rng, 4, 9) for _ in rows]
    solved = solve_kfac(rows, inputs, [np.eye(3)] * 3, [1, 2, 3], damping=1e-9, tolerance=1e-12)
    expected = solve_regmean(rows, inputs, [1, 2, 3], shrink=1.0, ridge=1e-9)
    assert np.allclose(solved.rows, expected, atol=1e-6)


def test_an_iteration_that_is_cut_short_says_how_far_it_came():
    rng = np.random.default_rng(4)
    rows = [rng.normal(size=(3, 8)) for _ in range(3)]
    factors = [[moment(rng, size, 4) for _ in rows] for size in (8, 3)]
    short = solve_kfac(rows, *factors, [1, 1, 1], damping=1e-6, max_steps=2)
    assert short.steps == 2
    assert short.residual > 1e-3


# --- all --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_identical_models_stay_as_they_are_whatever_their_data(method):
    models, statistics = nodes(method, same_model=True)
    merged = merge_models(method, models, statistics, [1, 20, 3])
    for key, array in models[0].items():
        assert np.allclose(merged.arrays[key], array, atol=1e-6)
        assert merged.arrays[key].dtype == array.dtype


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac"])
def test_the_order_of_nodes_and_the_unit_of_weights_do_not_matter(method):
    models, statistics = nodes(method)
    merged = merge_models(method, models, statistics, [1, 2, 3]).arrays
    turned = merge_models(method, models[::-1], statistics[::-1], [30, 20, 10]).arrays
    assert all(np.allclose(merged[key], turned[key], atol=1e-4) for key in merged)


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac"])
def test_a_merged_model_is_not_just_the_mean(method):
    models, statistics = nodes(method)
    merged = merge_models(method, models, statistics, [1, 2, 3]).arrays
    mean = weighted_mean(models, [1, 2, 3])
    assert max(np.abs(merged[key] - mean[key]).max() for key in mean) > 0.01


@pytest.mark.parametrize(
    ("merge", "options", "match"),
    [
        (merge_by_regmean, {"shrink": 1.1}, r"shrink must be in \[0, 1\], got 1.1"),
        (merge_by_regmean, {"ridge": -1.0}, "ridge must be at least 0, got -1"),
        (merge_by_fisher, {"floor": 0.0}, "floor must be above 0, got 0"),
        (merge_by_kfac, {"damping": 0.0}, "damping must be above 0, got 0"),
    ],
)
def test_options_out_of_range_are_named(merge, options, match):
    method = merge.__name__.removeprefix("merge_by_")
    models, statistics = nodes(method)
    with pytest.raises(ValueError, match=match):
        merge(models, statistics, [1, 1, 1], **options)


@pytest.mark.parametrize("weights", [[1, 1], [1, 0, 1], [1, float("inf"), 1]])
def test_weights_that_are_none_are_refused(weights):
    models, statistics = nodes("fisher")
    with pytest.raises(ValueError, match="weight"):
        merge_by_fisher(models, statistics, weights)


def negative_by_rounding(size):
    """A moment that passes the check, so large that the ridge does not make up for the minus.

    Two inputs go together more than fully: their block [[1, 1 + e], [1 + e, 1]] has an eigenvalue
    of -e, and 1e-6 of the trace is forgiven as rounding.
    """
    moment = np.eye(size)
    moment[-1, -2] = moment[-2, -1] = 1 + 0.9e-6 * size
    return (1e6 * moment).astype(np.float32)


def test_moments_that_are_negative_by_rounding_still_give_a_finite_layer():
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(2, 5)) for _ in range(2)]
    grams = [np.eye(5, dtype=np.float32), negative_by_rounding(5)]
    arrays = {"weight": np.zeros((2, 5), np.float32)}
    check_statistics({"weight": {"inputs": grams[1]}}, "regmean", arrays)
    merged = solve_regmean(rows, grams, [1, 1], shrink=1.0)
    assert np.isfinite(merged).all()
    # Along the three good inputs the second node, a million times as sure, has its way.
    np.testing.assert_allclose(merged[:, :3], rows[1][:, :3], atol=1e-4)
    solution = solve_kfac(rows, grams, [np.eye(2), negative_by_rounding(2)], [1, 1], damping=1e-9)
    assert np.isfinite(solution.rows).all()
    assert np.isfinite(solution.residual)
