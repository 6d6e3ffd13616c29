"""Medians of models: against scipy and by their defining properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gems_flwr.averaging import combine, coordinate_median, geometric_median


def models(points):
    return [{"w": np.array(p, float), "n": np.array(i)} for i, p in enumerate(points)]


def test_the_coordinate_median_is_taken_number_by_number():
    """Columns (0, 1, 9) and (5, 0, 1): medians 1 and 1. Counters stay the first model's."""
    median = coordinate_median(models([(0, 5), (1, 0), (9, 1)]))
    assert median["w"].tolist() == [1.0, 1.0]
    assert median["n"] == 0


def test_the_geometric_median_is_what_scipy_finds():
    rng = np.random.default_rng(0)
    points, weights = rng.normal(size=(7, 3)), rng.uniform(0.5, 2, 7)
    best = minimize(lambda z: weights @ np.linalg.norm(points - z, axis=1), np.zeros(3), tol=1e-12)
    found = geometric_median(models(points), weights)["w"]
    assert found == pytest.approx(best.x, abs=1e-5)


@settings(deadline=None)
@given(st.floats(1e3, 1e9))
def test_a_minority_of_bad_models_cannot_move_a_median_far(size):
    """Two of five models are anywhere; the honest three lie within 0.1 of the origin."""
    points = [(0.1, 0), (0, 0.1), (-0.1, 0), (size, size), (size, -size)]
    for kind in ("median", "geometric_median"):
        assert np.linalg.norm(combine(kind, models(points), [1.0] * 5)["w"]) < 1
    assert np.linalg.norm(combine("mean", models(points), [1.0] * 5)["w"]) > 100


@pytest.mark.parametrize("kind", ["mean", "median", "geometric_median"])
def test_every_mean_of_equal_models_is_that_model_in_its_own_precision(kind):
    model = {"w": np.array([1.5, -2.0], np.float32), "n": np.array(3)}
    found = combine(kind, [model, model, model], [1.0, 2.0, 3.0])
    assert found["w"].tolist() == [1.5, -2.0]
    assert found["w"].dtype == np.float32
    assert found["n"] == 3
