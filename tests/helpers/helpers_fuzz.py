"""Whatever may come in: replies of every kind, how they are used, and how bytes are mutated."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from helpers_patience import patience
from helpers_spaces import (
    BALL,
    CURVED,
    EXAMPLES,
    FULL,
    FULL_PARTIAL,
    LAYER,
    LOW,
    MEANS,
    MIXED,
    NEURONS,
    PARTIAL,
    SUMS,
)

from conftest import small_model
from gems_flwr.averaging.means import weighted_mean
from gems_flwr.intersect.aggregate import aggregate_spaces
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.cone_building import cone_from_sums
from gems_flwr.wire.averaging_replies import pack_averaging_reply, unpack_averaging_reply
from gems_flwr.wire.choice_messages import (
    ChoiceRequest,
    Counts,
    pack_choice_reply,
    unpack_choice_reply,
)
from gems_flwr.wire.model_replies import (
    pack_examples_reply,
    pack_metrics_reply,
    pack_model_reply,
    unpack_examples_reply,
    unpack_metrics_reply,
    unpack_model_reply,
    unpack_name,
)
from gems_flwr.wire.neuron_replies import pack_neurons_reply, unpack_neurons_reply
from gems_flwr.wire.records import to_record
from gems_flwr.wire.requests import Neurons
from gems_flwr.wire.space_replies import (
    pack_score_reply,
    pack_space_reply,
    unpack_score_reply,
    unpack_space_reply,
)
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid, Means

MEGABYTE = 2**20


# Per kind of reply and file.
REPLY_CASES = (10, 1200)
FILE_CASES = (6, 500)

# --- guards ---------------------------------------------------------------------------------


@contextmanager
def guarded(data):
    """Fail on a hang, and on memory out of proportion to what came in."""
    with patience(f"using {data[:200]!r}"):
        tracemalloc.start()
        try:
            yield
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 16 * MEGABYTE + 50 * len(data)


@contextmanager
def may_refuse(kind, words=""):
    """Let one kind of error pass, if it says something."""
    try:
        yield
    except kind as error:
        if not str(error) or words not in str(error):
            pytest.fail(f"the error does not say what is wrong: {error!r}")


def mutated(data, rng):
    """Return bytes with one to four wounds."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        if not data:
            break
        at = int(rng.integers(len(data)))
        kind = rng.integers(7)
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at] = int(rng.integers(256))
        elif kind == 2:
            del data[at : at + int(rng.integers(1, 40))]
        elif kind == 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 20)))
        elif kind == 4:
            other = int(rng.integers(len(data)))
            data[at:at] = data[other : other + int(rng.integers(1, 60))]
        elif kind == 5:
            wild = (0.0, -1.0, math.nan, math.inf, 1e30, -1e30, 1e-40)
            width = (np.float32, np.float64)[int(rng.integers(2))]
            value = width(wild[int(rng.integers(len(wild)))]).tobytes()
            data[at : at + len(value)] = value
        else:
            # A digit of a header or a description.
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            if digits:
                data[digits[int(rng.integers(len(digits)))]] = 48 + int(rng.integers(10))
    return bytes(data)


# --- replies --------------------------------------------------------------------------------


def finite(*arrays):
    assert all(np.isfinite(np.asarray(array, dtype=np.float64)).all() for array in arrays)


def use_model(content):
    reply = unpack_model_reply(content, small_model())
    mean = weighted_mean([reply.arrays, small_model()], [reply.num_examples, 3])
    finite(*mean.values())


def use_averaging(content):
    reply = unpack_averaging_reply(content, small_model(), measured=True, must_send=False)
    if not reply.needs_model:
        finite(reply.num_examples, reply.squared_distance, *(reply.arrays or {}).values())


def use_space(request, honest):
    def use(content):
        space = unpack_space_reply(content, request, LAYER)
        if isinstance(space, ClassSums):
            cone = cone_from_sums(space + SUMS, min_count=2)
            finite(aggregate_spaces([cone]).point)
            return
        finite(aggregate_spaces([space, honest], auto_epsilon=request.is_curved).point)

    return use


def use_choice(content):
    request = ChoiceRequest(candidates=2, by_class=True)
    counts = unpack_choice_reply(content, request, LAYER.num_classes)
    finite(counts.seen, counts.right)
    assert (counts.right <= counts.seen).all()


def use_neurons(content):
    shape = {"width": 5, "dimension": 6, "outgoing": 2, "server_round": 3}
    request = Neurons(epsilon=0.1, radius="worst").in_layer(1)
    balls = unpack_neurons_reply(content, request, **shape)
    finite(balls.to_array())


def use_examples(content):
    reply = unpack_examples_reply(content, (2, 2))
    finite(reply.features, reply.labels)


def use_metrics(content):
    reply = unpack_metrics_reply(content)
    finite(reply.num_examples, *reply.metrics.values())


def use_score(content):
    assert 0 <= unpack_score_reply(content) <= 1
    name = unpack_name(content)
    assert name is None or name.isprintable()


MODEL = to_record(small_model())
METRICS = {"num-examples": 12, "loss": 0.5}
REPLIES = {
    "model": (pack_model_reply(MODEL, {"loss": 1}, num_examples=3, name="n"), use_model),
    "averaging": (
        pack_averaging_reply(METRICS, name="n", squared_distance=0.5, model=MODEL),
        use_averaging,
    ),
    "metrics": (pack_metrics_reply({"a": 1}, num_examples=3, name="n"), use_metrics),
    "examples": (pack_examples_reply(*EXAMPLES, name="n"), use_examples),
    "score": (pack_score_reply(0.5, name="n"), use_score),
    "ball": (
        pack_space_reply(BALL, name="n"),
        use_space(Ball(epsilon=0.4), BALL),
    ),
    "curved": (
        pack_space_reply(CURVED, name="n"),
        use_space(Ellipsoid(epsilon=0.4, radius="certified", curve=True), CURVED),
    ),
    "partial cone": (pack_space_reply(PARTIAL, name="n"), use_space(Cone(rank=2), PARTIAL)),
    "partial full cone": (
        pack_space_reply(FULL_PARTIAL, name="n"),
        use_space(Cone(rank="full"), FULL_PARTIAL),
    ),
    "means": (pack_space_reply(MEANS, name="n"), use_space(Means(), MEANS)),
    "choice": (
        pack_choice_reply(Counts(np.array([5.0, 0, 3]), np.array([[2.0, 0, 1]] * 2)), name="n"),
        use_choice,
    ),
    "full cone": (pack_space_reply(FULL, name="n"), use_space(Cone(), FULL)),
    "low-rank cone": (
        pack_space_reply(LOW, name="n"),
        use_space(Cone(rank=2), LOW),
    ),
    "automatic cone": (
        pack_space_reply(MIXED, name="n"),
        use_space(Cone(), LOW),
    ),
    "sums": (pack_space_reply(SUMS, name="n"), use_space(Cone(sums=True), None)),
    "neurons": (
        pack_neurons_reply(NEURONS, layer=1, server_round=3, name="n"),
        use_neurons,
    ),
}
