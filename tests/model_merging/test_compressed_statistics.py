"""Statistics in a share of the model's bytes: how many, how exact, and never impossible."""

import numpy as np
import pytest
from helpers_merging import arrays_of, network, samples, with_labels
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.errors import OptionError
from gems_flwr.model_merging.compressed_statistics import (
    PackedStatistics,
    compression_plan,
    pack_statistics,
    unpack_statistics,
)
from gems_flwr.model_merging.layer_statistics import check_statistics
from gems_flwr.model_merging.measure import measure_statistics

WIDTHS = (20, 30, 10)


def measured(method, rows=200):
    module = network(WIDTHS)
    arrays = arrays_of(module)
    data = with_labels(samples(rows, width=20))
    return arrays, measure_statistics(method, "exact", arrays, data, model=module)


def there_and_back(method, share):
    arrays, statistics = measured(method)
    plan = compression_plan(method, arrays, share)
    packed = pack_statistics(statistics, plan)
    return arrays, statistics, packed, unpack_statistics(packed, plan)


@pytest.mark.parametrize("method", ["regmean", "kfac", "fedfisher_kfac", "fedfisher_diagonal"])
@pytest.mark.parametrize("share", [0.5, 1.0, 1.7])
def test_the_bytes_are_at_most_the_share_of_the_models_and_not_much_less(method, share):
    arrays, _, packed, _ = there_and_back(method, share)
    model = 4 * sum(array.size for array in arrays.values())
    sent = packed.columns.nbytes + packed.roots.nbytes + packed.scales.nbytes
    # Two layers' scales of a diagonal come on top.
    assert sent <= share * model + 8
    if (method, share) == ("kfac", 0.5):
        # One direction more of all four factors, with its scales, would not fit.
        assert sent > share * model - (21 + 30 + 31 + 10 + 16)


@pytest.mark.parametrize("method", ["regmean", "kfac", "fisher"])
def test_with_room_for_all_directions_only_rounding_is_lost(method):
    """Columns are off by half of 1/127 of their largest entry, the diagonal is repaired."""
    _, statistics, _, found = there_and_back(method, 10.0 if method != "fisher" else 0.5)
    for weight, kinds in statistics.items():
        for kind, array in kinds.items():
            error = np.abs(found[weight][kind] - array).max()
            assert error < 0.02 * np.abs(array).max(), (weight, kind)
            if kind != "fisher":
                assert np.allclose(np.diag(found[weight][kind]), np.diag(array), rtol=0.03)


def test_variances_arrive_whatever_the_rank_and_more_bytes_are_nearer():
    errors = []
    for share in (0.08, 0.15, 0.3):
        _, statistics, _, found = there_and_back("regmean", share)
        gram, back = statistics["1.weight"]["inputs"], found["1.weight"]["inputs"]
        assert np.allclose(np.diag(back), np.diag(gram), rtol=0.02)
        errors.append(np.linalg.norm(gram - back))
    assert errors[0] > errors[1] > errors[2]


def test_a_fisher_diagonal_keeps_its_small_entries():
    """Rounded linearly to 16 bits, what is below 1e-5 of the largest would be 0."""
    _, statistics, _, found = there_and_back("fisher", 0.5)
    for weight, kinds in statistics.items():
        true, back = kinds["fisher"], found[weight]["fisher"]
        small = (true > 1e-6 * true.max()) & (true < 1e-4 * true.max())
        assert np.allclose(back[small], true[small], rtol=0.1)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["kfac", "fisher"]))
@settings(max_examples=30, deadline=None)
def test_whatever_codes_a_node_sends_are_the_moments_of_some_data(seed, method):
    arrays = arrays_of(network(WIDTHS))
    plan = compression_plan(method, arrays, 0.5)
    rng = np.random.default_rng(seed)
    columns, roots, scales = plan.sizes
    packed = PackedStatistics(
        rng.integers(-128, 128, columns).astype(np.int8),
        rng.integers(0, 2**plan.bits, roots).astype(f"uint{plan.bits}"),
        (10.0 ** rng.uniform(-30, 3, scales)).astype(np.float32),
    )
    check_statistics(unpack_statistics(packed, plan), method, arrays)


@pytest.mark.parametrize(("method", "share"), [("kfac", 0.01), ("fisher", 0.2)])
def test_a_share_that_cannot_do_is_refused_with_what_could(method, share):
    with pytest.raises(OptionError, match="share of"):
        compression_plan(method, arrays_of(network(WIDTHS)), share)
