"""``report_leaks``: a node's own log reports what it gives away; the server sees no difference."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers_leaks import CLASSES, FEATURES, node

from gems_flwr import Cone, Gems, InProcessGrid, Means, NodeLimits, good_enough_mod
from gems_flwr.core.records import to_record
from gems_flwr.tools.leaks import inspection

OPEN = NodeLimits(largest_rank="full", dp_budget=None, adaptive_answers=None, seeded_noise=True)


def data(context):
    samples = node(seed=int(context.node_config["partition-id"]))
    pair = torch.from_numpy(samples.inputs).float(), torch.from_numpy(samples.labels)
    return pair, pair


def run(space, *, replies=None, refine=0, nodes=2, **options):
    """Play a run; keep what the nodes answered."""

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
    return Gems(space=space, refine=refine).start(InProcessGrid(app, nodes), to_record(model))


def flat(content):
    """Return every byte and value of a reply."""
    return {
        name: {key: each.data for key, each in record.items()}
        if isinstance(record, ArrayRecord)
        else dict(record)
        for name, record in content.items()
    }


class Heard(logging.Handler):
    """What the node's logger reports, whoever else listens."""

    def __init__(self):
        super().__init__()
        self.lines, self.warnings = [], []

    def emit(self, record):
        self.lines.append(record.getMessage())
        if record.levelno == logging.WARNING:
            self.warnings.append(record.getMessage())


@pytest.fixture
def heard(monkeypatch):
    handler = Heard()
    monkeypatch.setattr(inspection.logger, "handlers", [handler])
    monkeypatch.setattr(inspection.logger, "level", logging.INFO)
    return handler


SPACES = [Cone(), Cone(dp_epsilon=3.0, dp_clip=6.0, dp_seeded=True), Means()]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.to_json())
def test_a_report_changes_no_byte_of_a_reply(space, heard):
    """Nor a number that is drawn from any other source."""
    plain, reported = [], []
    run(space, replies=plain)
    assert heard.lines == []
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    run(space, replies=reported, report_leaks=True)
    assert plain == reported
    assert len(heard.lines) >= 2
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_a_report_that_fails_is_a_line_in_the_log_and_not_a_failed_reply(heard, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(inspection, "inspect_cone", broken)
    assert run(Cone(), report_leaks=True).failures == ()
    assert "no report on node 0: RuntimeError: out of memory" in heard.lines[0]
