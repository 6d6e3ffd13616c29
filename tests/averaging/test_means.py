"""Means of models, against Flower's own and against hand-computed numbers."""

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.averaging import mean_metrics, weighted_mean
from gems_flwr.core.records import to_numpy, to_record


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_the_mean_equals_flowers_bit_for_bit(weights, seed):
    rng = np.random.default_rng(seed)
    models = [
        {
            "a": rng.normal(size=(3, 4)).astype(np.float32),
            "b": rng.normal(size=()),
            "c": rng.normal(size=5).astype(np.float16),
        }
        for _ in weights
    ]
    replies = [
        RecordDict({"m": to_record(m), "n": MetricRecord({"num-examples": w})})
        for m, w in zip(models, weights, strict=True)
    ]
    flowers = to_numpy(aggregate_arrayrecords(replies, "num-examples"))
    ours = weighted_mean(models, weights)
    for key in flowers:
        assert ours[key].dtype == flowers[key].dtype
        assert ours[key].tobytes() == flowers[key].tobytes()


def test_integer_arrays_stay_integers_and_are_rounded_to_the_nearest():
    """(1·2 + 3·5) / 4 = 4.25, and true/false by majority of weight: (1·1 + 3·0) / 4 rounds to 0."""
    models = [
        {"n": np.array(2, dtype=np.int64), "flag": np.array([True])},
        {"n": np.array(5, dtype=np.int64), "flag": np.array([False])},
    ]
    mean = weighted_mean(models, [1, 3])
    assert mean["n"].dtype == np.int64
    assert mean["n"] == 4
    assert mean["flag"].dtype == np.bool_
    assert not mean["flag"][0]


def test_the_models_that_went_in_are_not_changed():
    model = {"a": np.ones(3)}
    weighted_mean([model, {"a": np.zeros(3)}], [1, 1])
    assert (model["a"] == 1).all()


@pytest.mark.parametrize(
    ("models", "weights", "words"),
    [
        ([], [], "a weight for each of at least one model"),
        ([{"a": np.ones(1)}], [1, 2], "1 models and 2 weights"),
        ([{"a": np.ones(1)}], [0], "positive"),
        ([{"a": np.ones(1)}], [float("nan")], "positive"),
        ([{"a": np.ones(1)}, {"a": np.ones(1)}], [2, -1], "weights must be"),
    ],
)
def test_what_cannot_be_averaged_is_refused_with_a_reason(models, weights, words):
    with pytest.raises(ValueError, match=words):
        weighted_mean(models, weights)


def test_metrics_that_not_all_have_are_left_out():
    """Loss: (1·2 + 3·6) / 4 = 5."""
    mean = mean_metrics([{"loss": 2.0, "extra": 1.0}, {"loss": 6.0}], [1, 3])
    assert mean == {"loss": 5.0}
