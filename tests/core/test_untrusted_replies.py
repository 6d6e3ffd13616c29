"""A reply is used if it answers the question and fits, and counts for no more than its share."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from conftest import initial_arrays, small_model, toy_app, train_reply
from gems_flwr import FedAvg, InProcessGrid, Tolerance


def start(strategy, app, nodes=3, rounds=1, grid=InProcessGrid):
    return strategy.start(grid(app, nodes), initial_arrays(), num_rounds=rounds)


def weight(result):
    return result.arrays["weight"].numpy()


def bloated(message, context):
    """An honest reply with a kilobyte too much in a record that nobody reads."""
    reply = train_reply(message, context)
    reply.content["ballast"] = ConfigRecord({"zeros": b"\0" * 1000})
    return reply


def test_a_reply_above_the_limit_is_refused_by_node_and_size_and_never_written(tmp_path):
    """Nodes 0 and 2 add 1 and 3 with weights 1 and 3: 10/4."""
    kept = []

    class Watched(FedAvg):
        def aggregate(self, replies):
            kept.extend(sorted(path.name for path in (tmp_path / "inbox").iterdir()))
            return super().aggregate(replies)

    strategy = Watched(
        fraction_evaluate=0.0, tolerance=Tolerance(max_reply_bytes=1000), checkpoint_dir=tmp_path
    )
    result = start(strategy, toy_app({1: bloated}))
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert "max_reply_bytes is 1,000" in failure.reason
    assert weight(result) == pytest.approx(small_model()["weight"] + 10 / 4)
    assert [name.split("-")[2] for name in kept] == ["0", "2"]


def test_a_reason_of_a_megabyte_is_cut_and_cannot_steer_a_terminal():
    def chatters(message, context):
        return Message(Error(code=2, reason="\x1b[2J" + "x" * 10**6), reply_to=message)

    result = start(FedAvg(), toy_app({1: chatters}, guarded=False))
    (failure,) = result.history[1].failures
    assert len(failure.reason) < 5000
    assert "\x1b" not in failure.reason
    assert "1,000,004 characters" in failure.reason


class Replaying(InProcessGrid):
    """Node 1 answers every message with its first reply, unchanged."""

    first = None

    def collect(self, message_ids, *, timeout):
        for reply in super().collect(message_ids, timeout=timeout):
            if self._configs[reply.metadata.src_node_id]["partition-id"] != 1:
                yield reply
                continue
            self.first = self.first or reply
            yield self.first


def test_a_reply_to_an_earlier_round_is_dropped_and_its_node_counts_as_silent(caplog):
    result = start(FedAvg(fraction_evaluate=0.0), toy_app(), rounds=2, grid=Replaying)
    assert result.history[1].nodes_answered == ("0", "1", "2")
    assert result.history[2].nodes_answered == ("0", "2")
    assert "event=unexpected_reply" in caplog.text
    (failure,) = result.history[2].failures
    assert (failure.node, failure.reason[:8]) == ("1", "no reply")


def test_what_a_reply_says_of_itself_never_becomes_a_path(tmp_path):
    def elsewhere(message, context):
        reply = train_reply(message, context)
        reply.metadata.__dict__["_group_id"] = "../../../escaped"
        return reply

    folder = tmp_path / "a" / "b" / "c"
    with pytest.raises(Exception, match="min_nodes"):
        start(FedAvg(min_nodes=3, checkpoint_dir=folder), toy_app({0: elsewhere, 1: refuses}))
    outside = [p for p in tmp_path.rglob("*") if p.is_file() and folder not in p.parents]
    assert outside == []
    # And a resumed run finds it, under the key of the question.
    kept = sorted(path.name for path in (folder / "inbox").iterdir())
    assert [name[:9] for name in kept] == ["1-train-0", "1-train-2"]


def refuses(message, context):
    raise RuntimeError("no")


def boastful(message, context):
    return train_reply(message, context, metrics={"num-examples": 10**6})


def test_a_million_claimed_examples_own_the_mean_unless_they_are_capped():
    """Nodes add 1, 2, 3. Uncapped node 1 counts a million times; capped at 3: (1 + 6 + 9) / 7."""
    app = toy_app({1: boastful})
    for tolerance, expected in ((Tolerance(), 2.0), (Tolerance(max_examples=3), 16 / 7)):
        result = start(FedAvg(tolerance=tolerance), app)
        moved = weight(result) - small_model()["weight"]
        assert moved == pytest.approx(np.full((2, 3), expected), abs=1e-4)
    loss = result.train_metrics_clientapp[1]["loss"]
    assert loss == pytest.approx((1 * 1 + 3 * 1 / 2 + 3 * 1 / 3) / 7)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([0.5, float("nan")], "metric 'losses' is nan, expected a finite number"),
        ([0.5, 1e300], "metric 'losses' is 1e+300, expected at most 1e+100"),
        ([0.0] * 100_001, "the lists have 100,001 numbers or more, expected at most 100,000"),
    ],
)
def test_a_list_that_no_honest_node_has_is_refused_by_node_and_name(losses, words):
    result = start(FedAvg(), listing_app({1: losses}, "train"), nodes=4)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert words in failure.reason
    assert result.train_metrics_clientapp[1]["losses"] == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize(
    ("losses", "handler"), [([], "train"), (0.5, "train"), ([0.5], "evaluate")]
)
def test_a_list_that_does_not_fit_is_left_out_and_its_node_named(losses, handler, caplog):
    """Its node's model counts: 1, 2, 3, 4 with as many examples are 30/10."""
    result = start(FedAvg(), listing_app({1: losses}, handler), nodes=4)
    assert "event=metrics_left_out metrics=losses nodes=1" in caplog.text
    assert result.failures == ()
    told = getattr(result, f"{handler}_metrics_clientapp")
    assert told[1] == {"loss": pytest.approx(0.5)}
    assert weight(result) == pytest.approx(small_model()["weight"] + 3)


def test_a_metric_that_one_node_keeps_to_itself_or_makes_up_is_left_out():
    seen = []

    def note(replies, key):
        seen.append([set(reply["metrics"]) for reply in replies])
        return MetricRecord({"nodes": len(replies)})

    app = toy_app({1: lambda m, c: train_reply(m, c, metrics={"mine": 1.0})})
    for strategy in (FedAvg(), FedAvg(train_metrics_aggr_fn=note)):
        result = start(strategy, app)
        assert "mine" not in result.train_metrics_clientapp[1]
    assert seen == [[{"num-examples", "loss"}] * 3]


def listing_app(odd, handler):
    """Return an app whose nodes report the list ``losses``; some have another one."""
    app = ClientApp()

    def metrics_of(context):
        node = context.node_config["partition-id"]
        losses = odd.get(node, [0.5, 0.25])
        return MetricRecord({"num-examples": node + 1, "loss": 0.5, "losses": losses})

    @app.train()
    def train(message, context):
        reply = train_reply(message, context)
        if handler == "train":
            reply.content["metrics"] = metrics_of(context)
        return reply

    @app.evaluate()
    def evaluate(message, context):
        honest = MetricRecord({"num-examples": 1, "loss": 0.5})
        told = metrics_of(context) if handler == "evaluate" else honest
        return Message(RecordDict({"metrics": told}), reply_to=message)

    return app
