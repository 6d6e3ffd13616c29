"""`PrivateGems`: the noise on sums is what was promised, and nodes decide what they believe."""

import dataclasses
import json
import math

import numpy as np
import pytest
from helpers_digits import accuracy_of, app_of, digits, failing, linear

from conftest import record_equal
from gems_flwr import InProcessGrid, NodeLimits, PrivateGems, SecureSum
from gems_flwr.core.sums import PlainSums
from gems_flwr.errors import OptionError, RoundFailedError
from gems_flwr.node.limits import UNLIMITED
from gems_flwr.spaces.cone import NoisyMeans, spent_epsilon, spread_sums
from gems_flwr.strategies.private_gems import SPREAD_PART, PrivateSum

NODES = 5
SIMULATED = {"clip": 6.0, "examples": 4096, "dp_seeded": True}


def play(strategy, limits=UNLIMITED, *outer, **options):
    app = app_of(digits(NODES, sort=False), limits, *outer)
    return strategy.start(InProcessGrid(app, NODES), linear(), **options)


def accuracy(result):
    return accuracy_of(result, digits(1))


@pytest.mark.parametrize(("epsilon", "least", "most"), [(20.0, 0.94, 1.0), (0.2, 0.0, 0.6)])
def test_a_generous_epsilon_learns_the_digits_and_a_small_one_cannot(epsilon, least, most):
    """1,800 samples under epsilon 0.2: sums drown in the noise, as they must."""
    assert least < accuracy(play(PrivateGems(epsilon=epsilon, **SIMULATED))) < most


def test_masked_sums_have_the_digits_of_plain_ones():
    options = {**SIMULATED, "epsilon": 20.0, "steps": 2}
    plain = play(PrivateGems(**options))
    masked = play(PrivateGems(secure=SecureSum(threshold=1.0), **options))
    assert record_equal(plain.arrays, masked.arrays)


class Fewest(PrivateGems):
    """Noise for sums of which some nodes may be missing, without masks."""

    fewest = NODES

    def noise(self, nodes):
        return dataclasses.replace(super().noise(nodes), fewest=self.fewest)


@pytest.mark.parametrize(("lost", "fewest", "colluders"), [(0, 5, 0), (1, 3, 1)])
def test_noise_of_a_total_is_what_was_promised(monkeypatch, lost, fewest, colluders):
    """The corner of the spread is 2,016 numbers: their deviation is known within 2% or so.

    Without noise the total is that of the nodes which are in it. The noise of `NODES - lost` nodes
    is at least what the shares of ``fewest - colluders`` make up, and is as much as the nodes are
    more.
    """
    seen, real = [], PlainSums.total

    def noting(self, *arguments):
        seen.append(real(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(PlainSums, "total", noting)
    strategy = Fewest(epsilon=1.0, steps=1, colluders=colluders, min_nodes=1, **SIMULATED)
    strategy.fewest = fewest
    play(strategy, UNLIMITED, failing(lambda node, *_: node < lost))
    means, spread = seen[:2]
    assert len(spread) == NODES - lost
    inputs = np.concatenate([x.numpy() for x, _ in digits(NODES, sort=False)[lost:]])
    values = means.values
    noisy = NoisyMeans.of(values["sums"], values["counts"], values["squares"][0], 6.0)
    center = noisy.center.astype(np.float32).astype(np.float64)
    exact = spread_sums(inputs.astype(np.float64), center, noisy.clip)["corner"]
    sensitivity = PrivateSum("spread").sensitivity
    found = (spread.values["corner"] - exact).std() * math.sqrt(2) / sensitivity
    honest = 1 / math.sqrt(strategy.noise(NODES).squared_mu * SPREAD_PART)
    assert found == pytest.approx(
        honest * math.sqrt((NODES - lost) / (fewest - colluders)), rel=0.08
    )
    assert found > 0.92 * honest


def test_rings_have_room_for_samples_and_noise():
    question = PrivateSum("gradient", noise=5.0)
    (section,) = question.sections(10, 64, NODES, 1000)
    assert section.bound >= (1000 + 7 * 5.0 * math.sqrt(NODES)) * question.sensitivity
    assert section.step(NODES) == 1


def test_more_samples_than_announced_are_noticed():
    strategy = PrivateGems(epsilon=20.0, **{**SIMULATED, "examples": 1000})
    with pytest.raises(OptionError, match="examples must be above 1"):
        play(strategy)


def test_the_ledger_has_what_was_promised_if_the_node_believes_it(tmp_path, monkeypatch):
    """The promise is for 5 nodes: who counts on 5 has spent epsilon, who counts on itself more."""
    spent = {}
    for honest in (1, 5):
        limits = NodeLimits(
            largest_rank="full", dp_budget=1000.0, honest_nodes=honest, seeded_noise=True
        )
        folder = tmp_path / str(honest)
        monkeypatch.setenv("GEMS_FLWR_HOME", str(folder))
        play(PrivateGems(epsilon=3.0, steps=4, **SIMULATED), limits)
        notes = [json.loads(path.read_text()) for path in folder.glob("privacy-*.json")]
        assert len(notes) == NODES
        spent[honest] = notes[0]["squared_mu"]
    assert spent_epsilon(spent[5], 1e-5) == pytest.approx(3.0, rel=5e-3)
    assert spent_epsilon(spent[5], 1e-5) <= 3.0
    assert spent[1] == pytest.approx(5 * spent[5])
    # No more shares count than nodes are in the sum.
    limits = NodeLimits(honest_nodes=50)
    assert [limits.noise_shares(masked_with) for masked_with in (7, 90)] == [7, 50]


def test_a_budget_ends_the_run():
    limits = NodeLimits(dp_budget=2.0, honest_nodes=5, require_dp=True, seeded_noise=True)
    play(PrivateGems(epsilon=1.9, steps=2, **SIMULATED), limits)
    with pytest.raises(RoundFailedError, match="dp_budget"):
        play(PrivateGems(epsilon=1.9, steps=2, **SIMULATED), limits)


@pytest.mark.parametrize(
    ("limits", "options", "reason"),
    [
        (NodeLimits(), {"dp_seeded": False}, "without masks"),
        (NodeLimits(), {}, "seeded_noise"),
        (NodeLimits(share_gradients=False, seeded_noise=True), {}, "share_gradients"),
    ],
)
def test_nodes_refuse_noise_that_protects_no_one(limits, options, reason):
    with pytest.raises(RoundFailedError, match=reason):
        play(PrivateGems(epsilon=3.0, steps=1, **{**SIMULATED, **options}), limits)


def test_masked_noise_is_dp_enough_for_a_node_that_demands_it():
    limits = NodeLimits(require_dp=True, dp_budget=3.0, honest_nodes=4)
    options = {**SIMULATED, "dp_seeded": False}
    strategy = PrivateGems(epsilon=2.5, steps=1, secure=SecureSum(), **options)
    assert strategy.noise(NODES).honest == 4
    assert play(strategy, limits).details["privacy"]["fewest"] == 4


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        # 0.4 steps of the grid: a sum of such noise is no Gaussian, whatever the budget.
        ({"noise": 1e-4}, "steps of the grid"),
        ({"stage": "spread"}, "the server wants"),
        ({"stage": "votes"}, "stage must be one of"),
        ({"clip": -1.0}, "clip must be above 0"),
    ],
)
def test_a_question_that_a_node_must_not_answer_is_refused(changed, reason):
    def other(message, context, call_next):
        question = message.content["question"]
        question["text"] = json.dumps({**json.loads(question["text"]), **changed})
        return call_next(message, context)

    with pytest.raises(RoundFailedError, match=reason):
        play(PrivateGems(epsilon=3.0, steps=1, **SIMULATED), UNLIMITED, other)


@pytest.mark.parametrize("option", ["epsilon", "steps", "clip", "examples", "delta"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(OptionError, match=option):
        PrivateGems(**{option: 0})


def test_colluders_and_drop_outs_are_in_the_noise():
    """Ten nodes, a threshold of two thirds: 7 may be left, of which 2 may collude."""
    noise = PrivateGems(epsilon=1.0, colluders=2, secure=SecureSum()).noise(10)
    assert (noise.least_in_sum, noise.honest) == (7, 5)
    assert noise.epsilon_left(5) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(OptionError, match="noise that counts"):
        PrivateGems(epsilon=1.0, colluders=7, secure=SecureSum()).noise(10)
