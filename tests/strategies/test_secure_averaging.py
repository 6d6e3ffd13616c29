"""Means of models that the server makes of secure sums."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from gems_flwr import (
    FedAvg,
    InProcessGrid,
    LocalModels,
    MissingModError,
    OneShotAverage,
    OptionError,
    RoundFailedError,
    SecureSum,
    fault_reply_mod,
    secure_sum_mod,
)
from gems_flwr.wire.keys import SUMMAND, WORDS
from gems_flwr.wire.secure_messages import stage_word

STAGES = ("keys", "shares", "mask", "reveal")


def losing(stage, nodes):
    """Return a mod that loses the messages of a stage on some nodes, as a broken line would."""

    def mod(message, context, call_next):
        here = context.node_config["partition-id"]
        if stage_word(message.content) == stage and here in nodes:
            raise ConnectionError("gone")
        return call_next(message, context)

    return mod


def after_answering(stage, nodes):
    """Return a mod that loses the answers to a stage on some nodes."""

    def mod(message, context, call_next):
        at = stage_word(message.content)
        reply = call_next(message, context)
        if at == stage and context.node_config["partition-id"] in nodes:
            raise ConnectionError("gone after the work")
        return reply

    return mod


def app(*outer, mod=None, step=None, inner=()):
    client = ClientApp(mods=[*outer, mod or secure_sum_mod(), *inner])

    @client.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        arrays = message.content["arrays"].to_numpy_ndarrays()
        new = [a + (step or 0.25) * (node + 1) if a.dtype.kind == "f" else a + node for a in arrays]
        metrics = MetricRecord({"num-examples": 10 * (node + 1), "train_loss": float(node)})
        content = RecordDict({"arrays": ArrayRecord(new), "metrics": metrics})
        return Message(content, reply_to=message)

    @client.evaluate()
    def evaluate(message, context):
        node = context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": 10 * (node + 1), "accuracy": node / 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return client


def initial():
    return ArrayRecord([np.zeros((2, 3), np.float32), np.ones(4), np.array([5, 7])])


def started(client, nodes=5, strategy=None, rounds=2, **options):
    strategy = strategy or FedAvg(secure=SecureSum(), **options)
    return strategy.start(InProcessGrid(client, nodes), initial(), num_rounds=rounds)


def test_the_mean_is_that_of_fedavg_within_the_grid_of_fixed_point():
    """A step of the grid is 5 · 8 / 2^39, and 150 of 2^24 examples make 8e-6 for all roundings."""
    secure = started(app())
    plain = FedAvg().start(InProcessGrid(app(), 5), initial(), num_rounds=2)
    for a, b in zip(
        secure.arrays.to_numpy_ndarrays(), plain.arrays.to_numpy_ndarrays(), strict=True
    ):
        assert a.dtype == b.dtype
        assert np.abs(a - b).max() < 2 * 8.2e-6
    assert secure.history[1].train_metrics == pytest.approx(plain.history[1].train_metrics)
    assert secure.history[2].evaluate_metrics == pytest.approx(plain.history[2].evaluate_metrics)


def test_two_runs_with_one_seed_give_the_same_digits_under_different_masks():
    first, second = (started(app()).arrays.to_numpy_ndarrays() for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def expected_mean(nodes, rounds=1):
    """Every node adds 0.25 (i + 1) and counts 10 (i + 1)."""
    weights = [10 * (i + 1) for i in nodes]
    return sum(w * 0.25 * (i + 1) for i, w in zip(nodes, weights, strict=True)) / sum(weights)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lose", [losing, after_answering])
def test_a_node_may_drop_at_every_stage(stage, lose):
    """Who is lost after its masked numbers came in is in the sum; who is lost before is not."""
    result = started(app(lose(stage, {1})), rounds=1, fraction_evaluate=0.0)
    left = [0, 1, 2, 3, 4] if stage == "reveal" else [0, 2, 3, 4]
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean(left), abs=2e-5)
    assert [failure.node for failure in result.history[1].failures] == ["1"]


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_nothing_is_opened_and_the_round_says_so(stage):
    """Of five nodes four must be left at two thirds."""
    strategy = FedAvg(secure=SecureSum(), fraction_evaluate=0.0)
    opened = []
    total = strategy.sums.total
    strategy.sums.total = lambda *a, **k: opened.append(total(*a, **k))
    with pytest.raises(RoundFailedError, match="failed") as failed:
        started(app(losing(stage, {1, 3, 4})), strategy=strategy, rounds=1)
    assert not opened
    assert {failure.node for failure in failed.value.failures} >= {"1", "3", "4"}
    assert "was not opened" in str(failed.value)


def test_a_stricter_threshold_bears_fewer_drop_outs():
    client = app(losing("mask", {1}))
    with pytest.raises(RoundFailedError, match="threshold is 1 of 5"):
        started(client, rounds=1, strategy=FedAvg(secure=SecureSum(threshold=1.0)))


def test_the_server_sees_nothing_of_a_node_but_masked_numbers():
    """Words of one node over a run: low bits uniform, by chi-square with 255 degrees of freedom."""
    seen, others = [], []

    def listen(message, context, call_next):
        at = stage_word(message.content)
        reply = call_next(message, context)
        words = reply.content.get(SUMMAND, {}).get(WORDS)
        if words is not None:
            seen.append(np.frombuffer(words, np.uint8))
        others.append((at, sorted(reply.content)))
        return reply

    big = ArrayRecord([np.zeros(20_000, np.float32)])
    strategy = FedAvg(secure=SecureSum(), fraction_evaluate=0.0)
    strategy.start(InProcessGrid(app(listen), 3), big, num_rounds=1)
    assert len(seen) == 3
    for words in seen:
        low = words[:80_000].reshape(-1, 4)
        for byte in (0, 1, 3):
            counts = np.bincount(low[:, byte], minlength=256)
            statistic = ((counts - 20_000 / 256) ** 2 / (20_000 / 256)).sum()
            assert abs(statistic - 255) < 6 * np.sqrt(510)
    # And no record beside them but keys, letters, shares, names of nodes and of metrics.
    allowed = {"secure-sum", "node", "summand", "metric-names"}
    assert all(set(records) <= allowed for _, records in others)


def test_what_was_received_is_written_nowhere(tmp_path):
    strategy = FedAvg(secure=SecureSum(), checkpoint_dir=tmp_path)
    started(app(), strategy=strategy)
    assert not list(tmp_path.rglob("inbox/*"))


def test_a_weight_that_moves_too_far_is_refused_without_telling_how_far():
    with pytest.raises(RoundFailedError) as failed:
        started(app(step=100.0), rounds=1)
    reason = failed.value.failures[0].reason
    assert "and the ring holds" in reason
    assert "SecureSum(clip=…)" in reason
    assert not set("123456789") & set(reason.split(": ", 1)[1])


def test_an_app_without_the_mod_is_told_which():
    with pytest.raises(RoundFailedError, match=r"write ClientApp\(mods=\[secure_sum_mod\(\)"):
        started(app(mod=fault_reply_mod), rounds=1)
    with pytest.raises(MissingModError, match=r"write ClientApp\(mods=\[secure_sum_mod\(\)"):
        started(app(mod=lambda message, context, call_next: call_next(message, context)), rounds=1)


def test_a_node_that_answers_with_sums_alone_refuses_the_rest():
    client = app(mod=secure_sum_mod(only_sums=True))
    with pytest.raises(RoundFailedError, match="only_sums"):
        started(client, strategy=FedAvg(), rounds=1)
    started(client, rounds=1)


def test_a_node_may_ask_for_more_company():
    client = app(mod=secure_sum_mod(least_nodes=6))
    with pytest.raises(RoundFailedError, match="least_nodes"):
        started(client, rounds=1)
    with pytest.raises(OptionError, match="at least 3"):
        secure_sum_mod(least_nodes=2)


def test_two_nodes_are_too_few():
    with pytest.raises(
        RoundFailedError, match="2 of 2 nodes exchanged keys, it takes three at least"
    ):
        started(app(), nodes=2, rounds=1)


def test_one_shot_average_is_the_mean_of_one_round():
    result = OneShotAverage(secure=SecureSum()).start(InProcessGrid(app(), 3), initial())
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean([0, 1, 2]), abs=2e-5)


@pytest.mark.parametrize(
    "options",
    [{"robust": "median"}, {"train_metrics_aggr_fn": lambda replies, key: MetricRecord()}],
)
def test_what_looks_at_single_nodes_is_refused(options):
    with pytest.raises(OptionError, match="secure sums"):
        FedAvg(secure=SecureSum(), **options)


def test_flowers_own_noise_goes_inside_the_masks():
    """Without noise its mod clips: every step of length 0.25 (i + 1) sqrt(10) becomes 0.5."""
    clip = LocalDpMod(clipping_norm=0.5, sensitivity=0.0, epsilon=1.0, delta=1e-5)
    client = app(inner=[clip])
    model = ArrayRecord([np.zeros((2, 5))])
    result = FedAvg(secure=SecureSum(), fraction_evaluate=0.0).start(
        InProcessGrid(client, 4), model, num_rounds=1
    )
    [weights] = result.arrays.to_numpy_ndarrays()
    assert weights == pytest.approx(0.5 / np.sqrt(10), abs=2e-5)


def test_a_strategy_of_single_models_is_refused():
    with pytest.raises(OptionError, match="LocalModels looks at the replies of single nodes"):
        LocalModels(secure=SecureSum())


def test_a_node_that_lost_its_state_is_left_out_and_named():
    def forgetful(message, context, call_next):
        if stage_word(message.content) == "mask" and context.node_config["partition-id"] == 2:
            context.state.clear()
        return call_next(message, context)

    result = started(app(forgetful), rounds=1, fraction_evaluate=0.0)
    [failure] = result.history[1].failures
    assert failure.node == "2"
    assert "it has restarted" in failure.reason


@pytest.mark.parametrize(("share", "evaluated"), [(0.4, False), (0.6, True)])
def test_a_few_nodes_evaluate_in_a_sum_of_their_own(share, evaluated):
    """Two of five are no sum: the model stays, and nothing is told of it. Three are one."""
    result = started(app(), rounds=1, fraction_evaluate=share)
    assert bool(result.history[1].evaluate_metrics) is evaluated
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean(range(5)), abs=2e-5)


def test_the_order_of_answers_changes_nothing():
    grid = InProcessGrid(app(), 5)
    send = grid.push_messages
    result = FedAvg(secure=SecureSum()).start(grid, initial(), num_rounds=1)
    other = InProcessGrid(app(), 5)
    other.push_messages = lambda messages: send.__func__(other, list(messages)[::-1])
    again = FedAvg(secure=SecureSum()).start(other, initial(), num_rounds=1)
    pairs = zip(result.arrays.to_numpy_ndarrays(), again.arrays.to_numpy_ndarrays(), strict=True)
    assert all((a == b).all() for a, b in pairs)


def test_it_costs_less_than_twice_the_plain_bytes():
    """650 weights, as of the digits: masked numbers have as many bytes as floats."""
    model = ArrayRecord([np.zeros((10, 64), np.float32), np.zeros(10, np.float32)])
    up = [
        FedAvg(fraction_evaluate=0.0, secure=secure)
        .start(InProcessGrid(app(), 5), model, num_rounds=1)
        .traffic.bytes_up
        for secure in (None, SecureSum())
    ]
    assert up[1] < 2 * up[0]


def test_options_are_checked():
    for wrong in ({"threshold": 0.5}, {"neighbours": 1}, {"clip": 0}, {"bits": 65}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            SecureSum(**wrong)


def test_a_stage_that_cannot_be_read_is_refused():
    from gems_flwr.errors import SecureSumError
    from gems_flwr.wire.secure_messages import take_stage

    for said in (
        {"stage": "keys", "session": "s", "sums": 10**9},
        {"stage": "keys", "session": "", "sums": 1},
        {"stage": "what", "session": "s", "sum": 0, "survivors": b""},
        {"stage": "mask", "session": "s", "sum": 0, "present": b"abc"},
        {"stage": "mask", "session": "s", "sum": 0, "present": b"aaaa"},
        {"stage": "shares", "session": "s", "index": 0, "threshold": 0.7, "peers": b"\x01\x00"},
    ):
        with pytest.raises(SecureSumError, match="cannot be read"):
            take_stage(RecordDict({"secure-sum": ConfigRecord(said)}))
