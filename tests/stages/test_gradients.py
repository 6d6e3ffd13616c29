"""Gradients and losses over the wire: rounding that is known, and nothing else that passes."""

import math
import re
import zlib

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gems_flwr.errors import BadReplyError, ModelError, OptionError
from gems_flwr.spaces import OutputLayer
from gems_flwr.spaces.cone import LossSums
from gems_flwr.stages import Gradient, GradientSum, Losses

SHAPE = (3, 5)
LAYER = OutputLayer("weight", "bias", 3, 4)
SCALE = np.ones(4, np.float32)
# Directions as a server would name them, in single precision.
BASIS = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 2)))[0].T.astype(np.float32)


def some_sums(gradient=None):
    rng = np.random.default_rng(0)
    chances = rng.dirichlet(np.ones(3), size=8)
    matrix = np.diag(chances.sum(axis=0)) - chances.T @ chances
    curvature = np.stack([matrix, np.zeros((3, 3)), matrix])
    gradient = rng.normal(size=SHAPE) if gradient is None else gradient
    return LossSums(16, 16.0, 3.5, gradient, curvature)


def asked(**options):
    return Gradient(SCALE, BASIS, **options, layer=LAYER)


def round_trip(sums, question):
    return question.read(question.packed(sums))


@given(arrays(np.float64, SHAPE, elements=st.floats(-1e6, 1e6, allow_subnormal=False)))
def test_no_entry_is_farther_off_than_is_reported(gradient):
    gradient[np.abs(gradient) < 1e-30] = 0  # below what single precision has
    reply = round_trip(some_sums(gradient), asked())
    assert (np.abs(reply.gradient - gradient) <= reply.errors[:, None]).all()


@pytest.mark.parametrize("by_class", [True, False])
def test_a_reply_has_what_was_packed(by_class):
    sums = some_sums()
    if not by_class:
        total = sums.curvature.sum(axis=0, keepdims=True)
        sums = LossSums(sums.count, sums.weight, sums.loss, sums.gradient, total)
    reply = round_trip(sums, asked(by_class=by_class))
    assert (reply.count, reply.weight, reply.loss) == (16, 16.0, 3.5)
    assert reply.curvature == pytest.approx(sums.curvature, rel=1e-3, abs=1e-5)
    half = reply.times(0.5)
    assert (half.loss, half.weight) == (1.75, 8.0)
    assert half.gradient == pytest.approx(reply.gradient / 2)


def test_what_lies_along_the_directions_is_sent_more_exactly():
    """A thousand times larger than the rest, it does not make the rest coarser."""
    rng, basis = np.random.default_rng(2), BASIS.astype(np.float64)
    rest = rng.normal(size=SHAPE)
    rest -= rest @ basis.T @ basis
    large = 1000 * rng.normal(size=(3, 2)) @ basis
    found = round_trip(some_sums(large + rest), asked())
    alone = round_trip(some_sums(rest), asked())
    assert (found.errors < 3 * alone.errors + 0.01).all()
    assert (found.errors < 0.02).all()


FAULTS = [
    ("codes", b"no zip", "'codes' cannot be inflated"),
    ("codes", zlib.compress(bytes(10**7)), "'codes' must have 15 bytes"),
    ("codes", zlib.compress(b"\x80" * 15), "'codes' must be from -127 to 127"),
    ("scales", np.full(3, np.nan, "<f4").tobytes(), "'scales' holds NaN or infinity"),
    ("scales", np.full(3, 1e30, "<f4").tobytes(), "'scales' must be from 0"),
    ("curvature", np.full(12, 9, "<f2").tobytes(), "'curvature' must be from -1 to 1"),
    ("along", np.full(6, np.inf, "<f2").tobytes(), "'along' holds NaN or infinity"),
    ("classes", [0, 7], "'classes' must be classes of the task"),
    ("classes", [0, 0], "'classes' must be classes of the task"),
    ("loss-sum", math.nan, "'loss-sum' must be a number from 0"),
    ("num-examples", 0, "'num-examples' must be a number from 1"),
]


@pytest.mark.parametrize(("key", "value", "reason"), FAULTS)
def test_a_bad_gradient_is_refused_with_its_key(key, value, reason):
    content = asked().packed(some_sums())
    record = next(record for record in content.values() if key in record)
    record[key] = value
    with pytest.raises(BadReplyError, match=re.escape(reason)):
        asked().read(content)


def test_losses_are_as_many_as_points_and_numbers():
    question = Losses(SCALE, np.zeros(SHAPE), np.zeros((2, 2)), layer=LAYER)

    def read(losses):
        return question.read(RecordDict({"metrics": MetricRecord({"loss-sums": losses})}))

    losses = read([1.0, math.inf])
    assert losses[0] == 1
    assert np.isfinite(losses).all()  # a step may well be too long for some data
    for bad in ([1.0], [1.0, math.nan], [1.0, -1.0]):
        with pytest.raises(BadReplyError, match="'loss-sums' must be"):
            read(bad)


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: asked(class_weights=(-1.0,)), OptionError, "class_weights must be in"),
        (lambda: Gradient(SCALE * np.nan, BASIS), ModelError, "scale must be finite"),
        (lambda: Gradient(SCALE * 0, BASIS), ModelError, "one number above 0 for each"),
        (lambda: Gradient(SCALE, BASIS[:, :3]), ModelError, "a basis of shape"),
        (lambda: GradientSum(SCALE, SCALE[:2]), ModelError, "a center of shape"),
        (lambda: Losses(SCALE, BASIS, np.zeros((2, 3))), ModelError, "points must be"),
        (lambda: Losses(SCALE, BASIS, np.zeros((5000, 2))), ModelError, "points must be"),
    ],
)
def test_a_question_that_cannot_be_meant_is_refused(make, error, reason):
    with pytest.raises(error, match=reason):
        make()
