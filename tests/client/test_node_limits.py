"""The server asks, the node's own limits answer."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts

from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import UNLIMITED, NodeLimits
from gems_flwr.client.privacy_ledger import spend
from gems_flwr.client.statistics_mod import statistics_mod
from gems_flwr.errors import CheckpointError, RefusedError, RoundFailedError
from gems_flwr.moments.private_release import PrivateRelease, PrivateScore, spent_epsilon
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.spaces.space_files import load_space
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.merged_models import MergedModels
from gems_flwr.wire.asking import (
    ask_for_averaging,
    ask_for_neurons,
    ask_for_score,
    ask_for_space,
    ask_for_statistics,
)
from gems_flwr.wire.model_replies import pack_instruction
from gems_flwr.wire.records import to_record
from gems_flwr.wire.requests import (
    AveragingRequest,
    Neurons,
    ScoreRequest,
    StatisticsRequest,
)
from gems_flwr.wire.space_requests import Ball, Cone

FEATURES, CLASSES, COUNT = 12, 3, 60
AVERAGING = AveragingRequest(run="run", model=1, reference=1, send="always")


def data(context):
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    x = rng.normal(size=(CLASSES * COUNT, FEATURES)) + np.repeat(
        np.eye(CLASSES, FEATURES), COUNT, 0
    )
    return torch.from_numpy(x).float(), torch.from_numpy(np.repeat(np.arange(CLASSES), COUNT))


def node_app(limits=None, mod=good_enough_mod):
    app = ClientApp(mods=[mod(both_parts(data), limits=limits)])

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 5})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 5, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(strategy, limits=None, grid=None):
    model = {"weight": np.zeros((CLASSES, FEATURES), "f4"), "bias": np.zeros(CLASSES, "f4")}
    grid = grid or InProcessGrid(node_app(limits), 2)
    return strategy.start(grid, to_record(model), num_rounds=1)


def context():
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


@pytest.mark.parametrize(
    ("limits", "space", "limit"),
    [
        ({}, Cone(rank="full"), "largest_rank"),
        ({}, Cone(sums=True), "largest_rank"),
        ({}, Cone(rank=8), "largest_rank"),
        ({"largest_rank": 3}, Cone(rank=4), "largest_rank"),
        ({"largest_rank": 3}, Cone(rank="full"), "largest_rank"),
        ({"min_count": 50}, Cone(min_count=20), "min_count"),
        ({"require_dp": True}, Cone(), "require_dp"),
        ({"require_dp": True}, Ball(), "require_dp"),
        ({"require_dp": True}, Cone(sums=True), "require_dp"),
        ({}, Cone(dp_epsilon=1.0, dp_seeded=True), "seeded_noise"),
    ],
)
def test_a_request_beyond_a_limit_is_refused_by_its_name(limits, space, limit):
    with pytest.raises(RoundFailedError, match=f"refused by this node's limit {limit}:"):
        run(Gems(space=space), NodeLimits(**limits))


@pytest.mark.parametrize(
    ("limits", "space"),
    [
        ({}, Cone()),
        ({}, Cone(rank=2)),
        ({"largest_rank": "full"}, Cone(rank="full")),
        ({"largest_rank": 8}, Cone(rank=8)),
        ({"min_count": 50}, Cone(min_count=55)),
        ({"min_count": 50}, Cone()),
        ({"require_dp": True}, Cone(dp_epsilon=3.0, dp_clip=5.0)),
        ({"seeded_noise": True}, Cone(dp_epsilon=3.0, dp_clip=5.0, dp_seeded=True)),
    ],
)
def test_a_request_within_the_limits_is_answered(limits, space):
    assert run(Gems(space=space), NodeLimits(**limits)).failures == ()


def test_automatic_moments_stay_below_the_node_s_own_rank(tmp_path):
    """60 samples of 12 features allow int(0.9 * 60 / 12) - 2 = 2 directions; one node shows 1."""
    for most, expected in (("auto", 2), (1, 1)):
        strategy = Gems(checkpoint_dir=tmp_path / str(most))
        run(strategy, NodeLimits(largest_rank=most))
        cone = load_space(tmp_path / str(most) / "spaces" / "0.space.safetensors")
        assert cone.covariance.ranks.tolist() == [expected] * CLASSES


def test_a_class_below_the_node_s_own_count_is_withheld():
    assert run(Gems(), NodeLimits(min_count=60)).details["withheld"] == {}
    with pytest.raises(RoundFailedError, match="at least 61 samples"):
        run(Gems(), NodeLimits(min_count=61))


def test_models_and_exact_scores_do_not_leave_a_node_that_demands_privacy():
    with pytest.raises(RoundFailedError, match="limit require_dp: models"):
        run(FedAvg(), NodeLimits(require_dp=True))
    result = run(FedAvg(fraction_evaluate=1.0), NodeLimits(allow_scores=False))
    assert all("limit allow_scores" in f.reason for _, f in result.failures)
    assert len(result.failures) == 2
    assert run(FedAvg(fraction_evaluate=1.0), NodeLimits()).failures == ()


@pytest.mark.parametrize(
    ("limits", "method", "limit"),
    [
        ({}, "regmean", "largest_rank"),
        ({"largest_rank": 5}, "kfac", "largest_rank"),
        ({"require_dp": True}, "matching", "require_dp"),
        ({}, "fisher", None),
        ({"largest_rank": "full"}, "regmean", None),
    ],
)
def test_second_moments_of_a_layers_inputs_are_full_moments_as_well(limits, method, limit):
    """5 samples, by the handler's word, of 12 inputs and a bias."""
    app = node_app(NodeLimits(**limits), statistics_mod)
    strategy, grid = MergedModels(method=method), InProcessGrid(app, 2)
    if limit is None:
        assert run(strategy, grid=grid).failures == ()
        return
    with pytest.raises(RoundFailedError, match=f"limit {limit}"):
        run(strategy, grid=grid)


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [({"largest_rank": 2}, True), ({"largest_rank": 1}, False), ({}, False)],
)
def test_compressed_second_moments_show_as_many_directions_as_the_node_allows(limits, allowed):
    """39 weights: half of 156 bytes are 2 directions of 13 inputs, which 5 samples do not hide."""
    app = node_app(NodeLimits(**limits), statistics_mod)
    strategy = MergedModels(method="regmean", statistics_share=0.5)
    if allowed:
        assert run(strategy, grid=InProcessGrid(app, 2)).failures == ()
        return
    with pytest.raises(RoundFailedError, match="limit largest_rank: 2 directions of the second"):
        run(strategy, grid=InProcessGrid(app, 2))


def test_directions_that_many_samples_hide_leave_a_node_at_its_default_limits():
    """Of 13 inputs, 2 directions and the variances are 52 numbers: 58 samples hide them."""
    NodeLimits().check_second_moments(58, 13, rank=2)
    with pytest.raises(RefusedError, match="2 directions of the second moments of 13 inputs"):
        NodeLimits().check_second_moments(57, 13, rank=2)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"allow_scores": False}, "limit allow_scores"), ({"require_dp": True}, None)],
)
def test_scores_are_refused_or_noised(limits, reason):
    strategy = Gems(space=Cone(dp_epsilon=5.0, dp_clip=5.0), verify=True)
    result = run(strategy, NodeLimits(**limits))
    scores = result.details["node_scores"]
    if reason:
        assert scores == {}
        assert all(reason in failure.reason for _, failure in result.failures)
    else:
        # Exact ones are multiples of 1 / 180.
        assert len(scores) == 2
        assert not any(
            score * 180 == pytest.approx(round(score * 180)) for score in scores.values()
        )


@pytest.mark.parametrize("epsilon", [11.0, 1e9])
def test_noise_that_protects_nobody_opens_no_limit(epsilon):
    """Full moments with next to no noise are full moments."""
    with pytest.raises(RoundFailedError, match=r"limit dp_budget: epsilon 0 of 10 is spent"):
        run(Gems(space=Cone(dp_epsilon=epsilon, rank="full", dp_clip=100.0)))


def test_noise_is_not_averaged_out_by_asking_again():
    """Neither within a run nor by new ones, whose nodes remember nothing but their ledgers."""
    each = PrivateRelease(2.0, 1e-5, 5.0).squared_mu
    enough = next(k for k in range(100) if spent_epsilon((k + 1) * each, 1e-5) > 10)
    assert 5 < enough < 20
    for _ in range(enough):
        run(Gems(space=Cone(dp_epsilon=2.0, dp_clip=5.0)))
    with pytest.raises(RoundFailedError, match="limit dp_budget"):
        run(Gems(space=Cone(dp_epsilon=2.0, dp_clip=5.0)))


@pytest.mark.parametrize(
    "besides",
    [
        lambda content: ask_for_averaging(content, AVERAGING),
        lambda content: ask_for_neurons(content, Neurons(epsilon=0.1).in_layer(0)),
        lambda content: ask_for_statistics(content, StatisticsRequest("matching")),
    ],
)
def test_a_private_request_is_no_cover_for_another(besides):
    grid = InProcessGrid(node_app(NodeLimits(require_dp=True)), 1)
    (node,) = grid.get_node_ids()
    content = pack_instruction(ArrayRecord(), ConfigRecord(), server_round=1, seed=0)
    ask_for_space(content, Cone(dp_epsilon=1.0))
    besides(content)
    (reply,) = grid.send_and_receive([Message(content, node, "train")])
    assert "limit require_dp: models and statistics" in reply.error.reason


def test_an_evaluation_is_no_cover_for_an_exact_score():
    grid = InProcessGrid(node_app(NodeLimits(require_dp=True)), 1)
    (node,) = grid.get_node_ids()
    content = pack_instruction(ArrayRecord(), ConfigRecord(), server_round=1, seed=0)
    ask_for_score(content, ScoreRequest(dp_epsilon=1.0))
    (reply,) = grid.send_and_receive([Message(content, node, "evaluate")])
    assert "limit require_dp: an exact score" in reply.error.reason


# --- the ledger -----------------------------------------------------------------------------


def test_what_is_spent_survives_a_restart_and_ends_at_the_budget(tmp_path):
    """Four releases of epsilon 1 are 2.2 at this delta; a fifth would be beyond 2.4."""
    limits = NodeLimits(dp_budget=2.4, ledger=tmp_path / "spent.json")
    release = PrivateRelease(1.0, 1e-5, 1.0)
    spent = [spend(release.squared_mu, limits, context()) for _ in range(4)]
    assert spent == sorted(spent)
    assert spent[0] == pytest.approx(1.0, abs=1e-4)
    before = (tmp_path / "spent.json").read_text()
    with pytest.raises(RefusedError, match=r"limit dp_budget: epsilon 2\.\d+ of 2\.4 is spent"):
        spend(release.squared_mu, limits, context())
    assert (tmp_path / "spent.json").read_text() == before
    small = PrivateScore(0.05, 1e-5)
    assert spend(small.squared_mu, limits, context()) < 2.4


def test_the_node_s_state_counts_where_the_file_was_lost(tmp_path):
    limits = NodeLimits(dp_budget=1.3, ledger=tmp_path / "spent.json")
    here, release = context(), PrivateRelease(1.0, 1e-5, 1.0)
    spend(release.squared_mu, limits, here)
    (tmp_path / "spent.json").unlink()
    spend(PrivateScore(0.1, 1e-5).squared_mu, limits, here)
    with pytest.raises(RefusedError, match="dp_budget"):
        spend(release.squared_mu, limits, here)


@pytest.mark.parametrize("text", ["", "[]", '{"squared_mu": -1}', '{"squared_mu": NaN}', "{}"])
def test_a_ledger_that_cannot_be_read_spends_nothing(tmp_path, text):
    (tmp_path / "spent.json").write_text(text)
    with pytest.raises(CheckpointError, match="what was spent is not known"):
        spend(0.1, NodeLimits(dp_budget=9.0, ledger=tmp_path / "spent.json"), context())


def test_a_whole_run_spends_moments_and_scores(tmp_path):
    app = ClientApp(
        mods=[
            lambda m, c, n: good_enough_mod(
                both_parts(data),
                limits=NodeLimits(
                    dp_budget=2.0, ledger=tmp_path / f"{c.node_config['partition-id']}.json"
                ),
            )(m, c, n)
        ]
    )

    @app.train()
    def train(message, context):
        raise AssertionError("a cone needs no training")

    strategy = Gems(space=Cone(dp_epsilon=1.0, dp_clip=5.0), verify=True)
    assert run(strategy, grid=InProcessGrid(app, 2)).failures == ()
    for node in "01":
        total = json.loads((tmp_path / f"{node}.json").read_text())["squared_mu"]
        parts = PrivateRelease(1.0, 1e-5, 5.0).squared_mu + PrivateScore(1.0, 1e-5).squared_mu
        assert total == pytest.approx(parts)
        assert 1 < spent_epsilon(total, 1e-5) < 2
    # New nodes, with nothing but the files: a second run is one too many.
    with pytest.raises(RoundFailedError, match="limit dp_budget"):
        run(Gems(space=Cone(dp_epsilon=1.5, dp_clip=5.0)), grid=InProcessGrid(app, 2))


# --- from the node's config -----------------------------------------------------------------


def test_a_node_sets_its_limits_by_its_own_config():
    config = {
        "min-count": 40,
        "largest-rank": 5,
        "require-dp": True,
        "dp-budget": 3,
        "dp-delta": 1e-6,
        "privacy-ledger": "spent.json",
        "allow-scores": False,
        "partition-id": 0,
    }
    assert NodeLimits.of_node(config) == NodeLimits(
        min_count=40,
        largest_rank=5,
        require_dp=True,
        dp_budget=3,
        dp_delta=1e-6,
        ledger="spent.json",
        allow_scores=False,
    )
    assert NodeLimits.of_node({"partition-id": 3, "share-examples": True}) == NodeLimits()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"require-dp": "yes"}, "require-dp: expected bool, got 'yes'"),
        ({"min-count": True}, "min-count: expected int"),
        ({"min-count": 1}, "min_count must be at least 2"),
        ({"largest-rank": "some"}, "largest_rank must be 'auto', 'full' or a number from 1"),
        ({"dp-budget": 0.0}, "dp_budget must be above 0"),
    ],
)
def test_wrong_limits_are_refused_with_what_is_allowed(config, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        NodeLimits.of_node(config)


def test_a_limit_in_the_node_s_config_reaches_the_mod():
    nodes = [{"partition-id": 0, "require-dp": True}, {"partition-id": 1}]
    (failure,) = run(Gems(min_nodes=1), grid=InProcessGrid(node_app(), nodes)).history[1].failures
    assert failure.node == "0"
    assert "limit require_dp" in failure.reason


def test_simulations_have_no_limits_but_say_so_by_name():
    assert UNLIMITED.share_examples
    assert UNLIMITED.seeded_noise
    assert not NodeLimits().share_examples
    assert not NodeLimits().seeded_noise


def test_a_refusal_says_the_limit_and_not_a_place_in_the_code():
    grid = InProcessGrid(node_app(NodeLimits(require_dp=True)), 1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"verify": True})})
    (reply,) = grid.send_and_receive([Message(content, node, "train")])
    assert "limit require_dp: an exact score" in reply.error.reason
    assert "limits.py" not in reply.error.reason
