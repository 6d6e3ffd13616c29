"""Numbers in a few bits, and models as differences to what the receiver has."""

import dataclasses
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.compression import (
    BLOCK,
    LONG_VECTOR,
    PackedModel,
    _from_bytes,
    _scale_values,
    _to_bytes,
    check_compressible,
    check_form,
    decode,
    decode_whole,
    dequantise,
    encode,
    encode_average,
    encode_whole,
    halved,
    quantise,
)
from gems_flwr.errors import BadReplyError, OptionError

FORMS = ["int8", "int4"]


# --- blocks of numbers as small whole numbers ---------------------------------------------------


def heavy_tailed(size, seed, magnitude):
    draws = np.random.default_rng(seed).standard_t(2, size=size)
    return np.clip(draws * 10.0**magnitude, -1e38, 1e38).astype(np.float32)


VECTORS = st.builds(
    heavy_tailed, st.integers(0, 3 * BLOCK + 7), st.integers(0, 2**32 - 1), st.floats(-37, 37)
)


@settings(deadline=None, max_examples=60)
@given(values=VECTORS, bits=st.sampled_from([4, 8]))
def test_no_number_is_off_by_more_than_half_a_scale(values, bits):
    """And a scale is at most 1 + 2^-7 times the block's largest number over the last code.

    A scale keeps 8 bits of its mantissa, the first of them 1, and is rounded up. Codes come back
    from as many bytes as their bits say, and the same numbers give the same bytes every time.
    """
    codes, scales = quantise(values, bits)
    again = quantise(values.copy(), bits)
    assert np.array_equal(codes, again[0])
    assert np.array_equal(scales, again[1])
    data = _to_bytes(codes, bits)
    assert len(data) == -(-len(codes) * bits // 8)
    assert _from_bytes(data, len(codes), bits).tolist() == codes.tolist()
    most = 2 ** (bits - 1) - 1
    assert np.abs(codes.astype(int)).max(initial=0) <= most
    steps = _scale_values(scales).astype(np.float64)
    each = np.repeat(steps, BLOCK)[: len(values)]
    error = np.abs(dequantise(codes, scales).astype(np.float64) - values)
    assert (error <= each * (0.5 + 1e-5) + 2e-36).all()
    for number, step in enumerate(steps):
        largest = np.abs(values[number * BLOCK : (number + 1) * BLOCK].astype(np.float64)).max()
        assert step <= largest / most * (1 + 2**-7) + 1e-38


def test_a_block_of_zeros_stays_zero_and_does_not_touch_its_neighbour():
    values = np.concatenate([np.zeros(BLOCK), np.full(3, 5.0)]).astype(np.float32)
    codes, scales = quantise(values, 8)
    decoded = dequantise(codes, scales)
    assert not decoded[:BLOCK].any()
    assert decoded[BLOCK:] == pytest.approx(5.0, rel=0.01)


# --- differences --------------------------------------------------------------------------------


def some_model(seed=0, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "weight": (scale * rng.normal(size=(20, 31))).astype(dtype),
        "kernel": (scale * rng.normal(size=(4, 3, 3, 3))).astype(dtype),
        "bias": (scale * rng.normal(size=20)).astype(dtype),
        "running_var": np.full(20, 1e-4, dtype),
        "seen": np.array(seed, np.int64),
    }


def moved(model, seed, step=0.01):
    rng = np.random.default_rng(seed)
    return {
        name: (array + step * rng.normal(size=array.shape)).astype(array.dtype)
        if array.dtype.kind == "f"
        else array + 1
        for name, array in model.items()
    }


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    form=st.sampled_from(FORMS),
    dtype=st.sampled_from([np.float32, np.float64]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_the_receiver_has_exactly_what_the_sender_thinks(seed, form, dtype, scale):
    base = some_model(seed, scale, dtype)
    model = moved(base, seed + 1, 0.01 * scale)
    encoded = encode(model, base, form)
    decoded = decode(encoded.packed, base, form)
    for name, array in model.items():
        assert np.array_equal(decoded[name], encoded.decoded[name])
        assert (decoded[name].dtype, decoded[name].shape) == (array.dtype, array.shape)
        # A bias, a variance that rounding could make negative and a counter arrive as they are.
        if name in ("bias", "running_var", "seen"):
            assert np.array_equal(decoded[name], array)


@pytest.mark.parametrize("form", FORMS)
def test_with_error_feedback_the_sum_of_messages_is_off_by_one_message(form):
    """Σ said = Σ meant - left over, however many messages there were."""
    base = some_model()
    meant = np.zeros_like(base["weight"], dtype=np.float64)
    said, left_over, largest = meant.copy(), {}, 0.0
    for turn in range(50):
        model = moved(base, turn, 0.01)
        encoded = encode(model, base, form, left_over)
        left_over = encoded.left_over
        meant += model["weight"].astype(np.float64) - base["weight"]
        said += encoded.decoded["weight"].astype(np.float64) - base["weight"]
        largest = max(largest, float(np.abs(encoded.left_over["weight"]).max()))
    assert np.abs(meant - said).max() == pytest.approx(np.abs(left_over["weight"]).max(), rel=1e-3)
    # Without feedback fifty messages would be off by about seven times as much as one.
    assert np.abs(meant - said).max() <= largest


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 100), form=st.sampled_from(FORMS), nodes=st.integers(1, 9))
def test_averages_leave_the_sum_of_models_what_it_was_but_for_what_is_kept(seed, form, nodes):
    """Definition 2 of Kamp et al.: k of m nodes get the average; Σ models + m · kept stays."""
    rng = np.random.default_rng(seed)
    reference = {"w": rng.normal(size=(8, 40)).astype(np.float32)}
    models = [
        {"w": reference["w"] + rng.normal(size=(8, 40)).astype(np.float32)} for _ in range(nodes)
    ]
    left_over = {}
    before = np.sum([m["w"] for m in models], axis=0, dtype=np.float64)
    for _ in range(5):
        k = int(rng.integers(1, nodes + 1))
        chosen = rng.choice(nodes, size=k, replace=False)
        average = {"w": np.mean([models[i]["w"] for i in chosen], axis=0, dtype=np.float64)}
        encoded = encode_average(
            {"w": average["w"].astype(np.float32)}, reference, form, left_over, k / nodes
        )
        left_over = encoded.left_over
        for i in chosen:
            models[i] = dict(encoded.decoded)
    after = np.sum([m["w"] for m in models], axis=0, dtype=np.float64)
    assert after + nodes * left_over["w"] == pytest.approx(before, abs=2e-5 * nodes)


def test_what_does_not_vary_costs_little():
    base, model = ({"w": np.zeros((200, 256), np.float32)} for _ in range(2))
    model["w"][:, 100:110] = 1.0
    packed = encode(model, base, "int8").packed
    assert len(packed.codes) + len(packed.scales) < 0.03 * model["w"].nbytes


# --- whole models -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_whole_model_arrives_as_it_is(dtype):
    model = some_model(dtype=dtype)
    model["empty"] = np.zeros((0, 3), dtype)
    decoded = decode_whole(encode_whole(model))
    for name, array in model.items():
        assert np.array_equal(decoded[name], array)
        assert decoded[name].dtype == array.dtype


def test_a_halved_model_takes_half_of_the_bytes_and_keeps_what_is_too_large():
    model = {"w": np.random.default_rng(0).normal(size=(100, 100)).astype(np.float32)}
    model["large"] = np.full((3, 3), 1e6, np.float32)
    half = halved(model)
    assert len(encode_whole(half).exact) <= 0.52 * model["w"].nbytes
    assert np.array_equal(half["large"], model["large"])
    assert np.abs(half["w"] - model["w"]).max() <= 2**-11 * np.abs(model["w"]).max()


# --- what is refused ----------------------------------------------------------------------------


def test_forms_and_models_that_cannot_be_are_refused_with_what_can():
    with pytest.raises(OptionError, match=r"float32.*int4.*got 'int3'"):
        check_form("int3")
    with pytest.raises(OptionError, match="nothing to compress"):
        check_compressible({"b": np.zeros(10, np.float32)}, "int8")
    check_compressible({"b": np.zeros(10, np.float32)}, "float32")
    check_compressible({"b": np.zeros(LONG_VECTOR, np.float32)}, "int8")


def deflated(data):
    compress = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compress.compress(data) + compress.flush()


def test_bytes_that_are_no_such_model_are_refused():
    base = some_model()
    packed = encode(moved(base, 1), base, "int8").packed
    count = base["weight"].size + base["kernel"].size
    infinite = np.full(len(packed.scales) // 2, 0x7F80, "<u2").tobytes()
    bad = {
        "cannot be read": dataclasses.replace(packed, codes=b"\xff\xff\xff"),
        "do not fit": dataclasses.replace(packed, codes=deflated(bytes(count - 1))),
        "got more": dataclasses.replace(packed, codes=deflated(bytes(10**7))),
        "do not fit: ": dataclasses.replace(packed, codes=packed.codes[:-4]),
        "too short": dataclasses.replace(packed, codes=b""),
        "bytes of scales": dataclasses.replace(packed, scales=packed.scales + b"\0\0"),
        "NaN or infinity": dataclasses.replace(packed, scales=infinite),
        "exact of a packed model": dataclasses.replace(packed, exact=b""),
    }
    for words, each in bad.items():
        with pytest.raises(BadReplyError, match=words):
            decode(each, base, "int8")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, 3e38])
@pytest.mark.filterwarnings("error")
def test_a_model_that_is_not_finite_is_refused_and_leaves_nothing_over(form, value):
    """Training that diverged on a node: what it sends later must not suffer from it."""
    base = some_model()
    spoilt = moved(base, 1)
    spoilt["weight"][3, 4] = value
    encoded = encode(spoilt, base, form)
    assert all(np.isfinite(array).all() for array in encoded.left_over.values())
    if np.isfinite(value):
        decode(encoded.packed, base, form)
        return
    with pytest.raises(BadReplyError, match="NaN or infinity"):
        decode(encoded.packed, base, form)


def test_a_bomb_is_not_unpacked():
    """A hundred megabytes of zeros in a hundred kilobytes: never more than wanted is written."""
    base = some_model()
    bomb = PackedModel(codes=deflated(bytes(10**8)), scales=b"", exact=b"")
    tracemalloc.start()
    with pytest.raises(BadReplyError):
        decode(bomb, base, "int8")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6
