"""``report_leaks``: a node's own log says what it gives away; the server sees no difference."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers_leaks import CLASSES, FEATURES, node

from gems_flwr import Gems, InProcessGrid, NodeLimits, good_enough_mod
from gems_flwr.client import leak_report
from gems_flwr.errors import OptionError, RoundFailedError
from gems_flwr.wire.records import to_record
from gems_flwr.wire.space_requests import Ball, Cone, Means

OPEN = NodeLimits(largest_rank="full", dp_budget=None, seeded_noise=True)


def data(context):
    samples = node(seed=int(context.node_config["partition-id"]))
    pair = torch.from_numpy(samples.inputs).float(), torch.from_numpy(samples.labels)
    return pair, pair


def run(space, *, replies=None, refine=0, **options):
    """Play a run of two nodes; keep what they answered."""

    def keep(message, context, call_next):
        reply = call_next(message, context)
        if replies is not None and reply.has_content():
            replies.append(flat(reply.content))
        return reply

    app = ClientApp(mods=[keep, good_enough_mod(data, limits=OPEN, **options)])

    @app.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    model = {"weight": np.zeros((CLASSES, FEATURES), "f4"), "bias": np.zeros(CLASSES, "f4")}
    strategy = Gems(space=space, refine=refine)
    return strategy.start(InProcessGrid(app, 2), to_record(model))


def flat(content):
    """Return every byte and value of a reply."""
    return {
        name: {key: each.data for key, each in record.items()}
        if isinstance(record, ArrayRecord)
        else dict(record)
        for name, record in content.items()
    }


class Heard(logging.Handler):
    """What the node's logger says, whoever else listens."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def lines(self):
        return [record.getMessage() for record in self.records]

    @property
    def warnings(self):
        return [r.getMessage() for r in self.records if r.levelno == logging.WARNING]


@pytest.fixture
def heard(monkeypatch):
    handler = Heard()
    monkeypatch.setattr(leak_report.logger, "handlers", [handler])
    monkeypatch.setattr(leak_report.logger, "level", logging.INFO)
    return handler


SPACES = [
    Cone(),
    Cone(rank="full"),
    Cone(rank=5),
    Cone(sums=True),
    Cone(dp_epsilon=3.0, dp_clip=6.0, dp_seeded=True),
    Means(),
]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.to_json())
def test_a_report_changes_no_byte_of_a_reply(space, heard):
    plain, reported = [], []
    run(space, replies=plain)
    assert heard.lines == []
    run(space, replies=reported, report_leaks=True)
    assert len(plain) == 2
    assert plain == reported
    assert len(heard.lines) >= 2


def test_a_class_of_33_samples_is_a_warning_and_the_default_is_none(heard):
    run(Cone(rank="full"), report_leaks=True)
    said = "leaks: node 0, class 1: 33 samples of 120 features, 33 of 33 were rebuilt within .1"
    assert any(line.startswith(said) for line in heard.warnings)
    heard.records.clear()
    run(Cone(), report_leaks=True)
    assert heard.warnings == []
    assert len(heard.lines) == 2
    assert "node 0 answers with a cone: 0 of 3 classes given away" in heard.lines[0]


def test_a_report_draws_no_numbers_from_anybody_elses_source():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    run(Cone(), report_leaks=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_a_report_that_fails_is_a_line_in_the_log_and_not_a_failed_reply(heard, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(leak_report, "_lines", broken)
    assert run(Cone(), report_leaks=True).failures == ()
    assert "no report on node 0: RuntimeError: out of memory" in heard.lines[0]


def test_the_node_s_own_config_asks_for_reports_as_well():
    assert leak_report.wants_report(False, {"report-leaks": True})
    assert leak_report.wants_report(True, {"report-leaks": False})
    assert not leak_report.wants_report(False, {})
    with pytest.raises(OptionError, match="report-leaks: expected bool, got 'yes'"):
        leak_report.wants_report(False, {"report-leaks": "yes"})


def test_what_a_model_tells_is_not_looked_at(heard):
    with pytest.raises(RoundFailedError):
        # The untrained model of this app is not good enough for any ball.
        run(Ball(epsilon=1.0), report_leaks=True)
    assert heard.lines == []
    leak_report.report_space(object(), None, node="north", seed=0)
    assert "not looked at" in heard.lines[0]


def test_a_gradient_is_reported_by_the_samples_behind_its_rows(heard):
    plain, reported = [], []
    run(Cone(), refine=1, replies=plain)
    run(Cone(), refine=1, replies=reported, report_leaks=True)
    assert plain == reported
    said = [line for line in heard.lines if "gradient of 213 samples" in line]
    assert len(said) == 2
