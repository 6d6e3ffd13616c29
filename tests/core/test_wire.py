"""The wire contract: what is packed comes out, what is wrong is refused by name."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from conftest import small_model
from gems_flwr.core.records import (
    pack_instruction,
    pack_reply,
    payload_bytes,
    to_record,
    unpack_model_reply,
    unpack_name,
)
from gems_flwr.errors import BadReplyError


def good_reply(**changed):
    arrays = small_model() | changed.pop("arrays", {})
    metrics = {"num-examples": 12, "loss": 0.5} | changed.pop("metrics", {})
    return RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord(metrics)})


def test_a_packed_reply_comes_out_as_it_went_in():
    model = to_record(small_model())
    content = pack_reply({"loss": 0.5}, num_examples=12, name="north", arrays=model)
    reply = unpack_model_reply(content, small_model())
    assert reply.num_examples == 12
    assert reply.metrics == {"loss": 0.5}
    assert unpack_name(content) == "north"
    # In the server's order, whatever the node's.
    content["arrays"] = to_record(dict(reversed(small_model().items())))
    arrays = unpack_model_reply(content, small_model()).arrays
    assert list(arrays) == list(small_model())
    assert all(np.array_equal(arrays[key], value) for key, value in small_model().items())


def nan_weight():
    weight = small_model()["weight"]
    weight[1, 1] = np.nan
    return weight


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (good_reply(arrays={"weight": nan_weight()}), "'weight' holds NaN or infinity"),
        (good_reply(arrays={"weight": np.zeros((3, 2), np.float32)}), r"shape \(3, 2\)"),
        (good_reply(arrays={"weight": np.zeros((2, 3))}), "dtype float64, expected float32"),
        (good_reply(arrays={"weight": np.zeros((2000, 3), np.float32)}), "bytes, expected <="),
        (good_reply(arrays={"other": np.zeros(1)}), r"missing none, not expected \['other'\]"),
        (good_reply(metrics={"num-examples": 0}), "expected more than 0"),
        (good_reply(metrics={"num-examples": float("inf")}), "finite"),
        (good_reply(metrics={"num-examples": [1, 2]}), "not a single number"),
        (good_reply(metrics={"loss": float("nan")}), "metric 'loss' is nan"),
        (RecordDict({"metrics": MetricRecord({"num-examples": 1})}), "expected one ArrayRecord"),
        (RecordDict({"arrays": to_record(small_model())}), "expected one MetricRecord"),
        (good_reply(metrics={"num-examples": 1e20}), r"at most 1e\+12"),
        (good_reply(metrics={"loss": 1e300}), r"at most 1e\+100"),
        (good_reply(arrays={"bias": np.full(2, 1e300)}), r"values above 1e\+30"),
        (good_reply(arrays={"bias": np.full(2, 1e25)}), r"more than 1e\+20 from what was sent"),
    ],
)
def test_a_bad_reply_is_refused_with_the_key_at_fault(content, words):
    with pytest.raises(BadReplyError, match=words):
        unpack_model_reply(content, small_model())


HONEST = Array(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not an array", "'weight' cannot be read"),
        # Refused before it is allocated.
        (
            HONEST.data.replace(b"(2, 3), }         ", b"(8000000000, 3), }"),
            "its header promises 96000000000 bytes",
        ),
        (Array(np.zeros((3, 2), np.float32)).data, r"shape \(3, 2\), expected \(2, 3\)"),
    ],
)
def test_what_a_record_claims_of_its_bytes_counts_for_nothing(data, words):
    content = good_reply()
    lie = Array(HONEST.dtype, HONEST.shape, HONEST.stype, data)
    content["arrays"] = ArrayRecord({**content["arrays"], "weight": lie})
    with pytest.raises(BadReplyError, match=words):
        unpack_model_reply(content, small_model())


@pytest.mark.parametrize("name", ["", "x" * 101, "line\nbreak", 7])
def test_a_name_that_is_unusable_counts_as_none(name):
    assert unpack_name(RecordDict({"node": ConfigRecord({"name": name})})) is None


def test_each_node_gets_a_config_of_its_own():
    config = ConfigRecord({"lr": 0.1})
    first = pack_instruction(None, config, server_round=1, seed=5)
    second = pack_instruction(None, config, server_round=2, seed=5)
    assert first["config"]["server-round"] == 1
    assert second["config"]["server-round"] == 2
    assert dict(config) == {"lr": 0.1}
    assert dict(first["config"]) == {"lr": 0.1, "server-round": 1, "run-seed": 5}


def test_payload_bytes_equal_flowers_count_where_flower_can_count():
    content = RecordDict(
        {
            "arrays": to_record(small_model()),
            "metrics": MetricRecord({"a": 1, "b": [1.0, 2.0]}),
            "config": ConfigRecord({"t": "text", "y": True, "n": 3, "raw": b"123", "l": [1, 2]}),
        }
    )
    assert payload_bytes(content) == sum(r.count_bytes() for r in content.values())
    # An empty text, where Flower fails: the key has 4 bytes, its value none.
    assert payload_bytes(RecordDict({"config": ConfigRecord({"note": ""})})) == 4
