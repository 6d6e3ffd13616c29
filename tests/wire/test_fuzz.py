"""Whatever a node sends: a clear error or a valid value, never a crash, a hang or much memory.

Replies are mutated as bytes and pass Flower's own deserialisation first, as on the network;
descriptions and metrics are replaced by arbitrary JSON and numbers. What must be refused is
refused, each case of it; what a mutation leaves valid may be used, and what comes of it is finite.
Some hundred cases in ``make test``; ``make test-deep`` has more than 20,000, those of
``tests/disk/test_fuzzed_files.py`` included.
"""

import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from helpers_fuzz import FILE_CASES, REPLIES, REPLY_CASES, guarded, may_refuse, mutated
from helpers_sizes import sizes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gems_flwr.bounds import MAX_EXAMPLES, MAX_METRIC, MIN_EXAMPLES
from gems_flwr.errors import BadReplyError
from gems_flwr.wire.records import payload_bytes


@sizes(*REPLY_CASES)
@pytest.mark.parametrize("kind", REPLIES)
def test_a_mutated_reply_is_refused_or_gives_a_finite_aggregate(kind, cases):
    content, use = REPLIES[kind]
    use(content)
    original = recorddict_to_proto(content).SerializeToString()
    rng = np.random.default_rng([7, len(kind)])
    reached = 0
    for _ in range(cases):
        data = mutated(original, rng)
        try:
            arrived = recorddict_from_proto(ProtoRecordDict.FromString(data))
        except Exception:
            continue
        reached += 1
        with guarded(data):
            assert payload_bytes(arrived) >= 0
            with may_refuse(BadReplyError):
                use(arrived)
    assert reached > cases / 20


FLOATS = [
    (kind, record, key)
    for kind, (content, _) in REPLIES.items()
    for record, arrays in content.array_records.items()
    for key, array in arrays.items()
    if array.numpy().dtype.kind == "f"
]


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "record", "key"), FLOATS, ids=lambda value: value)
def test_an_array_with_one_number_that_is_not_finite_is_refused(kind, record, key, wild):
    content, use = REPLIES[kind]
    changed, arrays = RecordDict(dict(content)), dict(content[record])
    numbers = arrays[key].numpy().copy()
    numbers.flat[numbers.size // 2] = wild
    changed[record] = ArrayRecord(arrays | {key: Array(numbers)})
    with pytest.raises(BadReplyError, match="NaN or infinity"):
        use(changed)


# Anything that JSON can hold, with numbers that Python's own parser chokes on.
HUGE = st.sampled_from([10**400, -(10**400), 2**63, math.inf, -math.inf, math.nan, 1e300, -0.0])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | HUGE
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
RELAXED = settings(
    derandomize=True, suppress_health_check=list(HealthCheck), database=None, deadline=None
)
RECORD_CASES = (20, 1000)
DESCRIBED = ["ball", "curved", "full cone", "low-rank cone", "neurons"]


def is_alike(value, before):
    """Whether a value could stand where another one did: of its type; if a number, a finite one."""
    if isinstance(before, int | float):
        return isinstance(value, int | float) and -1e300 < value < 1e300
    return type(value) is type(before)


@sizes(*RECORD_CASES)
def test_a_description_with_a_value_of_another_type_is_refused_and_any_other_or_valid(cases):
    refused = []

    @settings(RELAXED, max_examples=cases)
    @given(kind=st.sampled_from(DESCRIBED), data=st.data())
    def check(kind, data):
        content, use = REPLIES[kind]
        meta = json.loads(content["space-meta"]["json"])
        where = meta
        key = data.draw(st.sampled_from(sorted(meta)))
        if isinstance(meta[key], dict) and data.draw(st.booleans()):
            where, key = meta[key], data.draw(st.sampled_from(sorted(meta[key])))
        before, where[key] = where[key], data.draw(VALUES)
        changed = RecordDict(dict(content))
        changed["space-meta"] = ConfigRecord({"json": json.dumps(meta)})
        alike = is_alike(where[key], before)
        refused.append(not alike)
        with guarded(b""), may_refuse(BadReplyError) if alike else pytest.raises(BadReplyError):
            use(changed)

    check()
    assert any(refused)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[" * 10**5, "1" * 10**5, '{"kind": ' + "9" * 5000 + "}", "{" + "'", '"\\ud800"'],
)
def test_a_description_that_python_cannot_parse_is_refused(text):
    content, use = REPLIES["full cone"]
    changed = RecordDict(dict(content))
    changed["space-meta"] = ConfigRecord({"json": text})
    with guarded(text.encode(errors="replace")), pytest.raises(BadReplyError):
        use(changed)


SIGNED_64 = st.integers(-(2**63), 2**63 - 1)
# What is valid comes up often enough to be accepted, too.
NUMBERS = SIGNED_64 | st.floats() | st.integers(0, 9) | st.floats(0, 1)


def is_valid(kind, metrics):
    """Whether metrics answer a question: the numbers that it needs, and none out of bounds."""
    single = {key: value for key, value in metrics.items() if not isinstance(value, list)}
    if kind == "score":
        return 0 <= single.get("score", math.nan) <= 1
    bounded = all(abs(value) <= MAX_METRIC for value in single.values())
    counted = MIN_EXAMPLES <= single.get("num-examples", math.nan) <= MAX_EXAMPLES
    if kind == "averaging" and not single.get("squared-distance", math.nan) >= 0:
        return False
    return bounded and counted


@sizes(*RECORD_CASES)
def test_metrics_are_refused_exactly_if_one_is_missing_or_out_of_bounds(cases):
    seen = set()

    @settings(RELAXED, max_examples=5 * cases)
    @given(
        metrics=st.fixed_dictionaries(
            {},
            optional=dict.fromkeys(
                ["num-examples", "loss", "squared-distance", "score", ""],
                NUMBERS | st.lists(SIGNED_64, max_size=3),
            ),
        ),
        kind=st.sampled_from(["model", "averaging", "metrics", "score"]),
    )
    def check(metrics, kind):
        content, use = REPLIES[kind]
        changed = RecordDict(dict(content))
        changed["metrics"] = MetricRecord(metrics)
        valid = is_valid(kind, metrics)
        seen.add((kind, valid))
        with guarded(b""), nullcontext() if valid else pytest.raises(BadReplyError):
            use(changed)

    check()
    assert len(seen) == 8


# Replies that answer another question as well: one with a model holds metrics, and a cone may come
# in any form where none was asked for. Means alone are what a node sends that has too few samples.
CONES = {"full cone", "low-rank cone", "automatic cone"}
CONES |= {"partial cone", "partial full cone", "means"}
ALSO_ANSWERED_BY = {
    "partial cone": {"low-rank cone", "means"},
    "partial full cone": {"full cone", "means"},
    "low-rank cone": {"partial cone", "means"},
    "model": {"averaging"},
    "metrics": {"model", "averaging"},
    "full cone": CONES,
    "automatic cone": CONES,
}


@pytest.mark.parametrize("kind", REPLIES)
def test_the_answer_to_another_question_is_refused_unless_it_answers_this_one_as_well(kind):
    use = REPLIES[kind][1]
    for other, (content, _) in REPLIES.items():
        answers = other == kind or other in ALSO_ANSWERED_BY.get(kind, ())
        with guarded(b""), nullcontext() if answers else pytest.raises(BadReplyError):
            use(content)


def test_the_deep_suite_has_more_than_twenty_thousand_cases():
    """Twenty kinds of files are mutated in ``tests/disk/test_fuzzed_files.py``."""
    assert len(REPLIES) * REPLY_CASES[1] + 20 * FILE_CASES[1] >= 20_000
