"""`Gems(refine=R)`: gradient rounds over the wire, from the cone's layer towards the optimum."""

import re

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from helpers_blobs import CLASSES, FEATURES, blobs, both_parts
from helpers_gems import Spoiled, accuracy, linear_app, run
from helpers_grids import Nameless
from helpers_layerwise import Blobs
from helpers_layerwise import initial as initial_network
from scipy.optimize import minimize
from sklearn.datasets import load_digits

from conftest import record_equal
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import UNLIMITED, NodeLimits
from gems_flwr.client.task_app import task_client_app
from gems_flwr.errors import CheckpointError, OptionError
from gems_flwr.intersect.pooled_moments import pool_moments
from gems_flwr.intersect.tuning import public_weight
from gems_flwr.moments.loss_sums import loss_sums
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.samples import Samples
from gems_flwr.server.refine_options import Refine
from gems_flwr.spaces.space_files import SpaceFolder
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid

RIDGE = 1e-3


def digits(nodes=3, sort=True):
    """The digits, split by label or at random, by node."""
    x, y = load_digits(return_X_y=True)
    order = np.argsort(y, kind="stable") if sort else np.random.default_rng(0).permutation(len(y))
    parts = np.array_split(order, nodes)
    return [(torch.from_numpy(x[p] / 16).float(), torch.from_numpy(y[p])) for p in parts]


def app_of(parts, limits=UNLIMITED):
    def data(context):
        return parts[int(context.node_config["partition-id"])]

    app = ClientApp(mods=[good_enough_mod(both_parts(data), limits=limits)])

    @app.train()
    def train(message, context):
        raise NotImplementedError

    return app


def linear(classes, features, seed=0):
    torch.manual_seed(seed)
    return ArrayRecord(torch.nn.Linear(features, classes).state_dict())


def refine(rounds, **options):
    return Refine(rounds, **{"ridge": RIDGE, **options})


def refined_digits(parts=None, grid=InProcessGrid, limits=UNLIMITED, **options):
    parts = parts or digits()
    options = {"space": Cone(rank=10), "refine": refine(4), **options}
    grid = grid(app_of(parts, limits), len(parts))
    return Gems(**options).start(grid, linear(10, 64))


class Backwards(MeteredGrid):
    """Replies come in the opposite order."""

    def __init__(self, app, nodes):
        super().__init__(InProcessGrid(app, nodes))
        self.came = []

    def stream(self, messages, *, timeout):
        for reply in list(super().stream(messages, timeout=timeout))[::-1]:
            self.came.append(reply.metadata.src_node_id)
            yield reply


def pooled_optimum(parts, scale, weights=None, public=None):
    """The least loss of the pooled data by scipy, and that of a layer of a result."""
    inputs, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    samples = Samples(inputs, labels)
    shape = (10, inputs.shape[1] + 1)
    each = np.ones(10) if weights is None else weights

    def loss(flat):
        layer = flat.reshape(shape)
        sums = loss_sums(samples, layer, scale, each)
        value, gradient = sums.loss / sums.weight, sums.gradient / sums.weight
        if public is not None:
            own = loss_sums(public, layer, scale, np.ones(10))
            factor = public_weight(len(public)) / len(public)
            value, gradient = value + factor * own.loss, gradient + factor * own.gradient
        value += RIDGE * (layer**2).sum()
        return value, (gradient + 2 * RIDGE * layer).reshape(-1)

    found = minimize(
        loss,
        np.zeros(np.prod(shape)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 10000, "ftol": 1e-15, "gtol": 1e-9},
    )
    return found.fun, lambda layer: loss(layer.reshape(-1))[0]


def scale_of(folder):
    cones = list(SpaceFolder(folder / "spaces").load().values())
    return pool_moments(cones).feature_scale.astype(np.float32).astype(np.float64)


def layer_of(result, scale):
    arrays = to_numpy(result.arrays)
    return np.column_stack([arrays["weight"].astype(np.float64) * scale, arrays["bias"]])


# --- towards the pooled optimum ----------------------------------------------------------------


@pytest.mark.parametrize("by_label", [True, False])
@pytest.mark.parametrize("class_weight", ["counts", "balanced"])
def test_the_loss_falls_to_the_pooled_optimum_and_the_bound_holds(tmp_path, by_label, class_weight):
    """Against scipy on the pooled data: the loss that is told, and how far it is from the least."""
    parts = digits(sort=by_label)
    result = refined_digits(
        parts, checkpoint_dir=tmp_path, class_weight=class_weight, refine=refine(6)
    )
    rounds = result.details["refinement"]
    losses = [each["loss"] for each in rounds]
    assert losses == sorted(losses, reverse=True)
    assert all(each["taken"] for each in rounds[:5])
    scale = scale_of(tmp_path)
    labels = torch.cat([y for _, y in parts])
    counts = np.bincount(labels, minlength=10)
    weights = None if class_weight == "counts" else len(labels) / (10 * counts)
    least, loss_at = pooled_optimum(parts, scale, weights)
    reached = loss_at(layer_of(result, scale))
    assert result.details["loss"] == pytest.approx(reached, rel=1e-5)
    assert 0 <= reached - least <= result.details["loss_bound"]
    assert reached - least < 0.01 * losses[0]
    # Every round's bound is about a loss that was at least that of the end.
    assert all(each["loss"] - least <= each["loss_bound"] for each in rounds)
    assert result.details["gradient_norm"] == rounds[-1]["gradient_norm"]


def test_rounds_that_would_not_help_are_not_played():
    result = refined_digits(refine=refine(30, tolerance=1e-3))
    assert len(result.history) < 20
    assert re.search("gain", result.stopped_because)
    assert result.details["refinement"][-1]["converged"]


def test_public_samples_join_the_loss_that_is_refined(tmp_path):
    parts = digits(4)
    public = parts[3]
    result = refined_digits(
        parts[:3], public=public, tune=300, refine=refine(6), checkpoint_dir=tmp_path
    )
    scale = scale_of(tmp_path)
    sample = Samples(public[0][:300], public[1][:300])
    least, loss_at = pooled_optimum(parts[:3], scale, public=sample)
    reached = loss_at(layer_of(result, scale))
    assert result.details["loss"] == pytest.approx(reached, rel=1e-5)
    assert 0 <= reached - least <= result.details["loss_bound"]


def test_a_split_hardly_matters_and_neither_do_rounding_and_sums():
    """Full moments add up exactly, gradients do: all that differs is what is rounded."""
    space = Cone(rank="full", min_count=2)
    plain = refined_digits(space=space, refine=refine(4, dtype="float32"))
    for options in (
        {"parts": digits(sort=False), "refine": refine(4, dtype="float32")},
        {"refine": refine(4, dtype="float16")},
        {"refine": refine(4, dtype="int8")},
        {"space": Cone(sums=True, min_count=2), "refine": refine(4, dtype="float32")},
    ):
        other = refined_digits(**{"space": space, **options})
        assert other.details["loss"] == pytest.approx(plain.details["loss"], rel=2e-2)


def test_without_refinement_nothing_is_different():
    result = run(Gems())
    assert result.history[-1].round == 1
    assert "refinement" not in result.details
    assert "loss_bound" not in result.details


def test_a_single_output_is_refined_as_two_classes():
    parts = [blobs([0, 1], seed=node) for node in range(2)]
    result = Gems(refine=3).start(InProcessGrid(app_of(parts), 2), linear(1, FEATURES))
    losses = [each["loss"] for each in result.details["refinement"]]
    assert result.arrays["weight"].numpy().shape == (1, FEATURES)
    assert not result.failures
    assert losses == sorted(losses, reverse=True)
    assert all(each["taken"] for each in result.details["refinement"])


# --- the same digits ---------------------------------------------------------------------------


class Dies(Gems):
    """Is interrupted before a round."""

    at = 3

    def play_round(self, server_round, *rest):
        if server_round == self.at:
            raise KeyboardInterrupt
        return super().play_round(server_round, *rest)


Dies.__name__ = "Gems"


@pytest.mark.parametrize("space", [Cone(rank=10), Cone(sums=True, min_count=2)])
def test_a_resumed_run_equals_the_unbroken_one(tmp_path, space):
    options = {"space": space, "refine": refine(3)}
    unbroken = refined_digits(**options)
    for at in (2, 3, 4):
        parts, folder = digits(), tmp_path / str(at)
        strategy = Dies(**options, checkpoint_dir=folder)
        strategy.at = at
        with pytest.raises(KeyboardInterrupt):
            strategy.start(InProcessGrid(app_of(parts), len(parts)), linear(10, 64))
        resumed = Gems(**options, checkpoint_dir=folder, resume=True).start(
            Nameless(app_of(parts), len(parts)), linear(10, 64)
        )
        assert record_equal(resumed.arrays, unbroken.arrays)
        assert resumed.details["refinement"] == unbroken.details["refinement"]


def test_the_order_of_replies_does_not_matter():
    grids = []

    def backwards(*given):
        grids.append(Backwards(*given))
        return grids[0]

    assert record_equal(refined_digits(grid=backwards).arrays, refined_digits().arrays)
    came = grids[0].came[:3]
    registered = [node.node_id for node in grids[0].get_nodes()]
    assert came == registered[::-1]


def test_a_run_that_was_begun_without_refinement_is_not_refined_later(tmp_path):
    run(Gems(checkpoint_dir=tmp_path))
    with pytest.raises(CheckpointError, match="begun without refine"):
        run(Gems(checkpoint_dir=tmp_path, resume=True, refine=2))


# --- nodes that fail, or lie ---------------------------------------------------------------------


def failing(parts, silent, limits=UNLIMITED):
    """An app of which some nodes fail in some exchanges: (node, round, what it is asked for)."""
    app = app_of(parts, limits)

    def call(message, context):
        config = message.content["config"]
        asked = [k for k in ("gradient-request", "losses-request") if k in config]
        where = (int(context.node_config["partition-id"]), config["server-round"], *asked)
        if where in silent:
            raise RuntimeError("gone")
        return app(message, context)

    return call


def test_a_node_that_is_missing_in_a_round_is_missing_in_its_loss_alone(tmp_path):
    """Round 3 is about the two others. The bound of round 4 is about all three again."""
    parts = digits(sort=False)
    silent = {(1, 3, "gradient-request")}
    strategy = Gems(space=Cone(rank=10), refine=refine(4), checkpoint_dir=tmp_path)
    result = strategy.start(InProcessGrid(failing(parts, silent), 3), linear(10, 64))
    rounds = result.details["refinement"]
    assert [each["nodes"] for each in rounds] == [3, 2, 3, 3]
    assert [(number, f.node) for number, f in result.failures] == [(3, "1")]
    least, loss_at = pooled_optimum(parts, scale_of(tmp_path))
    reached = loss_at(layer_of(result, scale_of(tmp_path)))
    assert reached - least <= result.details["loss_bound"]
    assert rounds[3]["loss"] < rounds[2]["loss"] < rounds[0]["loss"]


def test_losses_are_compared_over_those_who_told_them():
    parts = digits(sort=False)
    silent = {(2, 2, "losses-request")}
    strategy = Gems(space=Cone(rank=10), refine=refine(2))
    result = strategy.start(InProcessGrid(failing(parts, silent), 3), linear(10, 64))
    first, second = result.details["refinement"]
    assert first["taken"]
    assert first["gain"] > 0
    assert second["loss"] < first["loss"] * 1.1


@pytest.mark.parametrize("what", ["gradient-request", "losses-request"])
def test_the_layer_stays_if_too_few_answer(what):
    parts = digits(sort=False)
    silent = {(node, 2, what) for node in (0, 1)}
    options = {"space": Cone(rank=10), "min_nodes": 2}
    one = Gems(**options).start(InProcessGrid(app_of(parts), 3), linear(10, 64))
    result = Gems(**options, refine=refine(1)).start(
        InProcessGrid(failing(parts, silent), 3), linear(10, 64)
    )
    assert record_equal(result.arrays, one.arrays)
    [told] = result.details["refinement"]
    assert not told["taken"]
    assert "too few nodes" in told["reason"]


def test_if_no_step_lowers_the_loss_the_layer_stays(monkeypatch):
    """A curvature that is wrong by orders of magnitude: the next round knows better."""
    monkeypatch.setattr(
        "gems_flwr.intersect.loss_curvature.LossCurvature.__call__",
        lambda self, layer: 1e-7 * layer,
    )
    result = run(Gems(refine=2), linear_app(limits=UNLIMITED), nodes=2)
    first, second = result.details["refinement"]
    assert not first["taken"]
    assert first["reason"] == "no step lowers the loss"
    assert second["expected_gain"] < first["expected_gain"]
    assert accuracy(result.arrays) > 0.9


def test_a_node_that_sends_nan_is_left_out_by_name():
    def spoil(content):
        if "gradient" in content:
            content["gradient"]["scales"] = np.full(CLASSES, np.nan, "<f4").tobytes()

    result = run(Gems(refine=2), Spoiled(linear_app(limits=UNLIMITED), spoil), nodes=3)
    assert [(n, f.node) for n, f in result.failures] == [(2, "1"), (3, "1")]
    assert all("'scales' holds NaN" in failure.reason for _, failure in result.failures)
    assert [each["nodes"] for each in result.details["refinement"]] == [2, 2]


def lying(content):
    """Claim a gradient that is many times as long as it can be."""
    if "gradient" in content:
        for key, kind in (("scales", "<f4"), ("along", "<f2")):
            larger = 50 * np.frombuffer(content["gradient"][key], kind).astype(np.float64)
            content["gradient"][key] = larger.astype(kind).tobytes()


def test_robust_leaves_out_a_gradient_that_the_moments_do_not_allow():
    plain = run(Gems(refine=2, robust=True), linear_app(limits=UNLIMITED), nodes=6)
    assert not plain.failures  # nothing is held against the honest
    app = Spoiled(linear_app(limits=UNLIMITED), lying)
    result = run(Gems(refine=2, robust=True), app, nodes=6)
    assert {f.node for _, f in result.failures} == {"1"}
    assert "its loss allows" in result.failures[0][1].reason
    assert accuracy(result.arrays) > 0.95


def test_a_node_counts_for_no_more_samples_than_it_is_allowed():
    """Whoever claims a thousand times its samples in a gradient moves it by no more than it did."""

    def boast(content):
        if "gradient" in content:
            scales = np.frombuffer(content["gradient"]["scales"], "<f4") * 1000
            content["gradient"]["scales"] = scales.astype("<f4").tobytes()
            metrics = content["metrics"]
            for key in ("num-examples", "weight-sum", "loss-sum"):
                metrics[key] = metrics[key] * 1000

    honest = run(Gems(refine=2), linear_app(limits=UNLIMITED), nodes=4)
    result = run(Gems(refine=2), Spoiled(linear_app(limits=UNLIMITED), boast), nodes=4)
    found, wanted = (to_numpy(each.arrays)["weight"] for each in (result, honest))
    assert found == pytest.approx(wanted, rel=0.2, abs=0.05)


# --- what may be asked ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"space": Ball()}, "refine needs cones"),
        ({"space": Ellipsoid()}, "refine needs cones"),
        ({"space": Cone(dp_epsilon=1.0, dp_clip=3.0)}, "refine goes without dp_epsilon"),
        ({"refine": -1}, "refine.rounds must be an integer from 0"),
        ({"refine": True}, "refine.rounds must be an integer from 0"),
    ],
)
def test_what_does_not_go_together_is_refused(options, reason):
    with pytest.raises(OptionError, match=reason):
        Gems(**{"refine": 2, **options})


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (NodeLimits(share_gradients=False), "share_gradients"),
        (NodeLimits.of_node({"share-gradients": False}), "share_gradients"),
    ],
)
def test_a_node_may_keep_its_gradients(limits, reason):
    result = run(Gems(refine=1), linear_app(limits=limits))
    assert all(reason in failure.reason for _, failure in result.failures)
    assert len(result.failures) == 2
    assert not result.details["refinement"][0]["taken"]


def test_the_gradient_of_too_few_samples_is_refused():
    """One sample's gradient is that sample, multiplied by numbers that the server knows."""
    for count, refused in ((1, True), (60, False)):
        limits = NodeLimits()
        if refused:
            with pytest.raises(Exception, match="it takes 3 at least"):
                limits.check_gradient(count, count, features=10)
        else:
            limits.check_gradient(count, count, features=10)
    with pytest.raises(Exception, match=r"as good as 1.2 samples make up a row"):
        NodeLimits().check_gradient(500, 1.2, features=10)
    NodeLimits(largest_rank="full").check_gradient(1, 1.0, features=10)
    with pytest.raises(Exception, match="require_dp"):
        NodeLimits(require_dp=True).check_losses()


# --- the head of a network ----------------------------------------------------------------------


def test_the_head_of_a_network_is_refined(tmp_path):
    app = task_client_app(lambda c: Blobs(c.node_config["partition-id"], (8, 5)), limits=UNLIMITED)

    def play(**options):
        strategy = LayerwiseGems(head=Gems(space=Cone(min_count=2), refine=2), **options)
        return strategy.start(InProcessGrid(app, 2), initial_network())

    result = play(verify=True)
    assert [record.round for record in result.history] == [0, 1, 2, 3, 4, 5]
    losses = [each["loss"] for each in result.details["refinement"]]
    assert losses == sorted(losses, reverse=True)
    assert result.details["loss_bound"] <= losses[-1] * (1 + 1e-6)
    assert set(result.details["node_scores"]) == {"0", "1"}
    assert result.details["hidden"]

    class Stops(LayerwiseGems):
        def play_round(self, server_round, *rest):
            if server_round == 5:
                raise KeyboardInterrupt
            return super().play_round(server_round, *rest)

    Stops.__name__ = "LayerwiseGems"
    head = Gems(space=Cone(min_count=2), refine=2)
    with pytest.raises(KeyboardInterrupt):
        Stops(head=head, verify=True, checkpoint_dir=tmp_path).start(
            InProcessGrid(app, 2), initial_network()
        )
    resumed = play(verify=True, checkpoint_dir=tmp_path, resume=True)
    assert record_equal(resumed.arrays, result.arrays)


def test_tuning_all_layers_does_not_go_with_refining_the_last():
    with pytest.raises(OptionError, match=r"head\.refine goes with tune_layers='last'"):
        LayerwiseGems(
            head=Gems(refine=1),
            tune=1,
            tune_layers="all",
            public_data=(np.zeros((2, 3)), np.zeros(2)),
            build_model=lambda: torch.nn.Linear(3, 2),
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ridge": 0.0}, "refine.ridge must be above 0"),
        ({"tolerance": -1.0}, "refine.tolerance must be at least 0"),
        ({"dtype": "int4"}, "refine.dtype must be one of"),
    ],
)
def test_how_to_refine_is_checked(options, reason):
    with pytest.raises(OptionError, match=reason):
        Refine(2, **options)


def test_classes_whose_nodes_send_no_gradient_are_not_unlearned():
    """Node 1 alone has digits of its own; the loss of the others would be lower without them."""

    def spoil(content):
        if "gradient" in content:
            content["gradient"]["scales"] = np.full(10, np.nan, "<f4").tobytes()

    parts = digits()
    one = refined_digits(parts, refine=0)
    grid = InProcessGrid(Spoiled(app_of(parts), spoil), len(parts))
    result = Gems(space=Cone(rank=10), refine=refine(1)).start(grid, linear(10, 64))
    [told] = result.details["refinement"]
    assert "sent no gradient" in told["reason"]
    assert record_equal(result.arrays, one.arrays)
