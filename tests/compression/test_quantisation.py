"""Blocks of numbers as small whole numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.compression.quantisation import (
    BLOCK,
    blocks_of,
    byte_count,
    dequantise,
    from_bytes,
    quantise,
    scale_values,
    to_bytes,
)


def heavy_tailed(size, seed, magnitude):
    draws = np.random.default_rng(seed).standard_t(2, size=size)
    return np.clip(draws * 10.0**magnitude, -1e38, 1e38).astype(np.float32)


VECTORS = st.builds(
    heavy_tailed, st.integers(0, 3 * BLOCK + 7), st.integers(0, 2**32 - 1), st.floats(-37, 37)
)


@settings(deadline=None, max_examples=60)
@given(values=VECTORS, bits=st.sampled_from([2, 4, 8]))
def test_no_number_is_off_by_more_than_half_a_scale(values, bits):
    """And a scale is at most 1 + 2^-7 times the block's largest number over the last code.

    A scale keeps 8 bits of its mantissa, the first of them 1, and is rounded up.
    """
    codes, scales = quantise(values, bits)
    most = 2 ** (bits - 1) - 1
    assert len(scales) == blocks_of(len(values))
    assert np.abs(codes.astype(int)).max(initial=0) <= most
    steps = scale_values(scales).astype(np.float64)
    each = np.repeat(steps, BLOCK)[: len(values)]
    error = np.abs(dequantise(codes, scales).astype(np.float64) - values)
    assert (error <= each * (0.5 + 1e-5) + 1e-37).all()
    for number, step in enumerate(steps):
        largest = np.abs(values[number * BLOCK : (number + 1) * BLOCK].astype(np.float64)).max()
        assert step <= largest / most * (1 + 2**-7) + 1e-38


@settings(deadline=None)
@given(
    codes=st.lists(st.integers(-1, 1), max_size=33).map(lambda c: np.array(c, np.int8)),
    bits=st.sampled_from([2, 4, 8]),
)
def test_codes_come_back_from_as_many_bytes_as_said(codes, bits):
    data = to_bytes(codes, bits)
    assert len(data) == byte_count(len(codes), bits)
    assert from_bytes(data, len(codes), bits).tolist() == codes.tolist()


def test_a_block_of_zeros_stays_zero_and_does_not_touch_its_neighbour():
    values = np.concatenate([np.zeros(BLOCK), np.full(3, 5.0)]).astype(np.float32)
    codes, scales = quantise(values, 8)
    decoded = dequantise(codes, scales)
    assert not decoded[:BLOCK].any()
    assert decoded[BLOCK:] == pytest.approx(5.0, rel=0.01)


def test_rounding_is_the_same_every_time():
    """No random numbers: the same numbers give the same bytes, in every process."""
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    first, second = quantise(values, 4), quantise(values.copy(), 4)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
