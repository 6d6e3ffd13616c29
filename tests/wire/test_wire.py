"""The wire contract: what is packed comes out, what is wrong is refused by name."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from conftest import small_model
from gems_flwr.errors import BadReplyError
from gems_flwr.wire.model_replies import (
    instruction_config,
    pack_examples_reply,
    pack_instruction,
    pack_model_reply,
    unpack_examples_reply,
    unpack_model_reply,
    unpack_name,
)
from gems_flwr.wire.records import instruction_round, payload_bytes, to_record


def good_reply(**changed):
    arrays = small_model() | changed.pop("arrays", {})
    metrics = {"num-examples": 12, "loss": 0.5} | changed.pop("metrics", {})
    return RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord(metrics)})


def test_a_packed_reply_comes_out_as_it_went_in():
    content = pack_model_reply(
        to_record(small_model()), {"loss": 0.5}, num_examples=12, name="north"
    )
    reply = unpack_model_reply(content, small_model())
    assert reply.num_examples == 12
    assert reply.metrics == {"loss": 0.5}
    assert unpack_name(content) == "north"
    for key, array in small_model().items():
        assert np.array_equal(reply.arrays[key], array)


def test_arrays_come_in_the_servers_order_whatever_the_nodes():
    reversed_model = dict(reversed(small_model().items()))
    content = good_reply()
    content["arrays"] = to_record(reversed_model)
    reply = unpack_model_reply(content, small_model())
    assert list(reply.arrays) == list(small_model())


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
        (good_reply(arrays={"other": np.zeros(1)}), r"not expected \['other'\]"),
        (good_reply(metrics={"num-examples": 0}), "expected more than 0"),
        (good_reply(metrics={"num-examples": -3}), "expected more than 0"),
        (good_reply(metrics={"num-examples": float("inf")}), "finite"),
        (good_reply(metrics={"num-examples": [1, 2]}), "not a single number"),
        (good_reply(metrics={"loss": float("nan")}), "metric 'loss' is nan"),
        (RecordDict({"metrics": MetricRecord({"num-examples": 1})}), "expected one ArrayRecord"),
        (RecordDict({"arrays": to_record(small_model())}), "expected one MetricRecord"),
        (RecordDict(), "expected one ArrayRecord"),
    ],
)
def test_a_bad_reply_is_refused_with_the_key_at_fault(content, words):
    with pytest.raises(BadReplyError, match=words):
        unpack_model_reply(content, small_model())


def test_bytes_that_are_no_array_are_refused():
    lie = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=b"not an array")
    content = good_reply()
    content["arrays"] = ArrayRecord({**content["arrays"], "weight": lie})
    with pytest.raises(BadReplyError, match="'weight' cannot be read"):
        unpack_model_reply(content, small_model())


def test_a_header_that_promises_a_huge_array_is_refused_before_it_is_allocated():
    honest = Array(np.zeros((2, 3), np.float32))
    data = honest.data.replace(b"(2, 3), }         ", b"(8000000000, 3), }")
    assert len(data) == len(honest.data)
    lie = Array(dtype="float32", shape=(2, 3), stype=honest.stype, data=data)
    content = good_reply()
    content["arrays"] = ArrayRecord({**content["arrays"], "weight": lie})
    with pytest.raises(BadReplyError, match="its header promises 96000000000 bytes"):
        unpack_model_reply(content, small_model())


def test_a_claim_about_the_shape_counts_for_nothing():
    honest = Array(np.zeros((3, 2), np.float32))
    lie = Array(dtype="float32", shape=(2, 3), stype=honest.stype, data=honest.data)
    content = good_reply()
    content["arrays"] = ArrayRecord({**content["arrays"], "weight": lie})
    with pytest.raises(BadReplyError, match=r"shape \(3, 2\), expected \(2, 3\)"):
        unpack_model_reply(content, small_model())


def test_a_missing_array_is_named():
    content = good_reply()
    del content["arrays"]["bias"]
    with pytest.raises(BadReplyError, match=r"missing \['bias'\]"):
        unpack_model_reply(content, small_model())


@pytest.mark.parametrize("name", ["", "x" * 101, "line\nbreak", 7])
def test_a_name_that_is_unusable_counts_as_none(name):
    assert unpack_name(RecordDict({"node": ConfigRecord({"name": name})})) is None


def test_shared_examples_must_fit_together():
    features, labels = np.zeros((4, 1, 8, 8), np.uint8), np.arange(4)
    content = pack_examples_reply(features, labels, name="0")
    reply = unpack_examples_reply(content, (1, 8, 8))
    assert reply.features.shape == (4, 1, 8, 8)
    assert reply.labels.tolist() == [0, 1, 2, 3]
    with pytest.raises(BadReplyError, match="features have shape"):
        unpack_examples_reply(content, (1, 28, 28))
    with pytest.raises(BadReplyError, match="row of integers"):
        unpack_examples_reply(
            pack_examples_reply(features, labels.astype(float), name="0"), (1, 8, 8)
        )
    with pytest.raises(BadReplyError, match="ArrayRecord 'examples'"):
        unpack_examples_reply(RecordDict(), (1, 8, 8))


def test_each_node_gets_a_config_of_its_own():
    config = ConfigRecord({"lr": 0.1})
    first = pack_instruction(None, config, server_round=1, seed=5)
    second = pack_instruction(None, config, server_round=2, seed=5)
    assert instruction_round(first) == 1
    assert instruction_round(second) == 2
    assert dict(config) == {"lr": 0.1}
    assert instruction_config(first) == {"lr": 0.1, "server-round": 1, "run-seed": 5}


def test_payload_bytes_equal_flowers_count_where_flower_can_count():
    content = RecordDict(
        {
            "arrays": to_record(small_model()),
            "metrics": MetricRecord({"a": 1, "b": [1.0, 2.0]}),
            "config": ConfigRecord({"t": "text", "y": True, "n": 3, "raw": b"123", "l": [1, 2]}),
        }
    )
    assert payload_bytes(content) == sum(r.count_bytes() for r in content.values())


def test_payload_bytes_count_empty_text_where_flower_fails():
    """The key 'note' has 4 bytes, its empty value none."""
    assert payload_bytes(RecordDict({"config": ConfigRecord({"note": ""})})) == 4
