"""Means that bear liars: against scipy, by their defining properties, and who is left out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gems_flwr.averaging import RobustRule, combine, geometric_median

RULES = ["median", "trimmed_mean", "geometric_median", "multi_krum"]


def models(points):
    return [{"w": np.array(p, float), "n": np.array(i)} for i, p in enumerate(points)]


def mean_of(kind, points, weights=None, **options):
    rule = RobustRule(kind, **options)
    return combine(rule, models(points), weights or [1.0] * len(points))


def test_the_geometric_median_is_what_scipy_finds():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(7, 3))
    best = minimize(lambda z: np.linalg.norm(points - z, axis=1).sum(), np.zeros(3), tol=1e-12)
    found = geometric_median(models(points))["w"]
    assert found == pytest.approx(best.x, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(RULES),
    st.floats(1e2, 1e30),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([1.0, 1e6]),
)
def test_as_many_liars_as_a_rule_bears_cannot_move_it_far(kind, size, seed, together, weight):
    """Eleven models, as many liars as the rule names; the honest lie within 0.1 of the origin.

    Wherever the liars are, together or apart, whatever they weigh, the mean stays within 1.
    """
    liars = 3 if kind == "trimmed_mean" else 4
    rule = RobustRule(kind, liars, trim=0.3)
    assert rule.models_needed(liars) <= 11 < rule.models_needed(liars + 2)
    rng = np.random.default_rng(seed)
    points = rng.uniform(-0.05, 0.05, size=(11, 3))
    points[:liars] = size * rng.choice([-1.0, 1.0], size=(1 if together else liars, 3))
    weights = [weight if i < liars else 1.0 for i in range(11)]
    found = combine(rule, models(points), weights)
    assert np.linalg.norm(found.arrays["w"]) < 1
    assert found.applied == kind
    if kind == "multi_krum":
        assert set(range(liars)) <= set(found.left_out)
    plain = combine(RobustRule(), models(points), [1.0] * 11)
    assert together is False or np.linalg.norm(plain.arrays["w"]) > 1


def test_krum_names_whose_models_count():
    """0, 1, 2, 3 and 90 with f = 1: scores of the two nearest are 5, 2, 2, 5 and far more."""
    points = [(90,), (0,), (1,), (2,), (3,)]
    several = mean_of("multi_krum", points, liars=1)
    assert several.left_out == (0,)
    assert several.arrays["w"] == 1.5
    assert several.arrays["n"] == 2  # rounded: (1 + 2 + 3 + 4) / 4 = 2.5


def test_no_node_weighs_more_than_twice_the_median_under_a_rule():
    """Multi-Krum without liars takes the mean of all; 1,000 counts as 2: (2·4 + 0 + 0) / 4."""
    found = mean_of("multi_krum", [(4,), (0,), (0,)], [1000.0, 1.0, 1.0], liars=0)
    assert found.arrays["w"] == pytest.approx(2)
    assert RobustRule().fair([1000.0, 1.0, 1.0]) == [1000.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "options", "count"),
    [
        ("multi_krum", {}, 4),
        ("multi_krum", {"liars": 2}, 6),
        ("trimmed_mean", {"trim": 0.2}, 4),
    ],
)
def test_where_a_rule_has_too_few_models_the_median_stands_in(kind, options, count):
    """Flower's rules would go on without protection here, or skip the round."""
    points = [(float(i),) for i in range(count - 1)] + [(1e9,)]
    found = mean_of(kind, points, **options)
    assert found.applied == "median"
    assert found.checked
    assert found.arrays["w"] == np.median(points)
    enough = mean_of(kind, [*points, (0.0,)], **options)
    assert enough.applied == kind


@pytest.mark.parametrize("kind", ["none", *RULES])
@pytest.mark.parametrize("count", [1, 8])
def test_every_mean_of_equal_models_is_that_model_in_its_own_types(kind, count):
    model = {
        "w": np.array([1.5, -2.0], np.float32),
        "half": np.array([0.5], np.float16),
        "n": np.array(3),
        "mask": np.array([True, False]),
    }
    found = combine(RobustRule(kind), [model] * count, [float(i + 1) for i in range(count)]).arrays
    assert list(found) == list(model)
    for name, array in model.items():
        assert found[name].dtype == array.dtype
        # Weights that sum to 1 do so up to the rounding of half precision.
        assert found[name] == pytest.approx(array, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "mode"}, r"robust must be one of \['none'.*got 'mode'"),
        ({"liars": -1}, "liars must be a whole number of at least 0, got -1"),
        ({"liars": True}, "liars must be a whole number"),
        ({"trim": 0.0}, "trim must be above 0 and below 0.5"),
        ({"trim": 0.5}, "trim must be above 0 and below 0.5"),
    ],
)
def test_a_rule_out_of_range_is_refused_with_what_is_allowed(options, words):
    with pytest.raises(ValueError, match=words):
        RobustRule(**options)
