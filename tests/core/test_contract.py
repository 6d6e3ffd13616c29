"""What holds of every question there is: the contract of the registry.

Questions, requests and honest replies come from whole runs (`helpers_contract`), so a new question
is checked as soon as a scenario asks it.
"""

import ast
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from helpers_contract import exchanges, use
from helpers_fuzz import guarded, may_refuse, mutated
from helpers_lies import HUGE, TEXTS, some_lie
from helpers_scenarios import MASKED, NODES, SCENARIOS
from helpers_sizes import sizes

import gems_flwr
from gems_flwr import NodeLimits
from gems_flwr.core import Disclosure, registered_questions, take_question
from gems_flwr.core.records import records_from_bytes
from gems_flwr.errors import BadReplyError, OptionError, RefusedError

# Asked beside `Round.exchange`: by the names of nodes, and together with a masked summand.
ELSEWHERE = {"name", "secure-list"}
LIBRARY = Path(gems_flwr.__file__).parent
KINDS = sorted(exchanges())


# --- the registry ---------------------------------------------------------------------------


def test_every_registered_question_is_asked_in_a_run():
    # Other tests register questions of their own.
    ours = {k for k, q in registered_questions().items() if q.__module__.startswith("gems_flwr.")}
    assert ours == {kind.split(" ")[0] for kind in KINDS} | ELSEWHERE


def test_every_module_with_a_question_is_imported_by_the_registry():
    listed = (LIBRARY / "questions.py").read_text()
    for path in LIBRARY.rglob("*.py"):
        if path == LIBRARY / "core" / "question.py":
            continue
        classes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
        for each in classes:
            fields = {n.target.id for n in each.body if isinstance(n, ast.AnnAssign)}
            if "kind" in fields and any("Question" in ast.dump(base) for base in each.bases):
                module = ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts)
                assert f"import {module}\n" in listed, f"{module} is not in questions.py"


# --- what is sent ---------------------------------------------------------------------------


def same(ours, theirs):
    """Whether two questions ask the same, whatever the server keeps to itself."""
    for field in dataclasses.fields(ours):
        if field.metadata.get("on_server"):
            continue
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        equal = np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        if not equal:
            return False
    return type(ours) is type(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_comes_back_as_it_was_sent_and_its_honest_reply_is_read(kind):
    exchange = exchanges()[kind]
    assert same(exchange.question, take_question(RecordDict(exchange.question.to_records())))
    use(exchange, exchange.content())
    records = exchange.question.to_records()
    text = {**json.loads(records["question"]["text"]), "colour": 3}
    records["question"]["text"] = json.dumps(text)
    with pytest.raises(OptionError, match="colour"):
        take_question(RecordDict(records))


def test_an_ordinary_message_asks_no_question():
    assert take_question(RecordDict({"config": ConfigRecord({"lr": 0.1})})) is None


@sizes(6, 200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_answers_a_mutated_request_with_an_error_or_what_it_would_send(kind, cases):
    """Whatever a server asks: a reply, never a crash, a hang or much memory."""
    exchange, rng = exchanges()[kind], np.random.default_rng([3, len(kind)])
    app = {**SCENARIOS, **MASKED}[exchange.scenario].app()
    for _ in range(cases):
        try:
            content = records_from_bytes(mutated(exchange.request, rng))
        except Exception:  # Flower would not deliver it
            continue
        state = Context(1, 1, {"partition-id": 1, "num-partitions": NODES}, RecordDict(), {})
        message = Message(content, dst_node_id=1, message_type="train")
        with guarded(exchange.request):
            reply = app(message, state)
        assert reply.has_error() or reply.has_content()


# --- what comes back ------------------------------------------------------------------------


def wrong(honest):
    """Yield arrays in place of an honest one: absurd numbers, another shape, another type."""
    is_float = honest.dtype.kind == "f"
    for wild in (math.nan, -math.inf) if is_float else (np.iinfo(honest.dtype).min,):
        numbers = honest.copy()
        numbers.flat[numbers.size // 2] = wild
        yield numbers
    yield np.concatenate([honest.reshape(-1), np.ones(1)])
    yield honest.astype(np.complex64)


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_with_nan_or_of_another_shape_or_dtype_is_refused(kind):
    exchange = exchanges()[kind]
    for record, arrays in exchange.content().array_records.items():
        for key, array in arrays.items():
            honest = array.numpy()
            # The counters of a model may be any whole numbers.
            known = "f" if kind == "models" else "fi"
            for other in wrong(honest) if honest.dtype.kind in known else ():
                content = exchange.content()
                content[record] = ArrayRecord(dict(arrays) | {key: Array(other)})
                with pytest.raises(BadReplyError):
                    use(exchange, content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_without_one_of_its_records_is_refused_or_does_not_need_it(kind):
    """Names, and what a handler reports beside an answer, are not needed."""
    exchange = exchanges()[kind]
    for key in exchange.content():
        content = exchange.content()
        del content[key]
        with may_refuse(BadReplyError):
            use(exchange, content)
            assert key in ("node", "metrics", "metric-names"), key
    swapped = RecordDict({key: MetricRecord({"a": 1}) for key in exchange.content()})
    if kind.split(" ")[0] != "take-model":  # an acknowledgement
        with pytest.raises(BadReplyError):
            use(exchange, swapped)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_python_cannot_parse_and_endless_numbers_are_refused(kind):
    exchange = exchanges()[kind]
    for key, record in exchange.content().config_records.items():
        if key == "node":
            continue
        for field, value in record.items():
            for odd in (*TEXTS, *(json.dumps({"kind": n}) for n in HUGE[:2])):
                content = exchange.content()
                content[key][field] = odd if isinstance(value, str) else b"\xff"
                with guarded(odd.encode(errors="replace")), may_refuse(BadReplyError):
                    use(exchange, content)


@sizes(10, 700)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_reply_is_refused_or_read(kind, cases):
    """As bytes, which pass Flower's own deserialisation first, as on the network."""
    exchange, rng = exchanges()[kind], np.random.default_rng([7, len(kind)])
    for _ in range(cases):
        data = mutated(exchange.reply, rng)
        try:
            arrived = records_from_bytes(data)
        except Exception:
            continue
        with guarded(data), may_refuse(BadReplyError):
            use(exchange, arrived)


@sizes(10, 300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_with_lies_in_it_is_refused_or_read(kind, cases):
    exchange, rng = exchanges()[kind], np.random.default_rng([9, len(kind)])
    for _ in range(cases):
        content = some_lie(exchange.content(), rng)
        with guarded(exchange.reply), may_refuse(BadReplyError):
            use(exchange, content)


# --- limits ---------------------------------------------------------------------------------


PUBLIC = {"take-model", "holdings", "secure-keys", "secure-opening"}
# Masked: without the keys of that session there is no answer at all.
MASKED_SUMS = {"model-sum", "metrics-sum"}
PRIVATE = {"private-sum", 'cone {"dp_seeded": true, "dp_epsilon": 20.0, "dp_clip": 9.0}'}


@pytest.mark.parametrize("kind", sorted(MASKED_SUMS))
def test_beside_a_masked_sum_no_number_leaves_a_node(kind):
    """Not even what its handler reports, its loss for example."""
    content = exchanges()[kind].content()
    # The last is the signature of the list of who is in the sum.
    assert content.keys() <= {"node", "summand", "metric-names", "secure-sum"}
    assert len(content.metric_records) == len(content.array_records) == 0


def test_a_node_that_requires_noise_refuses_every_answer_without():
    for kind in sorted(set(KINDS) - PUBLIC - MASKED_SUMS - PRIVATE):
        exchange = exchanges()[kind]
        app = {**SCENARIOS, **MASKED}[exchange.scenario].app(NodeLimits(require_dp=True))
        message = Message(records_from_bytes(exchange.request), dst_node_id=1, message_type="train")
        state = Context(1, 1, {"partition-id": 1, "num-partitions": NODES}, RecordDict(), {})
        reply = app(message, state)
        assert reply.has_error(), kind
        assert "refused by this node's limit" in reply.error.reason, kind
        assert "require_dp" in reply.error.reason or kind == "examples", kind


def test_every_limit_refuses_by_its_own_name():
    """Of each kind of disclosure, what a node with one limit refuses."""
    cases = {
        "share_examples": (NodeLimits(), Disclosure("examples")),
        "allow_scores": (NodeLimits(allow_scores=False), Disclosure("score")),
        "share_gradients": (NodeLimits(share_gradients=False), Disclosure("loss")),
        "require_dp": (NodeLimits(require_dp=True), Disclosure("model")),
        "min_count": (NodeLimits(min_count=9), Disclosure("moments", 4, (), 3)),
        "no rule": (NodeLimits(), Disclosure("a new kind")),
    }
    for name, (limits, disclosure) in cases.items():
        with pytest.raises(RefusedError, match=name):
            limits.allow(disclosure)
    NodeLimits(share_examples=True).allow(Disclosure("examples"))
