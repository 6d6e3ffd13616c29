"""Sums under masks: the same digits as plain ones, and nothing opened below the threshold."""

import dataclasses
import json

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from helpers_secure import (
    STAGES,
    averaging_app,
    initial_model,
    losing,
    stage_of,
    write_keys,
)

from gems_flwr import (
    FedAvg,
    InProcessGrid,
    LocalModels,
    NodeLimits,
    SecureSum,
)
from gems_flwr.carriers.masked import MASKS, Keys, Open, Shorten
from gems_flwr.core.sums import SUMMAND, WORDS, PlainSums
from gems_flwr.errors import BadReplyError, OptionError, RoundFailedError
from gems_flwr.secure import AdvertisedKeys, NodeSecrets, SumSession

SESSION = "s"


def started(client, nodes=5, strategy=None, rounds=2, **options):
    strategy = strategy or FedAvg(secure=SecureSum(), **options)
    return strategy.start(InProcessGrid(client, nodes), initial_model(), num_rounds=rounds)


def digits(result):
    return [array.tobytes() for array in result.arrays.to_numpy_ndarrays()]


def expected_mean(nodes):
    """Every node adds 0.25 (i + 1) and counts 10 (i + 1)."""
    weights = [10 * (i + 1) for i in nodes]
    return sum(w * 0.25 * (i + 1) for i, w in zip(nodes, weights, strict=True)) / sum(weights)


# --- the same digits ------------------------------------------------------------------------


def test_the_mean_is_that_of_fedavg_within_the_grid_of_fixed_point():
    """A step of the grid is 5 · 8 / 2^39, and 150 of 2^24 examples make 8e-6 for all roundings."""
    secure = started(averaging_app())
    plain = started(averaging_app(), strategy=FedAvg())
    for a, b in zip(
        secure.arrays.to_numpy_ndarrays(), plain.arrays.to_numpy_ndarrays(), strict=True
    ):
        assert a.dtype == b.dtype
        assert np.abs(a - b).max() < 2 * 8.2e-6
    assert secure.history[1].train_metrics == pytest.approx(plain.history[1].train_metrics)
    assert secure.history[2].evaluate_metrics == pytest.approx(plain.history[2].evaluate_metrics)


def test_masked_sums_have_the_digits_of_plain_ones(monkeypatch):
    """The same question over `PlainSums`: what differs is the carrier alone."""
    masked = [started(averaging_app()) for _ in range(2)]
    monkeypatch.setattr(FedAvg, "_new_sums", lambda strategy: PlainSums())
    plain = started(averaging_app())
    assert digits(masked[0]) == digits(masked[1]) == digits(plain)
    assert masked[0].history[2].evaluate_metrics == plain.history[2].evaluate_metrics
    assert masked[0].history[1].exchanges == (
        *("secure-keys", "model-sum", "secure-opening"),
        *("metrics-sum", "secure-opening"),
    )


def test_flowers_own_noise_goes_inside_the_masks():
    """Without noise its mod clips: every step of length 0.25 (i + 1) sqrt(10) becomes 0.5."""
    clip = LocalDpMod(clipping_norm=0.5, sensitivity=0.0, epsilon=1.0, delta=1e-5)
    result = FedAvg(secure=SecureSum(), fraction_evaluate=0.0).start(
        InProcessGrid(averaging_app(inner=[clip]), 4), ArrayRecord([np.zeros((2, 5))]), num_rounds=1
    )
    [weights] = result.arrays.to_numpy_ndarrays()
    assert weights == pytest.approx(0.5 / np.sqrt(10), abs=2e-5)


# --- drop-outs ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_node_may_drop_at_every_stage(stage):
    """Who is lost after its masked numbers came in is in the sum; who is lost before is not."""
    client = averaging_app(losing(stage, {1}))
    result = started(client, rounds=1, fraction_evaluate=0.0)
    left = [0, 1, 2, 3, 4] if stage == "secure-opening" else [0, 2, 3, 4]
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean(left), abs=2e-5)
    assert [failure.node for failure in result.history[1].failures] == ["1"]


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_nothing_is_opened_and_the_round_says_so(stage, monkeypatch):
    """Of five nodes four must be left at two thirds."""
    opened = []
    monkeypatch.setattr(SumSession, "total", lambda *a: opened.append(a))
    with pytest.raises(RoundFailedError, match="was not opened") as failed:
        started(averaging_app(losing(stage, {1, 3, 4})), rounds=1)
    assert not opened
    assert {failure.node for failure in failed.value.failures} >= {"1", "3", "4"}


def test_a_stricter_threshold_bears_fewer_drop_outs():
    strategy = FedAvg(secure=SecureSum(threshold=1.0))
    with pytest.raises(RoundFailedError, match="threshold is 1 of 5"):
        started(averaging_app(losing("mask", {1})), rounds=1, strategy=strategy)


def test_fewer_than_min_nodes_open_nothing():
    with pytest.raises(RoundFailedError, match=r"4 of 5 nodes gave .*min_nodes 5"):
        started(averaging_app(losing("mask", {1})), rounds=1, min_nodes=5)


def test_two_nodes_are_too_few():
    said = "a secure sum takes three nodes at least, got 2"
    with pytest.raises(RoundFailedError, match=said):
        started(averaging_app(), nodes=2, rounds=1)


def test_a_node_that_was_lost_is_back_in_the_next_round():
    def lost_once(message, context, call_next):
        config = message.content["config"]
        first = stage_of(message.content) == "mask" and config["server-round"] == 1
        if first and context.node_config["partition-id"] == 3:
            raise ConnectionError("gone")
        return call_next(message, context)

    result = started(averaging_app(lost_once), fraction_evaluate=0.0)
    assert [failure.node for failure in result.history[1].failures] == ["3"]
    assert not result.history[2].failures


def test_a_node_that_lost_its_state_is_left_out_and_named():
    def forgetful(message, context, call_next):
        if stage_of(message.content) == "mask" and context.node_config["partition-id"] == 2:
            context.state.clear()
        return call_next(message, context)

    result = started(averaging_app(forgetful), rounds=1, fraction_evaluate=0.0)
    [failure] = result.history[1].failures
    assert failure.node == "2"
    assert "it has restarted" in failure.reason


@pytest.mark.parametrize(("share", "evaluated"), [(0.4, False), (0.6, True)])
def test_a_few_nodes_evaluate_in_a_sum_of_their_own(share, evaluated):
    """Two of five are no sum: the model stays, and nothing of it is reported. Three are one."""
    result = started(averaging_app(), rounds=1, fraction_evaluate=share)
    assert bool(result.history[1].evaluate_metrics) is evaluated
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean(range(5)), abs=2e-5)


# --- what is seen ---------------------------------------------------------------------------


def test_the_server_sees_nothing_of_a_node_but_masked_numbers():
    """Words of one node over a run: low bits uniform, by chi-square with 255 degrees of freedom."""
    seen, others = [], set()

    def listen(message, context, call_next):
        reply = call_next(message, context)
        words = reply.content.get(SUMMAND, {}).get(WORDS)
        if words is not None:
            seen.append(np.frombuffer(words, np.uint8))
        others.update(reply.content)
        return reply

    big = ArrayRecord([np.zeros(20_000, np.float32)])
    strategy = FedAvg(secure=SecureSum(bits=32), fraction_evaluate=0.0)
    strategy.start(InProcessGrid(averaging_app(listen), 3), big, num_rounds=1)
    assert len(seen) == 3
    for words in seen:
        low = words[:80_000].reshape(-1, 4)
        for byte in (0, 1, 3):
            counts = np.bincount(low[:, byte], minlength=256)
            statistic = ((counts - 20_000 / 256) ** 2 / (20_000 / 256)).sum()
            assert abs(statistic - 255) < 6 * np.sqrt(510)
    # And no record beside them but keys, letters, shares, names of nodes and of metrics.
    assert others <= {"secure-sum", "node", SUMMAND, "metric-names"}


def test_what_was_received_is_written_nowhere(tmp_path):
    started(averaging_app(), strategy=FedAvg(secure=SecureSum(), checkpoint_dir=tmp_path))
    assert not list(tmp_path.rglob("inbox/*"))


@pytest.mark.parametrize("where", ["handler", "reply"])
def test_an_error_under_masks_reaches_the_server_without_numbers(where):
    def failing(message, context, call_next):
        fault = "the loss of sample 17 is 3.25"
        if where == "handler":
            raise ValueError(fault)
        if where == "reply":
            return Message(Error(code=0, reason=f"failed: {fault}"), reply_to=message)
        return call_next(message, context)

    with pytest.raises(RoundFailedError) as failed:
        started(averaging_app(inner=[failing]), rounds=1)
    reason = failed.value.failures[0].reason
    assert "the loss of sample" in reason
    assert not set("123456789") & set(reason.split(": ", 1)[1])


def test_a_step_beyond_the_ring_is_clipped_and_only_the_node_says_so(caplog):
    """All five, at 8: a refusal would tell the server whose steps are longer than it says."""
    [floats, *_] = started(averaging_app(step=100.0), rounds=1).arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(8.0, abs=1e-4)
    assert "and the ring holds 8" in caplog.text


# --- limits, keys and mods ------------------------------------------------------------------


def test_a_node_that_answers_with_sums_alone_refuses_the_rest():
    client = averaging_app(limits=NodeLimits(only_sums=True))
    with pytest.raises(RoundFailedError, match="only_sums"):
        started(client, strategy=FedAvg(), rounds=1)
    started(client, rounds=1)


def test_a_node_may_ask_for_more_company():
    with pytest.raises(RoundFailedError, match="least_nodes"):
        started(averaging_app(limits=NodeLimits(least_nodes=6)), rounds=1)
    with pytest.raises(OptionError, match="at least 3"):
        NodeLimits(least_nodes=2)


@pytest.fixture
def configs(tmp_path):
    """Return node configs of five nodes that sign and trust each other."""
    write_keys(tmp_path, 5)
    trusted = {"num-partitions": 5, "trusted-keys": str(tmp_path / "trusted")}
    return [{"partition-id": n, "signing-key": str(tmp_path / str(n)), **trusted} for n in range(5)]


def test_nodes_that_sign_are_summed_and_one_that_does_not_is_left_out(configs):
    """It is trusted by none of four; the sum begins again without it."""
    strategy = FedAvg(secure=SecureSum(), fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(averaging_app(), configs), initial_model(), num_rounds=1)
    assert result.history[1].exchanges == ("secure-keys", "model-sum", "secure-opening")
    assert digits(result) == digits(started(averaging_app(), rounds=1, fraction_evaluate=0.0))
    for key in ("signing-key", "trusted-keys"):
        del configs[4][key]
    result = strategy.start(InProcessGrid(averaging_app(), configs), initial_model(), num_rounds=1)
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean(range(4)), abs=2e-5)
    [failure] = result.history[1].failures
    assert failure.node == "4"
    assert "not among the 5 trusted ones" in failure.reason


def test_a_node_that_trusts_no_other_is_left_out_and_they_go_on(configs, tmp_path):
    configs[2]["trusted-keys"] = str(tmp_path / "trusted" / "2.pub")
    strategy = FedAvg(secure=SecureSum(), fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(averaging_app(), configs), initial_model(), num_rounds=1)
    assert {failure.node for failure in result.history[1].failures} == {"2"}


@pytest.mark.parametrize(("threshold", "opened"), [(0.6, False), (0.67, True)])
def test_a_node_refuses_a_threshold_below_its_own(threshold, opened):
    strategy = FedAvg(secure=SecureSum(threshold=threshold), fraction_evaluate=0.0)
    if opened:
        assert not started(averaging_app(), strategy=strategy, rounds=1).failures
    else:
        with pytest.raises(RoundFailedError, match="least_threshold"):
            started(averaging_app(), strategy=strategy, rounds=1)


# --- hostile messages -----------------------------------------------------------------------


def lying(stage, change, node=1):
    """Return a mod by which a node changes its reply to a stage."""

    def mod(message, context, call_next):
        hit = stage_of(message.content) == stage and context.node_config["partition-id"] == node
        reply = call_next(message, context)
        return Message(change(reply.content), reply_to=message) if hit else reply

    return mod


def entry(key, value):
    """Return a change that puts something else in the place of an entry."""

    def change(content):
        where = SUMMAND if key == WORDS else "secure-sum"
        record = ConfigRecord({**content[where], key: value})
        return RecordDict({**content, where: record})

    return change


def keys_with(**changed):
    def change(content):
        keys = AdvertisedKeys.from_text(content["secure-sum"]["keys"])
        return entry("keys", dataclasses.replace(keys, **changed).to_text())(content)

    return change


def letters(change, some=slice(None)):
    def changed(content):
        sent = list(content["secure-sum"]["letters"])
        sent[some] = [change(letter) for letter in sent[some]]
        return entry("letters", sent)(content)

    return changed


OTHERS = [n for i, n in enumerate(InProcessGrid(averaging_app(), 5).get_node_ids()) if i != 1]
# A share of itself alone, and the other letters are said to be unreadable.
REFUSED = {"shares": bytes(17), "why": "\x1b[31m"}


def accusing(reply, accused):
    content = RecordDict({"secure-sum": ConfigRecord({**reply, "accused": accused})})
    return lambda _: content


NO_RECORD = RecordDict({"secure-sum": MetricRecord()})
# Stage, what node 1 of five does there, and whether its numbers are in the sum that is opened.
INSIDER = {
    "no keys": ("secure-keys", lambda content: RecordDict(), False),
    "keys of another form": ("secure-keys", entry("keys", b"abc"), False),
    "endless keys": ("secure-keys", entry("keys", "A" * 400_000 + ".."), False),
    "a zero key": ("secure-keys", keys_with(channel=bytes(32)), False),
    "a key of small order": ("secure-keys", keys_with(channel=b"\1" + bytes(31)), False),
    "garbage for a signature of keys": ("secure-keys", keys_with(signature=b"x" * 64), False),
    "no signature of keys": ("secure-keys", keys_with(signature=b"", signer=b""), False),
    "digests of no seed": ("secure-keys", keys_with(digests=(bytes(32),) * 2), False),
    "letters of another length": ("mask", letters(lambda letter: b"abc"), False),
    "reversed letters": ("mask", letters(lambda letter: letter[::-1]), False),
    "two reversed letters": ("mask", letters(lambda letter: letter[::-1], slice(2)), False),
    "one reversed letter": ("mask", letters(lambda letter: letter[::-1], slice(1)), True),
    "a short summand": ("mask", entry(WORDS, b"abc"), False),
    "a model for a summand": ("mask", lambda content: RecordDict({"a": initial_model()}), False),
    "garbage for a signature": ("mask", entry("signature", b"x" * 64), False),
    "no signature": ("mask", entry("signature", b""), False),
    "all keys accused": ("mask", accusing(REFUSED, json.dumps(OTHERS)), False),
    "nonsense accused": ("mask", accusing(REFUSED, '["a", [1]]'), False),
    "no shares": ("secure-opening", lambda content: NO_RECORD, True),
    "too many shares": ("secure-opening", entry("shares", bytes(17 * 99)), True),
    "wrong shares": ("secure-opening", entry("shares", bytes(17 * 5)), True),
    "nonsense for shares": ("secure-opening", accusing({"shares": b""}, "[[]]"), True),
    "all letters accused": ("secure-opening", accusing(REFUSED, json.dumps(OTHERS)), True),
}
# Those that one node's word stands against another's in, or that a node without a key may do.
UNSEEN = {"one reversed letter"}


@pytest.mark.parametrize("lie", INSIDER)
def test_one_insider_ends_no_run_and_no_one_else_is_left_out(lie, configs):
    """Four honest nodes of five, who sign: the sum is theirs, or that of all five."""
    stage, change, stays = INSIDER[lie]
    strategy = FedAvg(secure=SecureSum(), fraction_evaluate=0.0)
    client = averaging_app(lying(stage, change))
    result = strategy.start(InProcessGrid(client, configs), initial_model(), num_rounds=1)
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    left = range(5) if stays else [0, 2, 3, 4]
    assert floats == pytest.approx(expected_mean(left), abs=2e-5)
    failures = {failure.node for failure in result.history[1].failures}
    assert failures == (set() if lie in UNSEEN else {"1"})


@pytest.mark.parametrize("nodes", [4, 5, 7])
def test_a_node_that_shares_out_another_seed_than_its_own_is_left_out(nodes):
    """At fault if a share can be spared for each who may lie: one of four nodes, two of seven."""

    def dealer(message, context, call_next):
        keys = stage_of(message.content) == "secure-keys"
        reply = call_next(message, context)
        if keys and context.node_config["partition-id"] == 1:
            known = NodeSecrets.from_json(context.state["secure-sum"]["text"])
            own = dataclasses.replace(known.own, digests=(bytes(32),) * 2)
            known = dataclasses.replace(known, own=own)
            context.state["secure-sum"] = ConfigRecord({"text": known.to_json()})
            reply.content["secure-sum"] = ConfigRecord({"keys": own.to_text()})
        return reply

    result = started(averaging_app(dealer), nodes=nodes, rounds=2, fraction_evaluate=0.0)
    [failure] = result.history[1].failures
    assert failure.node == "1"
    assert ("breaks the protocol" in failure.reason) is (nodes != 5)
    # It stays out of the run, and honest nodes go on with the keys that they have.
    assert not result.history[2].failures
    assert result.history[2].exchanges == ("model-sum", "secure-opening")


LATE = {
    "keys of another length": entry("keys", bytes(31)),
    "no keys": entry("keys", b""),
    "garbage for a signature": entry("signature", b"x" * 64),
    "no record": lambda content: NO_RECORD,
}


@pytest.mark.parametrize("lie", LATE)
def test_an_insider_that_agrees_to_a_shorter_list_in_a_wrong_way_is_lost_as_well(lie):
    """Of seven it takes five: one is lost, and one lies about what it had in common with it."""
    client = averaging_app(losing("mask", {3}), lying("secure-list", LATE[lie]))
    result = started(client, nodes=7, rounds=1, fraction_evaluate=0.0)
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean([0, 2, 4, 5, 6]), abs=2e-5)
    assert {failure.node for failure in result.history[1].failures} == {"1", "3"}
    assert result.history[1].exchanges[2:] == ("secure-list", "secure-list", "secure-opening")


def test_nodes_lost_at_every_stage_of_one_sum_are_borne_together():
    """Of nine it takes six: one lost with its numbers, one agreeing to the list, one opening."""
    lost = [losing(stage, {i}) for i, stage in enumerate(["mask", "secure-list", "secure-opening"])]
    result = started(averaging_app(*lost), nodes=9, rounds=1, fraction_evaluate=0.0)
    [floats, *_] = result.arrays.to_numpy_ndarrays()
    assert floats == pytest.approx(expected_mean(range(2, 9)), abs=2e-5)


@pytest.mark.parametrize(
    ("question", "values"),
    [
        (Keys, {"session": SESSION, "sums": 10**9}),
        (Keys, {"session": "", "sums": 1}),
        (Shorten, {"session": 7, "number": 0, "members": (1,)}),
        (Shorten, {"session": SESSION, "number": 0, "members": ("1,2",)}),
        (Open, {"session": SESSION, "number": 0, "members": (1, 1)}),
        (Open, {"session": SESSION, "number": True, "members": (1,)}),
    ],
)
def test_questions_of_a_server_that_cannot_be_meant_are_refused(question, values):
    with pytest.raises(OptionError, match="must be"):
        question(**values)


@pytest.mark.parametrize(
    "masks",
    [
        ConfigRecord({}),
        ConfigRecord({"text": '["s", 0, ["a", "b"], null]'}),
        ConfigRecord({"text": '["s", 0, [1, 2], "{}"]'}),
    ],
)
def test_a_request_for_masks_that_cannot_be_read_is_an_error_reply(masks):
    """No node answers in the clear because it does not understand that it should not."""

    def garbled(message, context, call_next):
        if stage_of(message.content) == "mask":
            del message.content[MASKS]
            message.content[MASKS] = masks
        return call_next(message, context)

    with pytest.raises(RoundFailedError, match="cannot be read"):
        started(averaging_app(garbled), rounds=1)


def test_a_question_that_is_no_sum_is_not_answered_under_masks():
    def swapped(message, context, call_next):
        if stage_of(message.content) == "mask":
            del message.content["question"]
        return call_next(message, context)

    with pytest.raises(RoundFailedError, match="cannot be summed"):
        started(averaging_app(swapped), rounds=1)


def test_what_is_read_names_the_key():
    keys = NodeSecrets.begin(SESSION, 1).own
    content = RecordDict({"secure-sum": ConfigRecord({"keys": keys.to_text()})})
    assert Keys(SESSION, 1).read(content) == keys
    with pytest.raises(BadReplyError, match="'keys' are for 1 sums, expected 2"):
        Keys(SESSION, 2).read(content)


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"robust": "median"}, {"train_metrics_aggr_fn": lambda replies, key: MetricRecord()}],
)
def test_what_looks_at_single_nodes_is_refused(options):
    with pytest.raises(OptionError, match="secure sums"):
        FedAvg(secure=SecureSum(), **options)


def test_a_strategy_of_single_models_is_refused():
    with pytest.raises(OptionError, match="LocalModels looks at the replies of single nodes"):
        LocalModels(secure=SecureSum())


def test_options_are_checked():
    for wrong in ({"threshold": 0.5}, {"neighbours": 19}, {"clip": 0}, {"bits": 65}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            SecureSum(**wrong)
