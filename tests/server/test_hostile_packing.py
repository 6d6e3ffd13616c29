"""Packed models from nodes that lie: named, left out, and the others go on."""

import json
import zlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from helpers_learners import initial as initial_walk
from helpers_learners import walking_app
from helpers_packed import (
    PackedGrid,
    arrays_equal,
    initial,
    packed_app,
    packed_record,
    with_note,
    with_part,
)
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.bounds import MAX_JSON_CHARACTERS
from gems_flwr.compression.difference_coding import PackedModel, decode, encode_whole
from gems_flwr.errors import BadReplyError
from gems_flwr.server import model_links
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.periodic_averaging import PeriodicAveraging
from gems_flwr.wire.compression_messages import pack_needs_base, take_bases
from gems_flwr.wire.keys import COMPRESSION
from gems_flwr.wire.packed_records import pack_bytes, packed_models
from gems_flwr.wire.records import to_numpy


def deflated(data):
    compress = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compress.compress(data) + compress.flush()


def whole(content):
    """The whole model where a difference was asked for, under a number that the node has."""
    key, _ = packed_record(content)
    content[key] = pack_bytes(encode_whole(to_numpy(initial())))


def twice(content):
    """Thousands of copies, each as large as a model when it is unpacked."""
    _, record = packed_record(content)
    bases = json.loads(content[COMPRESSION]["json"])
    [number] = bases.values()
    for copy in range(1000):
        content[f"copy-{copy}"] = ConfigRecord(dict(record))
        bases[f"copy-{copy}"] = number
    content[COMPRESSION] = ConfigRecord({"json": json.dumps(bases)})


def beside(content):
    """Arrays beside the packed model, of which nobody knows which is meant."""
    content["more"] = initial()


def unpacked(content):
    """No model at all any more."""
    key, _ = packed_record(content)
    del content[key]


def not_ours(content):
    key, record = packed_record(content)
    content[key] = ConfigRecord({**record, "surprise": 1})


def no_bytes(content):
    key, record = packed_record(content)
    content[key] = ConfigRecord({**record, "codes": 7})


def of_metrics(content):
    """The note is no ConfigRecord."""
    content[COMPRESSION] = ArrayRecord({"json": Array(np.zeros(2))})


BOMB = deflated(b"\0" * 10**7)
NAN = b"\xc0\x7f"
TAMPERED = {
    "codes cut": (with_part("codes", lambda b: b[:-3]), "codes of a packed model"),
    "codes gone": (with_part("codes", lambda _: b"\x03\x00"), "codes of a packed model"),
    "codes bomb": (with_part("codes", lambda _: BOMB), "do not fit"),
    "codes noise": (with_part("codes", lambda b: b"\xff" * len(b)), "codes of a packed model"),
    "codes longer": (with_part("codes", lambda b: b + b"x"), "do not fit"),
    "exact bomb": (with_part("packed-exact", lambda _: BOMB), "do not fit"),
    "scales short": (with_part("scales", lambda b: b[:-2]), "bytes of scales"),
    "scales odd": (with_part("scales", lambda b: b + b"x"), "bytes of scales"),
    "scales nan": (with_part("scales", lambda b: NAN * (len(b) // 2)), "NaN or infinity"),
    "scales huge": (with_part("scales", lambda b: b"\x7f\x7f" * (len(b) // 2)), "NaN|more than"),
    "number unknown": (with_note('{"my-model":17}'), "difference to number 17"),
    "number missing": (with_note("{}"), "difference to number 0"),
    "number a word": (with_note('{"my-model":"one"}'), "whole numbers"),
    "number a list": (with_note('{"my-model":[1]}'), "whole numbers"),
    "note no json": (with_note("{"), "no JSON"),
    "note no object": (with_note("[1]"), "JSON object"),
    "note too long": (with_note("[" * (MAX_JSON_CHARACTERS + 1)), "JSON text"),
    "note deep": (with_note('{"a":' + "[" * 50_000), "no JSON"),
    "note no record": (of_metrics, "JSON"),
    "whole": (whole, "came whole"),
    "many": (twice, "1001 packed models"),
    "beside": (beside, "expected one ArrayRecord"),
    "nothing": (unpacked, "expected one ArrayRecord"),
    "surprise": (not_ours, "does not belong"),
    "no bytes": (no_bytes, "does not belong"),
}


def go(tamper, **options):
    grid = PackedGrid(packed_app(), 4, tamper={(2, 2): tamper})
    strategy = FedAvg(compress="int8", fraction_evaluate=0.0, **options)
    return strategy.start(grid, initial(), num_rounds=4)


@pytest.mark.parametrize("how", TAMPERED)
def test_a_reply_that_is_no_packed_model_is_named_and_the_others_go_on(how):
    tamper, words = TAMPERED[how]
    result = go(tamper)
    [(number, failure)] = result.failures
    assert (number, failure.node) == (2, "2")
    assert any(word in failure.reason for word in words.split("|")), failure.reason
    assert result.history[2].nodes_answered == ("0", "1", "3")
    assert result.history[4].nodes_answered == ("0", "1", "2", "3")
    assert np.abs(result.arrays["w"].numpy()).max() < 10


def test_who_is_refused_is_out_as_if_it_had_not_answered(tmp_path):
    """To the last bit, and its reply is not kept for a resumed run."""
    for tamper in (TAMPERED["scales nan"][0], TAMPERED["number unknown"][0]):
        refused = go(tamper, checkpoint_dir=tmp_path / "run", resume=False)
        cut = go(with_part("codes", lambda _: b"\x03\x00"))
        assert arrays_equal(refused.arrays, cut.arrays)


def test_a_node_that_always_asks_for_the_whole_model_is_refused():
    def asks(content):
        for key in list(content):
            del content[key]
        content.update(pack_needs_base("2"))

    result = go(asks)
    [(number, failure)] = result.failures
    assert (number, failure.node) == (2, "2")
    assert "asks again" in failure.reason


def test_packed_although_nobody_asked_is_no_model():
    """Where models travel whole, a packed one is a record like any other: the model is missing."""

    def packs(content):
        content["my-model"] = pack_bytes(encode_whole(to_numpy(initial())))

    grid = PackedGrid(packed_app(), 3, tamper={(1, 1): packs})
    result = FedAvg(fraction_evaluate=0.0).start(grid, initial(), num_rounds=1)
    [(_, failure)] = result.failures
    assert failure.node == "1"
    assert "expected one ArrayRecord" in failure.reason


def test_no_more_models_are_unpacked_than_a_node_was_given(monkeypatch):
    """Each costs next to nothing on the wire, and a model's memory here."""
    opened = []
    real = model_links.open_packed
    monkeypatch.setattr(model_links, "open_packed", lambda *each: opened.append(1) or real(*each))
    go(twice)
    assert len(opened) == 4 * 4 - 1


def test_whatever_breaks_our_own_code_leaves_the_node_out(monkeypatch):
    real, failed = model_links.open_packed, []

    def breaks(packed, base, form):
        if len(failed) < 1:
            failed.append(1)
            raise ZeroDivisionError("nobody foresaw this")
        return real(packed, base, form)

    monkeypatch.setattr(model_links, "open_packed", breaks)
    result = go(lambda content: None)
    assert "nobody foresaw this" in result.failures[0][1].reason
    assert len(result.failures) == 1


@given(
    codes=st.binary(max_size=40),
    scales=st.binary(max_size=12),
    exact=st.binary(min_size=1, max_size=40),
    note=st.text(max_size=30) | st.just('{"my-model":1}'),
)
def test_any_bytes_are_a_model_or_a_refusal(codes, scales, exact, note):
    base = {"w": np.zeros((3, 4), np.float32), "b": np.zeros(2, np.float32)}
    record = pack_bytes(PackedModel(codes, scales, exact))
    content = RecordDict({"my-model": record, COMPRESSION: ConfigRecord({"json": note})})
    for form in ("float16", "int8", "int4"):
        for read in (
            lambda: take_bases(RecordDict(dict(content))),
            lambda form=form: decode(packed_models(content)["my-model"], base, form),
        ):
            try:
                read()
            except BadReplyError:
                continue


# --- learners -------------------------------------------------------------------------------------

LEARNERS = {
    name: TAMPERED[name]
    for name in ("codes cut", "codes bomb", "scales nan", "exact bomb", "surprise", "whole")
}


@pytest.mark.parametrize("how", [*LEARNERS, "beside", "two"])
def test_a_learner_that_lies_is_named_and_begins_anew(how):
    def two(content):
        _, record = packed_record(content)
        content["another"] = ConfigRecord(dict(record))

    own = {"beside": (beside, "one packed model"), "two": (two, "one packed model")}
    tamper, words = {**LEARNERS, **own}[how]
    grid = PackedGrid(walking_app(size=(30, 20)), 4, tamper={(2, 2): tamper})
    strategy = PeriodicAveraging(b=1, compress="int8")
    result = strategy.start(grid, initial_walk((30, 20)), num_rounds=5)
    [(number, failure)] = result.failures
    assert (number, failure.node) == (2, "2")
    assert words in failure.reason, failure.reason
    assert (3, "train", 2, "whole") in grid.sent
    assert len(result.history[3].nodes_answered) == 4
    assert np.abs(result.arrays["w"].numpy()).max() < 3
