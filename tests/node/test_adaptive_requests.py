"""A server that asks one node again and again, each time what the last reply suggests.

Every attack rebuilt samples, or recognised them, when nodes answered each question by itself; each
here is the attack as it was done, with the requests that a server can send.
"""

import copy
import itertools
import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from scipy.stats import rankdata
from torch import nn

from gems_flwr import Cone, Gems, InProcessGrid, Means, NodeLimits, SecureSum, good_enough_mod
from gems_flwr.core import RoundOutcome, derive_seed
from gems_flwr.core.question import Disclosure, Question
from gems_flwr.core.records import to_record
from gems_flwr.errors import RoundFailedError
from gems_flwr.node.limits import UNLIMITED
from gems_flwr.secure import Section
from gems_flwr.spaces import space_from_arrays
from gems_flwr.spaces.cone import build_cone, mean_values
from gems_flwr.spaces.cone.summed import MomentSum
from gems_flwr.spaces.question import META, SPACE
from gems_flwr.stages import Gradient, Judge, Losses
from gems_flwr.stages.gradients import LossesSum
from gems_flwr.stages.judge import JudgeSum
from gems_flwr.strategies.loop import RoundLoop

D = 8
CONSENT = NodeLimits(adaptive_answers=10)
LAYER = {"weight": np.zeros((2, D), "f4"), "bias": np.zeros(2, "f4")}


def app_of(source, **options):
    app = ClientApp(mods=[good_enough_mod(both_parts(source), **options)])

    @app.train()
    def train(message, context):
        raise NotImplementedError("moments and gradients need no training")

    return app


class Victim:
    """A node at its own limits that a hostile server has for itself, and what it gave away."""

    def __init__(self, x, y=None, limits=None, model=None, **config):
        self.x = np.asarray(x, np.float32)
        y = np.zeros(len(x), int) if y is None else y
        data = torch.from_numpy(self.x), torch.from_numpy(y)
        self.data, self.app = data, app_of(lambda _: data, model=model, limits=limits)
        self.config, self.asked, self.answered, self.refusal = config, 0, 0, ""
        self.restart()

    def restart(self):
        """What a new run leaves: nothing of the node's state in Flower."""
        self.grid = InProcessGrid(self.app, [{"name": "north", **self.config}])

    def ask(self, question, arrays):
        self.asked += 1
        about = ConfigRecord({"server-round": self.asked, "run-seed": 5})
        content = {"arrays": to_record(arrays), "config": about, **question.to_records()}
        (node,) = self.grid.get_node_ids()
        (reply,) = self.grid.send_and_receive([Message(RecordDict(content), node, "train")])
        if reply.has_error():
            self.refusal = reply.error.reason
            return None
        self.answered += 1
        return reply.content

    def cone(self, question, arrays):
        content = self.ask(question, arrays)
        if content is None:
            return None
        arrays = {key: array.numpy() for key, array in content[SPACE].items()}
        return space_from_arrays(arrays, json.loads(content[META]["text"]))

    def rebuilt(self, guesses, near=0.01):
        """How many samples some guess is near in every feature."""
        off = np.abs(self.x[:, None] - np.reshape(guesses, (-1, self.x.shape[1]))).max(axis=2)
        return int((off.min(axis=1, initial=np.inf) < near).sum())


@dataclass(kw_only=True, eq=False)
class OneSum(RoundLoop):
    """A server with one question under masks."""

    sums_replies: ClassVar[bool] = True
    question: object = None
    sections: object = None

    def play_round(self, round, state):
        total = round.total(self.question, self.sections, at_least=1)
        return RoundOutcome(state.arrays, details={"total": total.values})


class Masked(Victim):
    """A victim in sums with three nodes that the server plays, whose samples are all zero."""

    secure = SecureSum(threshold=1.0)  # all or nothing

    def __init__(self, x, y=None, limits=None, **config):
        super().__init__(x, y, limits=limits, **config)
        data = {"north": self.data}
        zero = torch.zeros(100, D), torch.zeros(100, dtype=torch.long)
        app = app_of(lambda c: data.get(c.node_config["name"], zero), limits=limits)
        names = ["north", "a", "b", "c"]
        self.grid = InProcessGrid(app, [{"name": name, **config} for name in names])

    def sum(self, question, sections, arrays):
        self.asked += 1
        server = OneSum(question=question, sections=sections, secure=self.secure, min_nodes=1)
        try:
            found = server.start(self.grid, to_record(arrays), num_rounds=1).details["total"]
        except RoundFailedError as error:
            self.refusal = str(error)
            return None
        self.answered += 1
        return found

    def ask(self, question, arrays):
        """The losses of the victim: those of the others are known to be zero."""
        asked = LossesSum(question.scale, question.direction, question.points)
        points = len(question.points)
        sections = [Section("losses", (points,), 1e9, 64), Section("weights", (2,), 1e3, 64)]
        found = self.sum(asked, sections, arrays)
        return found and {"metrics": {"loss-sums": found["losses"].tolist()}}


def images(count, features=D, seed=0):
    return np.random.default_rng(seed).uniform(size=(count, features))


def isolate(count_above, width, tries=30):
    """Return thresholds between which one sample lies, by bisection; None if there is no answer."""
    low, high = -width, width
    for _ in range(tries):
        middle = (low + high) / 2
        found = count_above(middle)
        if found is None:
            return None
        if found == 2:
            return middle
        low, high = (middle, high) if found > 2 else (low, middle)
    return None


# --- gradients and losses at a layer that the server chooses ----------------------------------


def by_gradients(victim, attempts):
    """The two samples farthest along a direction, and the three: their sums differ by one."""
    guesses, rng = [], np.random.default_rng(1)
    one, steep = np.ones(D, np.float32), 1e4
    for _ in range(attempts):
        towards = rng.normal(size=D)

        def sums(threshold, towards=towards):
            layer = {"weight": np.stack([0 * towards, steep * towards]).astype("f4")}
            layer["bias"] = np.array([0, -steep * threshold], "f4")
            question = Gradient(one, np.eye(D + 1, dtype="f4"))
            content = victim.ask(question, layer)
            if content is None:  # at best because one sample was alone
                return np.zeros(D + 1) if "min_count" in victim.refusal else None
            along = np.frombuffer(content["gradient"]["along"], "<f2").reshape(2, -1)
            return along[1].astype(float) * content["metrics"]["weight-sum"]

        def above(threshold, sums=sums):
            found = sums(threshold)
            return None if found is None else round(found[-1])

        two = isolate(above, 4.0)
        if two is None:
            return guesses
        # From two samples to three, in small steps; what is between them is one sample.
        before, threshold = sums(two), two
        for _ in range(60):
            threshold -= 0.02
            now = sums(threshold)
            if round(now[-1]) == 3:
                guesses.append((now - before)[:-1])
                break
            if round(now[-1]) > 3:
                break
    return guesses


def by_losses(victim, attempts):
    """With a steep layer the loss is the margin of those that are wrong: one sample's numbers."""
    guesses, rng = [], np.random.default_rng(2)
    one, steep = np.ones(D, np.float32), 1e4

    def loss(towards, threshold):
        step = np.zeros((2, D + 1))
        step[1] = np.append(towards, -threshold) * steep
        points = np.array([[0.0, 0.0], [0.0, 1.0]])
        content = victim.ask(Losses(one, step.astype("f4"), points), LAYER)
        return None if content is None else content["metrics"]["loss-sums"][1] / steep

    for _ in range(attempts):
        towards = rng.normal(size=D)
        # Slopes are counts: how many samples are above.
        level = 4.0
        for _ in range(100):
            level -= 0.06
            value = loss(towards, level)
            if value is None:
                return guesses
            if value > 1e-3:
                break
        tilt = 1e-3
        parts = [(loss(towards + tilt * e, level) - value) / tilt for e in np.eye(D)]
        guesses.append(np.array(parts))
    return guesses


def by_scores(victim, attempts):
    """The threshold beyond which no sample is, along a direction and others next to it."""
    guesses, rng = [], np.random.default_rng(1)

    def edge(towards):
        low, high = -6.0, 6.0
        for _ in range(26):
            middle = (low + high) / 2
            layer = {"weight": np.stack([0 * towards, towards]).astype("f4")}
            content = victim.ask(Judge(), layer | {"bias": np.array([0, -middle], "f4")})
            right = content and np.frombuffer(content["counts"]["right"], "<f4")[0]
            low, high = (low, middle) if right == len(victim.x) else (middle, high)
        return high

    for _ in range(attempts):
        towards, tilt = rng.normal(size=D), 0.02
        top = edge(towards)
        guesses.append(np.array([(edge(towards + tilt * e) - top) / tilt for e in np.eye(D)]))
    return guesses


@pytest.mark.parametrize("attack", [by_gradients, by_losses, by_scores])
def test_a_layer_that_singles_out_samples_rebuilds_none(attack):
    """With open limits attacks do what they say; by default there are a hundred scores, no more."""
    x = images(40, seed=3)
    victim = Victim(x, limits=UNLIMITED)
    assert victim.rebuilt(attack(victim, 8)) >= 3
    guarded = Victim(x)
    assert guarded.rebuilt(attack(guarded, 8)) == 0
    assert guarded.answered == (100 if attack is by_scores else 0)
    limit = "allow_scores: it is 100" if attack is by_scores else "adaptive_answers: it is 0"
    assert f"limit {limit}" in guarded.refusal


@pytest.mark.parametrize("attack", [by_gradients, by_losses])
def test_an_owner_s_consent_ends_at_its_number_whatever_restarts(attack):
    """Ten answers about each class, in all runs; what is in them is rounded, and no sample."""
    victim = Victim(images(40, seed=3), limits=CONSENT)
    guesses = []
    for _ in range(5):
        guesses += attack(victim, 8)
        victim.restart()
    assert victim.answered == 10
    assert victim.rebuilt(guesses) == 0
    assert "it is 10, and the server wants 1 of a class beside the 10" in victim.refusal


def test_a_class_of_few_samples_is_in_no_gradient_and_no_loss():
    """Eight samples at least, and three roots of D / 12; of five, one reply once told all."""
    x, y = images(45, seed=4), np.repeat([0, 1], [40, 5])
    ask = Gradient(np.ones(D, "f4"), np.eye(D + 1, dtype="f4"))
    content = Victim(x, y, limits=CONSENT).ask(ask, LAYER)
    assert content["metrics"]["num-examples"] == 40
    assert content["gradient"]["withheld"] == [1]
    lonely = Victim(x[y == 1], limits=CONSENT)
    assert lonely.ask(ask, LAYER) is None
    assert "limit largest_rank: no class has the samples" in lonely.refusal


# --- masks ------------------------------------------------------------------------------------


def test_masks_among_nodes_that_no_one_signs_hide_no_adaptive_answer():
    """The server plays the other three. Consent holds as without masks: rounded, and counted."""
    x = images(40, seed=3)
    naive = Masked(x, **{"num-partitions": 4})
    assert naive.rebuilt(by_losses(naive, 3)) >= 1
    guarded, agreed = Masked(x), Masked(x, limits=CONSENT)
    for victim, answers in ((guarded, 0), (agreed, 10)):
        assert victim.rebuilt(by_losses(victim, 3)) == 0
        assert victim.answered == answers
        assert "secure=SecureSum(), for which a real node has trusted-keys" in victim.refusal


def test_under_masks_no_number_of_the_node_s_decides_whether_it_answers(caplog):
    """By refusals the server once found the largest number, and the samples of a class."""
    victim = Masked(images(40, seed=3) * 3 + 1, **{"num-partitions": 4})

    def answers(bound=1e6, least=None, total=900):
        about = MomentSum("means", least, totals=(total, 0))
        return victim.sum(about, [Section("sums-0", (D,), bound, 64)], LAYER) is not None

    assert all(answers(bound=10.0**power) for power in range(-3, 4))
    assert "expected absolute values up to" in caplog.text
    assert all(answers(least=count) for count in (2, 40, 41, 1000))
    # 32 in all are what the server says itself, whatever the node has.
    assert [answers(total=total) for total in (1, 31, 32, 41)] == [False, False, True, True]
    spoilt = np.where(victim.x > 3.9, np.inf, victim.x)
    victim = Masked(spoilt, np.arange(40) % 7, **{"num-partitions": 4})
    right = [Section("seen", (1,), 1e3, 64), Section("right", (1, 1), 1e3, 64)]
    assert answers()
    assert victim.sum(JudgeSum(), right, LAYER) is not None


def test_plain_sums_show_no_feature_that_one_sample_moves_and_are_counted():
    """Classes of 40 samples of 8 features have exact means, of which one shows a rare word."""
    x = images(40, seed=3)
    x[:, 5] = 0
    x[17, 5] = 9
    victim = Masked(x, limits=CONSENT)
    victim.secure = None
    sections = [Section(name, (D,), 1e5, 64) for name in ("sum", "squares", "sums-0")]
    sections.append(Section("counts", (2,), 1e5, 64))
    expected = np.where(np.arange(D) == 5, 0, x.sum(axis=0))
    for least in range(2, 20):
        if found := victim.sum(MomentSum("means", least), sections, LAYER):
            assert found["sums-0"] == pytest.approx(expected)
    assert victim.answered == 10
    assert "adaptive_answers" in victim.refusal


# --- layers below the head --------------------------------------------------------------------


def gate_net():
    return nn.Sequential(nn.Linear(D, 2), nn.ReLU(), nn.Linear(2, 2))


def gated(towards, threshold, steep=1.0):
    """Two units: one that lets through what is far along a direction, one more steeply."""
    weight = np.stack([towards, steep * towards]).astype("f4")
    bias = np.array([-threshold, -steep * threshold], "f4")
    head = {"2.weight": np.zeros((2, 2), "f4"), "2.bias": np.zeros(2, "f4")}
    return {"0.weight": weight, "0.bias": bias, **head}


def by_gates(victim, attempts, question=None):
    """A unit that one sample alone switches on shows that sample, direction by direction."""
    guesses, rng = [], np.random.default_rng(6)
    question = question or Cone(int8=False)
    count = len(victim.x)

    def unit(arrays, which=0):
        cone = victim.cone(question, arrays)
        if cone is None:
            return None
        mean = float(mean_values(cone)[0, which])
        return count * mean, count * (cone.covariance.dense_matrix(0)[which, which] + mean**2)

    for _ in range(attempts):
        towards, level = rng.normal(size=D), 3.0
        for _ in range(100):
            level -= 0.06
            found = unit(gated(towards, level))
            if found is None:
                return guesses
            if found[0] > 1e-3:
                break
        tilt, parts = 1e-2, []
        for e in np.eye(D):
            moved = unit(gated(towards + tilt * e, level))
            if moved is None:
                return guesses
            parts.append((moved[0] - found[0]) / tilt)
        guesses.append(np.array(parts))
    return guesses


@pytest.mark.parametrize("limits", [None, CONSENT], ids=["defaults", "with consent"])
def test_layers_below_the_head_are_the_node_s_or_the_first(limits):
    x = images(64, seed=7)
    victim = Victim(x, limits=UNLIMITED, model=gate_net)
    assert victim.rebuilt(by_gates(victim, 9, Cone(rank="full"))) >= 3
    guarded = Victim(x, limits=limits, model=gate_net)
    assert guarded.rebuilt(by_gates(guarded, 8)) == 0
    assert guarded.answered <= 1 + (10 if limits else 0)
    # The first are answered on for ever, also in a new run; of others none is.
    first = gated(np.random.default_rng(6).normal(size=D), 2.94)
    guarded.restart()
    assert guarded.ask(Cone(), first) is not None
    assert guarded.ask(Cone(), gated(np.ones(D), 0.0)) is None


def test_another_width_than_the_node_s_own_is_refused_and_its_own_layers_are_not():
    """A model that is the same each time has no first layers but its own."""
    own, victim = gate_net(), Victim(images(64), model=gate_net)
    narrow = {
        "0.weight": np.ones((1, D), "f4"),
        "0.bias": np.zeros(1, "f4"),
        "2.weight": np.zeros((2, 1), "f4"),
        "2.bias": np.zeros(2, "f4"),
    }
    assert victim.ask(Cone(), narrow) is None
    assert "adaptive_answers" in victim.refusal
    assert victim.ask(Cone(), gated(np.ones(D), 1.0)) is not None
    victim = Victim(images(64), model=lambda: copy.deepcopy(own), name="south")
    assert victim.ask(Cone(), gated(np.ones(D), 1.0)) is None
    mine = {key: value.numpy() for key, value in own.state_dict().items()}
    assert victim.ask(Cone(), mine) is not None


def test_a_unit_that_one_sample_switches_on_shows_nothing():
    """Already in the first reply: mean and variance are those that the other samples have."""
    x = images(64)
    order = np.argsort(x @ np.ones(D))
    level = float((x[order[-1]] + x[order[-2]]).sum() / 2)
    victim = Victim(x, model=gate_net)
    cone = victim.cone(Cone(int8=False), gated(np.ones(D), level))
    assert mean_values(cone) == pytest.approx(0)


@pytest.mark.parametrize("question", [Cone(int8=False), Cone(rank=1, int8=False)])
def test_a_rank_of_the_servers_choice_gets_around_no_rule(question):
    """One sample of 300 has a feature of its own; it shows nothing, whatever rank is asked for."""
    x = images(300, 20, seed=8)
    x[:, 5] = 0
    x[17, 5] = 9
    layer = {"weight": np.zeros((2, 20), "f4"), "bias": np.zeros(2, "f4")}
    cone = Victim(x).cone(question, layer)
    assert abs(mean_values(cone)[0, 5]) < 1e-6
    assert np.abs(cone.covariance.dense_matrix(0)[5, :5]).max() < 1e-6


def test_whether_the_head_is_found_depends_on_no_sample():
    """Two units of 1e30 that only some samples switch on make the output NaN for these alone."""
    switch = gated(np.eye(D)[0], 0.5)
    switch["0.weight"] *= 1e30
    switch["0.bias"] *= 1e30
    switch["2.weight"] = np.array([[1e30, -1e30], [0, 0]], "f4")
    refusals = set()
    for first in (0.0, 1.0):
        x = images(64)
        x[:2, 0] = first
        victim = Victim(x, model=gate_net)
        assert victim.ask(Cone(), gated(np.ones(D), 0.0)) is not None
        assert victim.ask(Cone(), switch) is None
        refusals.add(victim.refusal)
    assert len(refusals) == 1


def test_a_refusal_says_which_question_and_limit_and_no_number_of_the_data(caplog):
    victim = Victim(images(37))
    assert victim.ask(Cone(rank=7), LAYER) is None
    limit = "cone on node north: refused by this node's limit largest_rank: "
    assert victim.refusal.startswith(f"{limit}class … has … samples of … features")
    assert "class 0 has 37 samples of 8 features" in caplog.text
    victim = Victim(images(7))
    assert victim.ask(Cone(rank=7), LAYER) is None
    assert "expected a class with at least … samples" in victim.refusal


def test_matrices_that_no_node_can_hold_are_refused_before_they_are_built():
    """Two classes of 8,000 features: outer products of a gigabyte."""
    victim = Victim(np.zeros((4, 8000)))
    assert victim.ask(Cone(dp_epsilon=1.0), {"weight": np.zeros((2, 8000), "f4")}) is None
    assert "limit entries: matrices of 128,000,000 numbers" in victim.refusal


def test_a_private_answer_is_refused_for_nothing_that_a_sample_has():
    """Neither for a number that is none nor for a label that the layer lacks."""
    x = images(64)
    x[3] = np.inf
    y = np.zeros(64, int)
    y[5] = 7
    assert Victim(x, y).ask(Cone(dp_epsilon=1.0), LAYER) is not None


def test_a_node_without_a_name_has_one_ledger_whatever_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMS_FLWR_HOME", str(tmp_path))
    victim = Victim(images(64), limits=NodeLimits(dp_budget=1.2))
    for _ in range(3):
        victim.config = {}
        victim.grid = InProcessGrid(victim.app, [{}])
        victim.ask(Cone(dp_epsilon=1.0), LAYER)
    assert victim.answered == 1
    assert "dp_budget" in victim.refusal


# --- groups and clusters ----------------------------------------------------------------------


def by_groups(victim, requests):
    """Means of halves are linear equations, if the server knows who is in which half."""
    count, rows, values = len(victim.x), [], []
    for _ in range(requests):
        cone = victim.cone(Means(groups=2), LAYER)
        if cone is None:
            break
        seed = derive_seed(5, "space", victim.asked, "north")
        generator = torch.Generator().manual_seed(seed % 2**63)
        halves = np.array_split(torch.randperm(count, generator=generator).numpy(), 2)
        rows += [np.isin(np.arange(count), half) / len(half) for half in halves]
        values += list(mean_values(cone))
    return np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]


def test_groups_are_drawn_once_from_a_secret():
    x = images(40, seed=8)
    victim = Victim(x, limits=UNLIMITED)
    assert victim.rebuilt(by_groups(victim, 60)) == 40
    guarded = Victim(x)
    assert guarded.rebuilt(by_groups(guarded, 60)) == 0
    assert guarded.answered == 60
    first = mean_values(guarded.cone(Means(groups=2), LAYER))
    guarded.restart()
    assert np.array_equal(first, mean_values(guarded.cone(Means(groups=2), LAYER)))
    # Other parts would be more equations; another node's secret is another.
    for other in (Means(groups=3), Means(groups=2, min_count=9)):
        assert guarded.cone(other, LAYER) is None
    assert guarded.cone(Cone(clusters=2), LAYER) is not None
    assert guarded.cone(Cone(clusters=3), LAYER) is None
    stranger = Victim(x, name="south").cone(Means(groups=2), LAYER)
    assert not np.array_equal(first, mean_values(stranger))


# --- who is among the samples -----------------------------------------------------------------


def auc(members, others):
    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    return (ranks.sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(others))


def test_sparse_counts_do_not_show_which_words_no_sample_has():
    """Six of 300 words a text, most of them rare: a deviation at its floor once told all."""
    rng, found = np.random.default_rng(9), []
    chance = 1 / np.arange(1, 301)
    for _ in range(4):
        texts = np.zeros((1128, 300))
        for text in texts:
            text[rng.choice(300, 6, replace=False, p=chance / chance.sum())] = 6**-0.5
        own, others = texts[:64], texts[64:128]
        cone = build_cone(torch.from_numpy(own).float(), torch.zeros(64), 2)
        deviations = np.sqrt(np.diag(cone.covariance.dense_matrix(0)))
        at_floor = deviations <= deviations.min() * 1.0001
        found.append(auc(*(-(part[:, at_floor] > 0).sum(axis=1) for part in (own, others))))
    assert np.mean(found) < 0.75


def test_an_honest_refinement_reply_shows_no_more_members_than_a_cone():
    """Whoever knows the class subtracts what is expected, and looks along each candidate."""
    features, found = 100, {}
    for limits in (UNLIMITED, CONSENT):
        scores = []
        for seed in range(3):
            x = np.random.default_rng(seed).normal(size=(1032, features))
            victim = Victim(x[:32], limits=limits)
            layer = {"weight": np.zeros((2, features), "f4"), "bias": np.zeros(2, "f4")}
            basis = np.eye(features + 1, dtype="f4")
            content = victim.ask(Gradient(np.ones(features, "f4"), basis), layer)
            along = np.frombuffer(content["gradient"]["along"], "<f2").reshape(2, -1)[1, :-1]
            scores.append(auc(x[:32] @ along, x[32:64] @ along))
        found[limits] = np.mean(scores)
    assert found[UNLIMITED] > 0.85
    assert found[CONSENT] < 0.75


# --- what a strategy asks before anything is paid ---------------------------------------------


@pytest.mark.parametrize("space", [Cone(), Means(groups=2), Cone(sums=True, sketch=4)], ids=str)
def test_refinement_asks_for_consent_with_the_first_message(space):
    def start(limits, **options):
        def data(context):
            x = images(120, seed=int(context.node_config["partition-id"]))
            return torch.from_numpy(x).float(), torch.from_numpy(np.arange(120) % 2)

        grid = InProcessGrid(app_of(data, limits=limits), 3)
        return Gems(space=space, refine=2, **options).start(grid, to_record(LAYER))

    with pytest.raises(
        RoundFailedError, match=r"secure=SecureSum\(\), for .* adaptive-answers="
    ) as e:
        start(NodeLimits())
    assert "0 of 3 nodes gave a usable reply" in str(e.value)
    losses = [r["loss"] for r in start(NodeLimits(adaptive_answers=7)).details["refinement"]]
    # But for the rounding of a sum.
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(losses))
    if space.offers >= {"sums"}:
        assert not start(NodeLimits(), secure=SecureSum(), min_nodes=3).failures


@dataclass(frozen=True)
class Median(Question[float]):
    """What is the median of this feature? Its answer counts nothing by itself."""

    kind: ClassVar[str] = "median-of-a-feature"
    carries_model: ClassVar[bool] = False

    feature: int = 0

    def discloses(self, node):
        return Disclosure("moments", adaptive=True)

    def answer(self, node):
        inputs, _ = node.options.data(node.context)[0]
        median = float(inputs[:, self.feature].median())
        return RecordDict({"median": MetricRecord({"value": median})})

    def read(self, content):
        return content["median"]["value"]


def test_an_adaptive_answer_that_does_not_count_itself_is_counted():
    victim = Victim(images(50), limits=NodeLimits(adaptive_answers=2))
    for feature in range(4):
        victim.ask(Median(feature), {})
        victim.restart()
    assert victim.answered == 2
    assert "adaptive_answers: it is 2" in victim.refusal
