"""Whatever comes in: a clear error or a valid value, never a crash, a hang or a huge allocation.

Replies are mutated as bytes and pass Flower's own deserialisation first, as on the network; files
are mutated as bytes on disk; descriptions and metrics are replaced by arbitrary JSON and numbers.
Some hundred cases in CI. ``GEMS_FLWR_NIGHTLY=1 pytest tests/test_fuzz.py`` tries more than 20,000.
"""

import json
import math
import signal
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from helpers_spaces import (
    BALL,
    CURVED,
    ELLIPSOID,
    EXAMPLES,
    FULL,
    LAYER,
    LOW,
    MIXED,
    NEURONS,
    NIGHTLY,
    SUMS,
    without_checksum,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import small_model
from gems_flwr.__main__ import main
from gems_flwr.averaging.means import weighted_mean
from gems_flwr.averaging.synchronisation import Coordinator
from gems_flwr.errors import BadReplyError, CheckpointError, SpaceError
from gems_flwr.intersect.aggregate import aggregate_spaces
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.cone_building import cone_from_sums
from gems_flwr.runtime.checkpoint import CheckpointFolder, load_arrays, save_arrays
from gems_flwr.server.learner_state import LearnerState, Tally
from gems_flwr.server.round_log import RoundLog
from gems_flwr.server.state import RoundRecord, ServerState
from gems_flwr.spaces.ball import BallSet
from gems_flwr.spaces.space_files import load_space, save_space
from gems_flwr.wire.averaging_replies import pack_averaging_reply, unpack_averaging_reply
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
from gems_flwr.wire.records import payload_bytes, to_record
from gems_flwr.wire.requests import NeuronRequest, SpaceRequest
from gems_flwr.wire.space_replies import (
    pack_score_reply,
    pack_space_reply,
    unpack_score_reply,
    unpack_space_reply,
)

# Per kind of reply or file, of which there are 11 and 18, and per hypothesis test, of which 3.
REPLY_CASES = 1200 if NIGHTLY else 10
FILE_CASES = 500 if NIGHTLY else 6
RECORD_CASES = 1000 if NIGHTLY else 20
MEGABYTE = 2**20
PATIENCE_SECONDS = 60

# --- guards ---------------------------------------------------------------------------------


@contextmanager
def guarded(data):
    """Fail on a hang, and on memory out of proportion to what came in."""

    def late(signum, frame):
        pytest.fail(f"no answer in {PATIENCE_SECONDS} s to {data[:200]!r}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_SECONDS)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
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
        finite(aggregate_spaces([space, honest], auto_epsilon=request.curve).point)

    return use


def use_neurons(content):
    shape = {"width": 5, "dimension": 6, "outgoing": 2, "server_round": 3}
    request = NeuronRequest(layer=1, epsilon=0.1, radius="worst")
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
        use_space(SpaceRequest(kind="ball", epsilon=0.4), BALL),
    ),
    "curved": (
        pack_space_reply(CURVED, name="n"),
        use_space(
            SpaceRequest(kind="ellipsoid", epsilon=0.4, radius="certified", curve=True), CURVED
        ),
    ),
    "full cone": (pack_space_reply(FULL, name="n"), use_space(SpaceRequest(), FULL)),
    "low-rank cone": (
        pack_space_reply(LOW, name="n"),
        use_space(SpaceRequest(rank=2), LOW),
    ),
    "automatic cone": (
        pack_space_reply(MIXED, name="n"),
        use_space(SpaceRequest(), LOW),
    ),
    "sums": (pack_space_reply(SUMS, name="n"), use_space(SpaceRequest(sums=True), None)),
    "neurons": (
        pack_neurons_reply(NEURONS, layer=1, server_round=3, name="n"),
        use_neurons,
    ),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_a_mutated_reply_is_refused_or_gives_a_finite_aggregate(kind):
    content, use = REPLIES[kind]
    use(content)
    original = recorddict_to_proto(content).SerializeToString()
    rng = np.random.default_rng([7, len(kind)])
    reached = 0
    for _ in range(REPLY_CASES):
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
    assert reached > REPLY_CASES / 20


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
    max_examples=RECORD_CASES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
DESCRIBED = ["ball", "curved", "full cone", "low-rank cone", "neurons"]


@RELAXED
@given(kind=st.sampled_from(DESCRIBED), data=st.data())
def test_a_description_with_any_json_in_it_is_refused_or_valid(kind, data):
    content, use = REPLIES[kind]
    meta = json.loads(content["space-meta"]["json"])
    where = meta
    key = data.draw(st.sampled_from(sorted(meta)))
    if isinstance(meta[key], dict) and data.draw(st.booleans()):
        where, key = meta[key], data.draw(st.sampled_from(sorted(meta[key])))
    where[key] = data.draw(VALUES)
    changed = RecordDict(dict(content))
    changed["space-meta"] = ConfigRecord({"json": json.dumps(meta)})
    with guarded(b""), may_refuse(BadReplyError):
        use(changed)


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


@RELAXED
@given(
    metrics=st.dictionaries(
        st.sampled_from(["num-examples", "loss", "squared-distance", "score", ""]),
        SIGNED_64 | st.floats() | st.lists(SIGNED_64, max_size=3),
    ),
    kind=st.sampled_from(["model", "averaging", "metrics", "score"]),
)
def test_any_metrics_are_refused_or_finite(metrics, kind):
    content, use = REPLIES[kind]
    changed = RecordDict(dict(content))
    changed["metrics"] = MetricRecord(metrics)
    with guarded(b""), may_refuse(BadReplyError):
        use(changed)


@RELAXED
@given(kind=st.sampled_from(sorted(REPLIES)), other=st.sampled_from(sorted(REPLIES)))
def test_the_answer_to_another_question_is_refused_or_just_as_good(kind, other):
    content, use = REPLIES[other][0], REPLIES[kind][1]
    with guarded(b""), may_refuse(BadReplyError):
        use(content)


# --- files ----------------------------------------------------------------------------------

# A checksum refuses nearly every mutation at once. What lies behind it is reached by files without
# one, which are read because earlier versions wrote them.
CHECKSUMS = pytest.mark.parametrize("with_checksum", [True, False], ids=["checksum", "without"])


def same(left, right):
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[key], right[key]) for key in left)


def fuzz_file(path, use, rng):
    """Mutate a file again and again; `use` must answer each time."""
    original = path.read_bytes()
    for _ in range(FILE_CASES):
        data = mutated(original, rng)
        path.write_bytes(data)
        with guarded(data):
            use()
    path.write_bytes(original)


SPACES = {"ball": BALL, "ellipsoid": ELLIPSOID, "full": FULL, "low": LOW, "mixed": MIXED}
SPACES["set"] = BallSet((BALL, BALL))


@CHECKSUMS
@pytest.mark.parametrize("kind", SPACES)
def test_a_mutated_space_file_is_refused_or_holds_a_space(kind, tmp_path, with_checksum):
    path = tmp_path / "x.safetensors"
    save_space(path, SPACES[kind])
    if not with_checksum:
        without_checksum(path)

    def use():
        with may_refuse(SpaceError, "x.safetensors"):
            arrays = load_space(path).to_arrays()[0]
            finite(*arrays.values())
            if with_checksum:
                same(arrays, SPACES[kind].to_arrays()[0])

    fuzz_file(path, use, np.random.default_rng([8, len(kind)]))


def test_a_mutated_file_never_crashes_the_command_line(tmp_path, capsys):
    good, bad, out = (tmp_path / f"{name}.safetensors" for name in ("good", "bad", "out"))
    save_space(good, FULL)
    save_space(bad, LOW)
    without_checksum(bad)

    def use():
        assert main(["aggregate", str(good), str(bad), "-o", str(out)]) in (0, 2, 3)
        assert main(["show", str(bad)]) in (0, 2)

    fuzz_file(bad, use, np.random.default_rng(9))

    # The model that was written, and a space that is kept beside it, may be damaged, too.
    def add():
        assert main(["aggregate", "--add", str(good), "-o", str(out)]) in (0, 2, 3)

    assert main(["aggregate", str(good), "-o", str(out)]) == 0
    fuzz_file(out, add, np.random.default_rng(10))
    capsys.readouterr()


@CHECKSUMS
def test_a_mutated_checkpoint_is_refused_or_whole(tmp_path, with_checksum):
    model = small_model()
    round_log = RoundLog(tmp_path, strategy="S", seed=0, model=model)
    ledger = LearnerState("run", Coordinator(model), known={"a": (1, 0)})
    state = ServerState(
        model,
        (RoundRecord(0), RoundRecord(1, nodes_asked=("a", "b"))),
        memory=ledger.to_memory(),
        details=Tally(cumulative_loss=1.0, synchronisations=((1, 2),)).to_details(),
    )
    round_log.begin(ServerState(model, state.history[:1]))
    round_log.save(state)
    path = tmp_path / "checkpoint.safetensors"
    if not with_checksum:
        groups, meta = load_arrays(path)
        del meta["rounds.jsonl"]
        save_arrays(path, groups, meta)
        without_checksum(path)

    def use():
        with may_refuse(CheckpointError):
            loaded = round_log.load()
            if with_checksum:
                same(loaded.arrays, model)
                assert loaded.history == state.history
            LearnerState.from_memory(loaded.memory)
            Tally.from_details(loaded.details)
            finite(*loaded.arrays.values())
            assert loaded.round == 1
        with may_refuse(CheckpointError, "checkpoint.safetensors"):
            load_arrays(path)

    assert round_log.load().round == 1
    fuzz_file(path, use, np.random.default_rng(11))
    fuzz_file(tmp_path / "rounds.jsonl", use, np.random.default_rng(12))


@CHECKSUMS
def test_a_mutated_kept_reply_counts_as_none_or_passes_the_wires_checks(tmp_path, with_checksum):
    folder = CheckpointFolder(tmp_path)
    content, use_content = REPLIES["model"]
    folder.keep_reply("1-train", "a", content)
    (path,) = (tmp_path / "inbox").iterdir()
    bare = recorddict_to_proto(content).SerializeToString()
    assert path.read_bytes().endswith(bare)
    if not with_checksum:
        path.write_bytes(bare)

    def use():
        kept = folder.kept_reply("1-train", "a")
        if kept is not None:
            if with_checksum:
                assert recorddict_to_proto(kept).SerializeToString() == bare
            with may_refuse(BadReplyError):
                use_content(kept)

    fuzz_file(path, use, np.random.default_rng(13))


def test_there_are_enough_cases():
    total = len(REPLIES) * REPLY_CASES + 18 * FILE_CASES + 2 * RECORD_CASES
    assert total >= (20_000 if NIGHTLY else 200)
