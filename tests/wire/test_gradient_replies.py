"""Gradients and losses over the wire: rounding that is known, and nothing else that passes."""

import math
import re
import zlib

import numpy as np
import pytest
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gems_flwr.errors import BadReplyError, ModelError, OptionError
from gems_flwr.moments.loss_sums import LossSums
from gems_flwr.wire.gradient_replies import (
    pack_gradient_reply,
    pack_losses_reply,
    unpack_gradient_reply,
    unpack_losses_reply,
)
from gems_flwr.wire.gradient_requests import GradientRequest, LossesRequest, take_beside

SHAPE = (3, 5)
# Directions as a server would name them, in single precision.
BASIS = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 2)))[0].T.astype(np.float32)
BASIS = BASIS.astype(np.float64)


def some_sums(gradient=None):
    rng = np.random.default_rng(0)
    chances = rng.dirichlet(np.ones(3), size=8)
    matrix = np.diag(chances.sum(axis=0)) - chances.T @ chances
    curvature = np.stack([matrix, np.zeros((3, 3)), matrix])
    gradient = rng.normal(size=SHAPE) if gradient is None else gradient
    return LossSums(16, 16.0, 3.5, gradient, curvature)


def round_trip(sums, request):
    content = pack_gradient_reply(sums, request, BASIS, name="a")
    return unpack_gradient_reply(content, request, SHAPE[0], BASIS)


@given(
    arrays(np.float64, SHAPE, elements=st.floats(-1e6, 1e6, allow_subnormal=False)),
    st.sampled_from(["int8", "float16", "float32"]),
)
def test_no_entry_is_farther_off_than_is_said(gradient, dtype):
    gradient[np.abs(gradient) < 1e-30] = 0  # below what single precision has
    reply = round_trip(some_sums(gradient), GradientRequest(dtype=dtype))
    assert (np.abs(reply.gradient - gradient) <= reply.errors[:, None]).all()


@pytest.mark.parametrize("by_class", [True, False])
def test_a_reply_says_what_was_packed(by_class):
    sums, request = some_sums(), GradientRequest(by_class=by_class)
    if not by_class:
        total = sums.curvature.sum(axis=0, keepdims=True)
        sums = LossSums(sums.count, sums.weight, sums.loss, sums.gradient, total)
    reply = round_trip(sums, request)
    assert (reply.count, reply.weight, reply.loss) == (16, 16.0, 3.5)
    assert reply.curvature == pytest.approx(sums.curvature, rel=1e-3, abs=1e-5)
    half = reply.times(0.5)
    assert (half.loss, half.weight) == (1.75, 8.0)
    assert half.gradient == pytest.approx(reply.gradient / 2)


def spoiled(key, value, record="gradient"):
    content = pack_gradient_reply(some_sums(), GradientRequest(), BASIS, name="a")
    content[record][key] = value
    return content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (RecordDict(), "expected a ConfigRecord 'gradient'"),
        (spoiled("codes", b"no zip"), "'codes' cannot be inflated"),
        (spoiled("codes", zlib.compress(bytes(10**7))), "'codes' must have 15 bytes"),
        (spoiled("codes", zlib.compress(bytes(14))), "'codes' must have 15 bytes, got 14"),
        (spoiled("codes", zlib.compress(b"\x80" * 15)), "'codes' must be within their scales"),
        (spoiled("codes", 3), "'codes' must be bytes"),
        (spoiled("scales", np.full(3, np.nan, "<f4").tobytes()), "'scales' holds NaN or infinity"),
        (spoiled("scales", np.full(3, -1, "<f4").tobytes()), "'scales' must be from 0"),
        (spoiled("scales", np.full(3, 1e30, "<f4").tobytes()), "'scales' must be from 0"),
        (spoiled("curvature", np.full(12, 9, "<f2").tobytes()), "'curvature' must be from -1 to 1"),
        (spoiled("curvature", b""), "'curvature' must have 24 bytes"),
        (spoiled("along", np.full(6, np.inf, "<f2").tobytes()), "'along' holds NaN or infinity"),
        (spoiled("along", b"12"), "'along' must have 12 bytes, got 2"),
        (spoiled("classes", [0, 7]), "'classes' must be classes of the task"),
        (spoiled("classes", [0, 0]), "'classes' must be classes of the task"),
        (spoiled("loss-sum", math.nan, "metrics"), "'loss-sum' must be a number from 0"),
        (spoiled("loss-sum", -1.0, "metrics"), "'loss-sum' must be a number from 0"),
        (spoiled("num-examples", 0, "metrics"), "'num-examples' must be a number from 1"),
        (spoiled("weight-sum", math.inf, "metrics"), "'weight-sum' must be a number"),
    ],
)
def test_a_bad_gradient_is_refused_with_its_key(content, reason):
    with pytest.raises(BadReplyError, match=re.escape(reason)):
        unpack_gradient_reply(content, GradientRequest(), SHAPE[0], BASIS)


def test_what_lies_along_the_directions_is_told_more_exactly():
    """A thousand times larger than the rest, it does not make the rest coarser."""
    rng = np.random.default_rng(2)
    rest = rng.normal(size=SHAPE)
    rest -= rest @ BASIS.T @ BASIS
    large = 1000 * rng.normal(size=(3, 2)) @ BASIS
    found = round_trip(some_sums(large + rest), GradientRequest())
    alone = round_trip(some_sums(rest), GradientRequest())
    assert (found.errors < 3 * alone.errors + 0.01).all()
    assert (found.errors < 0.02).all()


def test_losses_are_as_many_as_points_and_numbers():
    content = pack_losses_reply(np.array([1.0, math.inf]), name="a")
    losses = unpack_losses_reply(content, 2)
    assert losses[0] == 1
    assert np.isfinite(losses).all()  # a step may well be too long for some data
    for bad in ([1.0], [1.0, math.nan], [1.0, -1.0]):
        with pytest.raises(BadReplyError, match="'loss-sums' must be"):
            unpack_losses_reply(pack_losses_reply(np.array(bad), name="a"), 2)


def test_requests_check_themselves():
    assert GradientRequest(dtype="float16").to_json() == '{"dtype": "float16"}'
    assert LossesRequest.from_json('{"class_weights": [1.0, 2.0]}').class_weights == (1.0, 2.0)
    with pytest.raises(OptionError, match="dtype must be one of"):
        GradientRequest(dtype="int4")
    with pytest.raises(OptionError, match="class_weights must be in"):
        LossesRequest(class_weights=(-1.0,))
    with pytest.raises(ModelError, match="weighs 2 classes, the layer has 3"):
        LossesRequest(class_weights=(1.0, 2.0)).weights_of(3)
    with pytest.raises(ModelError, match="without the scale"):
        take_beside(RecordDict())
