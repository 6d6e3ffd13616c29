"""`PrivateGems`: the noise on sums is what was promised, and nodes decide what they believe."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from sklearn.datasets import load_digits

from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import UNLIMITED, NodeLimits
from gems_flwr.client.private_sum_answers import noise_words
from gems_flwr.client.secure_sum_mod import secure_sum_mod
from gems_flwr.errors import OptionError, RefusedError, RoundFailedError
from gems_flwr.moments import whole_sums
from gems_flwr.moments.private_release import spent_epsilon
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.secure.fixed_point import Layout
from gems_flwr.secure.secure_sum import SecureSum
from gems_flwr.server import summing
from gems_flwr.strategies import private_gems
from gems_flwr.strategies.private_gems import PrivateGems
from gems_flwr.wire.private_sum_requests import PrivateSum, requested_private_sum

NODES = 5
SIMULATED = {"clip": 6.0, "examples": 4096, "dp_seeded": True}


def digits():
    """The digits at random, by node."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    parts = np.array_split(order, NODES)
    return [(torch.from_numpy(x[p] / 16).float(), torch.from_numpy(y[p])) for p in parts]


def app_of(limits=UNLIMITED, masks=False, fail=lambda message, node: False):
    parts = digits()

    def data(context):
        return parts[int(context.node_config["partition-id"])]

    def failing(message, context, call_next):
        if fail(message, int(context.node_config["partition-id"])):
            raise RuntimeError("gone")
        return call_next(message, context)

    mods = [failing, good_enough_mod(both_parts(data), limits=limits)]
    app = ClientApp(mods=[secure_sum_mod(), *mods] if masks else mods)

    @app.train()
    def train(message, context):
        raise NotImplementedError

    return app


def play(strategy, app, grid=None):
    initial = ArrayRecord(torch.nn.Linear(64, 10).state_dict())
    return strategy.start(grid or InProcessGrid(app, NODES), initial)


def accuracy(result):
    weight, bias = result.arrays.to_numpy_ndarrays()
    x, y = load_digits(return_X_y=True)
    return float(((x / 16 @ weight.T + bias).argmax(axis=1) == y).mean())


def totals_of(monkeypatch):
    """Note every total that a run looks at."""
    seen = []
    real = summing.PlainSums.total

    def noting(self, *arguments, **options):
        seen.append(real(self, *arguments, **options))
        return seen[-1]

    monkeypatch.setattr(summing.PlainSums, "total", noting)
    return seen


# --- accuracy -------------------------------------------------------------------------------------


def test_a_generous_epsilon_learns_the_digits():
    """Least squares has .94 of them, and two of three would be right by far less."""
    assert accuracy(play(PrivateGems(epsilon=20.0, **SIMULATED), app_of())) > 0.94


def test_a_small_epsilon_costs_accuracy_on_few_samples():
    """1,800 samples under epsilon 0.2: sums drown in the noise, as they must."""
    assert accuracy(play(PrivateGems(epsilon=0.2, **SIMULATED), app_of())) < 0.6


def test_masked_sums_have_the_digits_of_plain_ones():
    options = {**SIMULATED, "epsilon": 20.0, "steps": 2, "fewest": NODES}
    plain = play(PrivateGems(**options), app_of())
    masked = play(PrivateGems(secure=SecureSum(threshold=1.0), **options), app_of(masks=True))
    for ours, theirs in zip(plain.arrays.values(), masked.arrays.values(), strict=True):
        assert (ours.numpy() == theirs.numpy()).all()


def test_a_resumed_run_steps_as_the_unbroken_one(tmp_path):
    options = {**SIMULATED, "epsilon": 20.0, "steps": 3}
    whole = play(PrivateGems(**options), app_of())
    gone = {"rounds": 0}

    def fail(message, node):
        gone["rounds"] += node == 0
        # Two sums in the first round, one in the second.
        return node == 0 and gone["rounds"] > 3

    with pytest.raises(RoundFailedError):
        play(PrivateGems(checkpoint_dir=tmp_path, **options), app_of(fail=fail))
    assert not list(tmp_path.glob("inbox/*"))
    resumed = play(PrivateGems(checkpoint_dir=tmp_path, resume=True, **options), app_of())
    for ours, theirs in zip(whole.arrays.values(), resumed.arrays.values(), strict=True):
        assert (ours.numpy() == theirs.numpy()).all()


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "fewest", "colluders"), [(0, 5, 0), (2, 3, 0), (1, 3, 1)])
def test_noise_of_a_total_is_what_was_promised(monkeypatch, lost, fewest, colluders):
    """The corner of the spread is 2,016 numbers: their deviation is known within 2% or so.

    Without noise the total is that of the nodes which are in it. The noise of `NODES - lost` nodes
    is at least what the shares of ``fewest - colluders`` make up, and is as much as the nodes are
    more.
    """
    seen = totals_of(monkeypatch)
    strategy = PrivateGems(
        epsilon=1.0, steps=1, fewest=fewest, colluders=colluders, min_nodes=1, **SIMULATED
    )
    asked = []

    def fail(message, node):
        asked.append(message.content)
        return node < lost

    play(strategy, app_of(fail=fail))
    spread = next(t for t in seen if "corner" in t.values)
    assert len(spread) == NODES - lost
    inputs = np.concatenate([x.numpy() for x, _ in digits()[lost:]]).astype(np.float64)
    means = next(t for t in seen if "sums" in t.values)
    noisy = private_gems.NoisyMeans.of(
        means.values["sums"], means.values["counts"], means.values["squares"][0], 6.0
    )
    center = noisy.center.astype(np.float32).astype(np.float64)
    exact = whole_sums.spread_sums(inputs, center, noisy.clip)["corner"]
    found = (spread.values["corner"] - exact).std() * math.sqrt(2) / whole_sums.SPREAD**2
    honest = 1 / math.sqrt(strategy.noise(NODES).squared_mu * private_gems.SPREAD_PART)
    expected = honest * math.sqrt((NODES - lost) / (fewest - colluders))
    assert found == pytest.approx(expected, rel=0.08)
    assert found > 0.92 * honest


def test_too_few_for_the_noise_end_the_round_before_anything_is_seen():
    strategy = PrivateGems(epsilon=1.0, fewest=4, min_nodes=1, **SIMULATED)
    with pytest.raises(RoundFailedError, match="round 1"):
        play(strategy, app_of(fail=lambda message, node: node < 2))


def test_shares_of_nodes_are_independent():
    request = PrivateSum("spread", noise=3.0)
    layout = Layout(request.sections(10, 64, NODES, 4096), NODES)
    words = [noise_words(request, layout).view(np.int64) for _ in range(2)]
    first, second = (np.asarray(w) for w in words)
    assert (first != second).mean() > 0.99


def test_rings_have_room_for_samples_and_noise():
    """Nothing that `examples` samples and the noise come to leaves its ring."""
    request = PrivateSum("gradient", noise=5.0)
    for section in request.sections(10, 64, NODES, 1000):
        most = 1000 * request.sensitivity + 7 * 5.0 * request.sensitivity * math.sqrt(NODES)
        assert section.bound >= most
        assert section.step(NODES) == 1


def test_more_samples_than_were_said_are_noticed():
    strategy = PrivateGems(epsilon=20.0, **{**SIMULATED, "examples": 1000})
    with pytest.raises(OptionError, match="examples must be above 1"):
        play(strategy, app_of())


# --- what nodes say -------------------------------------------------------------------------------


def test_the_ledger_has_what_was_promised_if_the_node_believes_it(tmp_path):
    """The promise is for 5 nodes: who counts on 5 has spent epsilon, who counts on itself more."""
    spent = {}
    for honest in (1, 5):
        limits = NodeLimits(
            largest_rank="full", dp_budget=1000.0, honest_nodes=honest, seeded_noise=True
        )
        folder = tmp_path / str(honest)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEMS_FLWR_HOME", str(folder))
            play(PrivateGems(epsilon=3.0, steps=4, **SIMULATED), app_of(limits))
        notes = [json.loads(path.read_text()) for path in folder.glob("privacy-*.json")]
        assert len(notes) == NODES
        spent[honest] = notes[0]["squared_mu"]
    assert spent_epsilon(spent[5], 1e-5) == pytest.approx(3.0, rel=5e-3)
    assert spent_epsilon(spent[5], 1e-5) <= 3.0
    assert spent[1] == pytest.approx(5 * spent[5])


def test_a_budget_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMS_FLWR_HOME", str(tmp_path))
    limits = NodeLimits(dp_budget=2.0, honest_nodes=5, require_dp=True, seeded_noise=True)
    play(PrivateGems(epsilon=1.9, steps=2, **SIMULATED), app_of(limits))
    with pytest.raises(RoundFailedError, match="dp_budget"):
        play(PrivateGems(epsilon=1.9, steps=2, **SIMULATED), app_of(limits))


@pytest.mark.parametrize(
    ("limits", "options", "said"),
    [
        (NodeLimits(), {"dp_seeded": False}, "without masks"),
        (NodeLimits(), {}, "seeded_noise"),
        (NodeLimits(share_gradients=False, seeded_noise=True), {}, "share_gradients"),
    ],
)
def test_nodes_refuse_noise_that_protects_nobody(limits, options, said, tmp_path, monkeypatch):
    monkeypatch.setenv("GEMS_FLWR_HOME", str(tmp_path))
    with pytest.raises(RoundFailedError, match=said):
        play(PrivateGems(epsilon=3.0, steps=1, **{**SIMULATED, **options}), app_of(limits))


def test_masked_noise_is_dp_enough_for_a_node_that_demands_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMS_FLWR_HOME", str(tmp_path))
    limits = NodeLimits(require_dp=True, dp_budget=3.0, honest_nodes=4)
    options = {**SIMULATED, "dp_seeded": False}
    strategy = PrivateGems(epsilon=2.5, steps=1, secure=SecureSum(), **options)
    assert strategy.noise(NODES).honest == 4
    result = play(strategy, app_of(limits, masks=True))
    assert result.details["privacy"]["fewest"] == 4


def test_no_more_shares_count_than_nodes_in_the_sum():
    request = PrivateSum("means")
    assert NodeLimits(honest_nodes=50).check_private_sum(request, masked_with=7) == 7
    assert NodeLimits(honest_nodes=3).check_private_sum(request, masked_with=7) == 3
    with pytest.raises(RefusedError, match="without masks"):
        NodeLimits(honest_nodes=3).check_private_sum(request, masked_with=0)


def test_noise_below_the_grid_is_refused():
    """0.4 steps of the grid: a sum of such noise is no Gaussian, whatever the budget."""

    def weaken(message, node):
        request = requested_private_sum(message.content)
        weak = dataclasses.replace(request, noise=1e-4)
        message.content["config"]["private-sum-request"] = weak.to_json()
        return False

    with pytest.raises(RoundFailedError, match="steps of the grid"):
        play(PrivateGems(epsilon=3.0, steps=1, **SIMULATED), app_of(fail=weaken))


def test_a_layout_of_other_arrays_is_refused():
    def other(message, node):
        request = requested_private_sum(message.content)
        if request is not None:
            message.content["config"]["private-sum-request"] = PrivateSum("spread").to_json()
        return False

    with pytest.raises(RoundFailedError, match="the server wants"):
        play(PrivateGems(epsilon=3.0, steps=1, **SIMULATED), app_of(fail=other))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"steps": 0}, "steps"),
        ({"clip": 0.0}, "clip"),
        ({"examples": 0}, "examples"),
        ({"fewest": 2, "colluders": 2}, "fewest"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        PrivateGems(**options)


def test_colluders_and_drop_outs_are_in_the_noise():
    """Ten nodes, a threshold of two thirds: 7 may be left, of which 2 may collude."""
    noise = PrivateGems(epsilon=1.0, colluders=2, secure=SecureSum()).noise(10)
    assert (noise.least_in_sum, noise.honest) == (7, 5)
    assert noise.epsilon_left(5) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(OptionError, match="noise that counts"):
        PrivateGems(epsilon=1.0, colluders=7, secure=SecureSum()).noise(10)
