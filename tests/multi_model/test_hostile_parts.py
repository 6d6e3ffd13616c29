"""What nodes may send about several models, and what is refused."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from gems_flwr.core import take_question
from gems_flwr.core.records import to_record
from gems_flwr.errors import BadReplyError, OptionError
from gems_flwr.strategies.multi_model import AboutModels, Holdings, HoldingsQuestion

MODELS = {"a": {"w": np.zeros(3, dtype=np.float32)}}


def question(action="train", report="model", control=False):
    return AboutModels("run", action, {"a": 0}, report, models=MODELS, with_control=control)


def reply(metrics=None, models=None, note=None):
    content = RecordDict(
        {"metrics/a": MetricRecord({"num-examples": 3} if metrics is None else metrics)}
    )
    for name, record in (models or {}).items():
        content[f"model/{name}"] = record
    if note is not None:
        content["several-models"] = ConfigRecord({"json": note})
    return content


def trained():
    return {"a": to_record({"w": np.array([1, 2, 3], np.float32)})}


@pytest.mark.parametrize(
    "text",
    [
        '{"run": "r", "action": "sell", "versions": {"a": 1}}',
        '{"run": "r", "action": "train", "versions": 3}',
    ],
)
def test_a_node_refuses_a_question_out_of_range(text):
    record = ConfigRecord({"kind": "models", "text": text})
    with pytest.raises(OptionError, match=r"(action|versions) must be"):
        take_question(RecordDict({"question": record}))


def test_parts_models_that_are_lacking_and_failures_are_told_apart():
    part = question().read(reply({"num-examples": 3, "loss": 0.5}, trained())).parts["a"]
    assert part.arrays["w"].tolist() == [1, 2, 3]
    assert (part.num_examples, part.metrics) == (3, {"loss": 0.5})
    assert question().read(reply(note='{"needs": ["a"]}')).needs == ("a",)
    failed = question().read(reply(note='{"failed": {"a": "boom", "z": "?"}}'))
    assert failed.failed == {"a": "boom"}
    assert failed.parts == {}


@pytest.mark.parametrize(
    ("content", "asked", "words"),
    [
        (reply(), question(), "the model was asked for, but none came"),
        (reply({"num-examples": 0}, trained()), question(), "'num-examples' is 0"),
        (reply(), question(report="norm"), "'update-norm' is missing"),
        (
            reply({"num-examples": 1, "update-norm": -1.0}),
            question(report="norm"),
            "'update-norm' is -1.0, expected at least 0",
        ),
        (
            reply({"num-examples": 1, "update-norm": 1.0}),
            question(report="residual"),
            "'beta' is missing",
        ),
        (reply({}), question("losses"), "'local-loss' is missing"),
        (reply(models=trained()), question(control=True), "expected an ArrayRecord 'control/a'"),
        (reply(note='{"needs": 3}'), question(), "must have a list 'needs'"),
    ],
)
def test_a_bad_reply_is_refused_by_model_and_key(content, asked, words):
    with pytest.raises(BadReplyError, match=words):
        asked.read(content)


@pytest.mark.parametrize(
    ("text", "capacity", "words"),
    [
        ('{"a": -1}', 1, "examples of model 'a' are -1"),
        ('{"a": true}', 1, "examples of model 'a' are True"),
        ('{"a": 99999999999999999999}', 1, "expected a count"),
        ('{"a": 3}', True, "'capacity' is True"),
    ],
)
def test_bad_holdings_are_refused(text, capacity, words):
    note = ConfigRecord({"json": text, "capacity": capacity})
    with pytest.raises(BadReplyError, match=words):
        HoldingsQuestion(("a",)).read(RecordDict({"several-models": note}))


def test_holdings_of_models_that_no_server_trains_are_left_out():
    note = ConfigRecord({"json": '{"a": 3, "b": 9}', "capacity": 2})
    content = RecordDict({"several-models": note})
    assert HoldingsQuestion(("a",)).read(content) == Holdings({"a": 3}, 2)
