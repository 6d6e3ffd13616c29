"""What nodes may send about several models, and what is refused."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from gems_flwr.errors import BadReplyError
from gems_flwr.wire.asking import ask_for_models, requested_models
from gems_flwr.wire.model_replies import pack_instruction, pack_name
from gems_flwr.wire.multi_model_replies import (
    Holdings,
    pack_holdings,
    pack_models_reply,
    unpack_holdings,
    unpack_models_reply,
)
from gems_flwr.wire.multi_model_requests import (
    sent_weights,
    single_instruction,
)
from gems_flwr.wire.records import to_record
from gems_flwr.wire.requests import ModelsRequest

MODELS = {"a": {"w": np.zeros(3, dtype=np.float32)}}


def request(action="train", report="model"):
    return ModelsRequest("run", action, {"a": 0}, report=report)


def reply(metrics=None, models=None, **more):
    told = {"num-examples": 3} if metrics is None else metrics
    return pack_models_reply({"a": MetricRecord(told)}, name="n", models=models, **more)


def trained(values=(1, 2, 3), dtype=np.float32):
    return {"a": to_record({"w": np.array(values, dtype=dtype)})}


def unpack(content, asked=None, control=False):
    return unpack_models_reply(content, asked or request(), MODELS, control=control)


def test_a_request_comes_back_as_it_was_sent_and_says_no_more_than_it_must():
    asked = ModelsRequest("r", "train", {"a": 3}, "residual", {"a": 2}, keep=True)
    content = pack_instruction(None, {}, server_round=1, seed=0)
    ask_for_models(content, asked, {"a": to_record(MODELS["a"])})
    assert requested_models(content) == asked
    assert sent_weights(content).keys() == {"a"}
    short = pack_instruction(None, {}, server_round=1, seed=0)
    ask_for_models(short, ModelsRequest("r", "introduce"))
    assert short["config"]["multi-model"] == '{"run":"r","action":"introduce"}'
    assert requested_models(RecordDict()) is None


def test_a_handler_sees_an_ordinary_message():
    content = pack_instruction(None, {"lr": 0.1}, server_round=4, seed=7)
    ask_for_models(content, request())
    single = single_instruction(content, "a", to_record(MODELS["a"]), None)
    assert dict(single["config"]) == {"lr": 0.1, "server-round": 4, "run-seed": 7, "model": "a"}
    assert set(single) == {"config", "arrays"}


def test_a_good_reply_is_taken_apart_by_model():
    part = unpack(reply({"num-examples": 3, "loss": 0.5}, trained())).parts["a"]
    assert part.arrays["w"].tolist() == [1, 2, 3]
    assert (part.num_examples, part.metrics) == (3, {"loss": 0.5})


def test_what_a_node_lacks_and_what_failed_is_told_apart():
    content = pack_models_reply({}, name="n", needs=("a",))
    assert unpack(content).needs == ("a",)
    failed = unpack(pack_models_reply({}, name="n", failed={"a": "boom", "z": "?"}))
    assert failed.failed == {"a": "boom"}
    assert failed.parts == {}


@pytest.mark.parametrize(
    ("content", "asked", "control", "words"),
    [
        (RecordDict(), None, False, "model 'a': expected a MetricRecord"),
        (reply(), None, False, "the model was asked for, but none came"),
        (reply(models=trained([1, 2])), None, False, "array 'w' has shape"),
        (reply(models=trained(dtype=np.int64)), None, False, "array 'w' has"),
        (reply(models=trained([np.nan, 0, 0])), None, False, "holds NaN"),
        (reply({"num-examples": 0}, trained()), None, False, "'num-examples' is 0"),
        (reply(), request(report="norm"), False, "'update-norm' is missing"),
        (
            reply({"num-examples": 1, "update-norm": -1.0}),
            request(report="norm"),
            False,
            "'update-norm' is -1.0, expected at least 0",
        ),
        (
            reply({"num-examples": 1, "update-norm": 1.0}),
            request(report="residual"),
            False,
            "'beta' is missing",
        ),
        (reply({}), request("losses"), False, "'local-loss' is missing"),
        (reply({"local-loss": -0.1}), request("losses"), False, "'local-loss' is -0.1"),
        (reply({"local-loss": np.inf}), request("losses"), False, "expected a finite number"),
        (reply(models=trained()), None, True, "expected an ArrayRecord 'control/a'"),
        (
            reply(models=trained(), controls={"a": np.zeros(9, dtype=np.float32)}),
            None,
            True,
            "array 'control' has",
        ),
        (
            RecordDict({"multi-model": ConfigRecord({"json": "[1]"})}),
            None,
            False,
            "must hold a JSON object",
        ),
        (RecordDict({"multi-model": ConfigRecord({"json": "{"})}), None, False, "holds no JSON"),
        (
            RecordDict({"multi-model": ConfigRecord({"json": '{"needs": 3}'})}),
            None,
            False,
            "must have a list 'needs'",
        ),
    ],
)
def test_a_bad_reply_is_refused_by_model_and_key(content, asked, control, words):
    with pytest.raises(BadReplyError, match=words):
        unpack(content, asked, control)


@pytest.mark.parametrize(
    ("text", "capacity", "words"),
    [
        ('{"a": -1}', 1, "examples of model 'a' are -1"),
        ('{"a": 1.5}', 1, "examples of model 'a' are 1.5"),
        ('{"a": true}', 1, "examples of model 'a' are True"),
        ('{"a": 99999999999999999999}', 1, "expected a count"),
        ('{"a": 3}', -1, "'capacity' is -1"),
        ('{"a": 3}', True, "'capacity' is True"),
        ("nonsense", 1, "holds no JSON"),
    ],
)
def test_a_bad_introduction_is_refused(text, capacity, words):
    note = ConfigRecord({"json": text, "capacity": capacity})
    with pytest.raises(BadReplyError, match=words):
        unpack_holdings(RecordDict({"multi-model": note}), MODELS)


def test_an_introduction_without_the_mod_says_what_is_missing():
    with pytest.raises(BadReplyError, match="does its ClientApp have multi_model_mod"):
        unpack_holdings(pack_name("n"), MODELS)


def test_holdings_of_models_that_nobody_trains_are_left_out():
    content = pack_holdings(Holdings({"a": 3, "b": 9, "c": 0}, 2), name="n")
    assert unpack_holdings(content, MODELS) == Holdings({"a": 3}, 2)
