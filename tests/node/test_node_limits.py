"""The server asks, the node's own limits answer."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts

from gems_flwr import (
    Ball,
    Cone,
    FedAvg,
    Gems,
    InProcessGrid,
    NodeLimits,
    good_enough_mod,
)
from gems_flwr.core import Disclosure, Group
from gems_flwr.core.records import to_record
from gems_flwr.errors import CheckpointError, OptionError, RefusedError, RoundFailedError
from gems_flwr.node.limits import _NODE_KEYS, UNLIMITED, spend
from gems_flwr.spaces import load_space
from gems_flwr.spaces.cone import (
    PrivateChoice,
    PrivateRelease,
    spent_epsilon,
)

FEATURES, CLASSES, COUNT = 12, 3, 60
PRIVATE = Cone(dp_epsilon=3.0, dp_clip=5.0)
RELEASE = PrivateRelease(1.0, 1e-5, 1.0).squared_mu


def data(context):
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    means = np.repeat(np.eye(CLASSES, FEATURES), COUNT, 0)
    x = rng.normal(size=(CLASSES * COUNT, FEATURES)) + means
    return torch.from_numpy(x).float(), torch.from_numpy(np.repeat(np.arange(CLASSES), COUNT))


def node_app(limits=None, source=data):
    app = ClientApp(mods=[good_enough_mod(both_parts(source), limits=limits)])

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
        ({}, Cone(sums=True), "adaptive_answers"),
        ({"adaptive_answers": 3}, Cone(sums=True), "largest_rank"),
        ({"largest_rank": 3}, Cone(rank=4), "largest_rank"),
        ({"min_count": 50}, Cone(min_count=20), "min_count"),
        ({"require_dp": True}, Cone(), "require_dp"),
        ({"require_dp": True}, Ball(), "require_dp"),
        ({"only_sums": True}, PRIVATE, "only_sums"),
        ({}, Cone(dp_epsilon=1.0, dp_seeded=True), "seeded_noise"),
    ],
)
def test_a_request_beyond_a_limit_is_refused_by_its_name(limits, space, limit):
    with pytest.raises(RoundFailedError, match=f"refused by this node's limit {limit}:"):
        run(Gems(space=space), NodeLimits(**limits))


@pytest.mark.parametrize(
    ("limits", "space"),
    [
        ({}, Cone(rank=2)),
        ({"largest_rank": "full"}, Cone(rank="full")),
        ({"largest_rank": 8}, Cone(rank=8)),
        ({"min_count": 50}, Cone(min_count=55)),
        ({"require_dp": True}, PRIVATE),
        ({"seeded_noise": True}, Cone(dp_epsilon=3.0, dp_clip=5.0, dp_seeded=True)),
    ],
)
def test_a_request_within_the_limits_is_answered(limits, space):
    assert run(Gems(space=space), NodeLimits(**limits)).failures == ()


def test_a_refusal_comes_before_data_are_touched_and_names_no_place_in_the_code():
    def untouched(context):
        raise AssertionError("the data were read")

    app = node_app(NodeLimits(require_dp=True), untouched)
    grid = InProcessGrid(app, 2)
    for space in (Ball(), Cone(dp_epsilon=1.0, dp_seeded=True)):
        with pytest.raises(RoundFailedError, match="refused by this node's limit") as caught:
            run(Gems(space=space), grid=grid)
        assert "limits.py" not in str(caught.value)


def test_automatic_moments_stay_below_the_node_s_own_rank(tmp_path, monkeypatch):
    """180 samples of 12 features hide all directions of what is common; one node shows 1."""
    monkeypatch.setattr("gems_flwr.spaces.cone.build.NOISE", 0)  # there is nothing but noise
    for most, expected in (("auto", 12), (1, 1)):
        strategy = Gems(checkpoint_dir=tmp_path / str(most))
        run(strategy, NodeLimits(largest_rank=most))
        cone = load_space(tmp_path / str(most) / "spaces" / "0.space.safetensors")
        assert cone.covariance.ranks.max() == expected


def test_a_class_below_the_node_s_own_count_is_withheld():
    assert run(Gems(), NodeLimits(min_count=60)).details["withheld"] == {}
    with pytest.raises(RoundFailedError, match="at least 61 samples"):
        run(Gems(), NodeLimits(min_count=61))


def test_means_alone_are_of_as_many_samples_as_the_node_says():
    limits = NodeLimits(min_mean_count=9)
    limits.allow(Disclosure("moments", FEATURES, (Group("class 0", 9, None),)))
    # With a covariance that has no direction: the node's own rules made it so small.
    limits.allow(Disclosure("moments", FEATURES, (Group("class 0", 4, 0),)))
    with pytest.raises(RefusedError, match="min_mean_count: it is 9, a mean of 8 samples"):
        limits.allow(Disclosure("moments", FEATURES, (Group("class 0", 8, None),)))


def test_models_and_exact_scores_do_not_leave_a_node_that_demands_privacy():
    with pytest.raises(RoundFailedError, match="limit require_dp: a model"):
        run(FedAvg(), NodeLimits(require_dp=True))
    result = run(FedAvg(fraction_evaluate=1.0), NodeLimits(allow_scores=False))
    assert all("limit allow_scores" in f.reason for _, f in result.failures)
    assert len(result.failures) == 2
    assert run(FedAvg(fraction_evaluate=1.0), NodeLimits()).failures == ()


def test_second_moments_of_a_layers_inputs_are_full_moments_as_well():
    few = Disclosure("second moments", FEATURES, (Group("all samples", 5),))
    NodeLimits(largest_rank="full").allow(few)
    with pytest.raises(RefusedError, match="largest_rank: the second moments of 12 inputs of 5"):
        NodeLimits().allow(few)


def test_scores_of_a_node_that_demands_privacy_are_noised():
    """Exact ones are multiples of 1 / 180."""
    strategy = Gems(space=Cone(dp_epsilon=4.0, dp_clip=5.0), verify=True)
    scores = run(strategy, NodeLimits(require_dp=True)).details["node_scores"].values()
    assert len(scores) == 2
    assert not any(each * 180 == pytest.approx(round(each * 180)) for each in scores)


# --- the ledger -----------------------------------------------------------------------------


def test_noise_that_protects_no_one_opens_no_limit():
    """Full moments with next to no noise are full moments."""
    with pytest.raises(RoundFailedError, match=r"limit dp_budget: epsilon 0 of 10 is spent"):
        run(Gems(space=Cone(dp_epsilon=11.0, rank="full", dp_clip=100.0)))


def test_noise_is_not_averaged_out_by_asking_again():
    """Neither within a run nor by new ones, whose nodes remember their ledgers alone."""
    each = PrivateRelease(3.0, 1e-5, 5.0).squared_mu
    enough = next(k for k in range(100) if spent_epsilon((k + 1) * each, 1e-5) > 10)
    assert 3 < enough < 10
    for _ in range(enough):
        run(Gems(space=PRIVATE))
    with pytest.raises(RoundFailedError, match="limit dp_budget"):
        run(Gems(space=PRIVATE))


def test_what_is_spent_survives_a_restart_and_ends_at_the_budget(tmp_path):
    """Four releases of epsilon 1 are 2.2 at this delta; a fifth would be beyond 2.4."""
    limits = NodeLimits(dp_budget=2.4, ledger=tmp_path / "spent.json")
    spent = [spend(RELEASE, limits, context(), "n") for _ in range(4)]
    assert spent == sorted(spent)
    assert spent[0] == pytest.approx(1.0, abs=1e-4)
    before = (tmp_path / "spent.json").read_text()
    with pytest.raises(RefusedError, match=r"limit dp_budget: epsilon 2\.\d+ of 2\.4 is spent"):
        spend(RELEASE, limits, context(), "n")
    assert (tmp_path / "spent.json").read_text() == before
    assert spend(PrivateChoice(0.05, 1e-5, 1).squared_mu, limits, context(), "n") < 2.4


def test_the_node_s_state_counts_where_the_file_was_lost(tmp_path):
    limits, here = NodeLimits(dp_budget=1.3, ledger=tmp_path / "spent.json"), context()
    spend(RELEASE, limits, here, "n")
    (tmp_path / "spent.json").unlink()
    with pytest.raises(RefusedError, match="dp_budget"):
        spend(RELEASE, limits, here, "n")


@pytest.mark.parametrize("text", ["", '{"squared_mu": -1}', '{"squared_mu": NaN}', "{}"])
def test_a_ledger_that_cannot_be_read_spends_nothing(tmp_path, text):
    (tmp_path / "spent.json").write_text(text)
    with pytest.raises(CheckpointError, match="what was spent is not known"):
        spend(0.1, NodeLimits(dp_budget=9.0, ledger=tmp_path / "spent.json"), context(), "n")


def test_a_whole_run_spends_moments_and_scores(tmp_path):
    ledgers = [{"partition-id": n, "privacy-ledger": str(tmp_path / f"{n}.json")} for n in (0, 1)]
    nodes = [{"dp-budget": 2.0, **ledger} for ledger in ledgers]
    strategy = Gems(space=Cone(dp_epsilon=1.0, dp_clip=5.0), verify=True)
    assert run(strategy, grid=InProcessGrid(node_app(), nodes)).failures == ()
    for node in "01":
        total = json.loads((tmp_path / f"{node}.json").read_text())["squared_mu"]
        parts = PrivateRelease(1.0, 1e-5, 5.0).squared_mu + PrivateChoice(1.0, 1e-5, 1).squared_mu
        assert total == pytest.approx(parts)
        assert 1 < spent_epsilon(total, 1e-5) < 2
    # New nodes, with the files alone: a second run is one too many.
    with pytest.raises(RoundFailedError, match="limit dp_budget"):
        run(Gems(space=Cone(dp_epsilon=1.5)), grid=InProcessGrid(node_app(), nodes))


# --- from the node's config -----------------------------------------------------------------


def test_a_node_sets_its_limits_by_its_own_config():
    config = {"min-count": 40, "require-dp": True, "dp-budget": 3, "partition-id": 0}
    limits = NodeLimits(min_count=40, require_dp=True, dp_budget=3, ledger="spent.json")
    assert NodeLimits.of_node({**config, "privacy-ledger": "spent.json"}) == limits
    # What only simulations allow is for the code to say.
    simulated = {"partition-id": 3, "share-examples": True, "seeded-noise": True}
    assert NodeLimits.of_node(simulated) == NodeLimits()
    assert UNLIMITED.share_examples
    assert UNLIMITED.seeded_noise


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"require-dp": "yes"}, "require-dp: expected bool, got 'yes'"),
        ({"min-count": True}, "min-count: expected int"),
        ({"min-count": 1}, "min_count must be at least 2"),
        ({"largest-rank": "some"}, "largest_rank must be 'auto', 'full' or a number from 1"),
        ({"dp-budget": 0.0}, "dp_budget must be above 0"),
        ({"least-nodes": 2}, "least_nodes must be at least 3"),
        ({"adaptive-answers": -1}, "adaptive_answers must be at least 0"),
        ({"keep-inputs": -1}, "keep_inputs must be at least 0"),
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


def test_a_message_without_a_question_has_no_way_around_a_limit():
    grid = InProcessGrid(node_app(NodeLimits(require_dp=True)), 1)
    (node,) = grid.get_node_ids()
    for kind in ("train", "evaluate"):
        content = RecordDict({"arrays": ArrayRecord()})
        (reply,) = grid.send_and_receive([Message(content, node, kind)])
        assert "limit require_dp: a " in reply.error.reason


def test_every_limit_can_be_set_by_the_nodes_config_and_a_misspelt_one_is_refused():
    """Raw data and noise from a known seed are for simulations, which set them in code."""
    fields = {field.name for field in dataclasses.fields(NodeLimits)}
    assert set(_NODE_KEYS) == fields - {"share_examples", "seeded_noise"}
    assert NodeLimits.of_node({"partition-id": 0, "name": "north"}) == NodeLimits()
    for wrong in ("require_dp", "share-gradient"):
        with pytest.raises(OptionError, match=f"{wrong}: there is no such limit, write"):
            NodeLimits.of_node({wrong: True})
