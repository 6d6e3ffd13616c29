"""GEMS in one round: the strategy and the client mod, together over the wire."""

import errno
import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CENTERS, CLASSES, FEATURES, TEST, blobs, both_parts
from helpers_gems import accuracy, in_space, initial, linear_app, node_data, run
from helpers_grids import Nameless
from torch import nn

from conftest import record_equal, refuse_writing
from gems_flwr import (
    Ball,
    Cone,
    Ellipsoid,
    Gems,
    Head,
    InProcessGrid,
    Means,
    MeteredGrid,
    NodeLimits,
    OneShotAverage,
    SecureSum,
    Tolerance,
    Tune,
    good_enough_mod,
)
from gems_flwr.core.records import to_record
from gems_flwr.errors import OptionError, RoundFailedError
from gems_flwr.node.limits import UNLIMITED
from gems_flwr.spaces import load_space

ANY_RANK = NodeLimits(largest_rank="full")
SUMS = Cone(sums=True, sketch=4)
PUBLIC = Tune(np.zeros((5, FEATURES)), np.zeros(5, int))


# --- what comes out -------------------------------------------------------------------------


def test_cones_give_in_one_round_a_model_that_knows_all_classes():
    """Each node has seen two of four classes; no local model can be right more than half."""
    result = run(Gems(verify=True))
    assert accuracy(result.arrays) > 0.95
    assert result.history[-1].round == 1
    assert result.details["status"] == "feasible"
    assert set(result.details["node_scores"]) == {"0", "1"}
    assert min(result.details["node_scores"].values()) > 0.9
    assert not result.details["is_average"]
    assert "refinement" not in result.details


@pytest.mark.parametrize("space", [Ball, Ellipsoid])
def test_at_a_low_epsilon_balls_and_ellipsoids_give_the_plain_average(space):
    """The papers' own observation (2019, Appendix C.1), reported by the result."""
    average = OneShotAverage(weighted=False)
    average = average.start(InProcessGrid(linear_app(), 2), initial())
    result = run(Gems(space=space(epsilon=0.3, directions=50)))
    assert result.details["is_average"]
    assert result.details["status"] == "feasible"
    for key in ("weight", "bias"):
        assert result.arrays[key].numpy() == pytest.approx(average.arrays[key].numpy(), abs=1e-5)
    assert {r["method"] for r in result.details["radii"].values()} == {"sampled"}


def test_certified_balls_do_not_meet_and_the_result_reports_it():
    strict = {"epsilon": 0.95, "radius": "certified"}
    result = run(Gems(space=Ball(**strict)))
    assert result.details["empty"]
    assert result.details["status"] == "empty"
    assert min(result.details["margins"].values()) < 0
    assert run(Gems(space=Ball(radius="certified", epsilon="auto"))).details["empty"]


@pytest.mark.parametrize("space", [Ball, Ellipsoid])
def test_an_automatic_epsilon_is_the_largest_at_which_the_spaces_meet(space):
    """Nodes 0 and 2 hold the same two labels; their models are about one unit apart."""

    def two(epsilon):
        alike = [{"partition-id": 0}, {"partition-id": 2}]
        strategy = Gems(space=space(epsilon=epsilon, radius="certified"), verify=True)
        return strategy.start(InProcessGrid(linear_app(offset=0.1), alike), initial()).details

    assert two(1.0)["empty"]
    automatic = two("auto")
    epsilon = automatic["epsilon"]
    assert automatic["status"] == "feasible"
    assert 0 < epsilon < 1.0
    assert {r["epsilon"] for r in automatic["radii"].values()} == {epsilon}
    assert two(epsilon + 0.02)["empty"]
    # The radii are certified, so every node is served as promised on its own data.
    assert min(automatic["node_scores"].values()) >= epsilon


def test_each_node_can_have_an_epsilon_of_its_own():
    """Also where the grid knows no names, as on Ray: then nodes are asked for them."""
    strategy = Gems(space=Ball(directions=20, epsilon={0: 0.3, "1": 0.6}))
    result = run(strategy)
    assert {n: r["epsilon"] for n, r in result.details["radii"].items()} == {"0": 0.3, "1": 0.6}
    asked = strategy.start(Nameless(linear_app(), 2), initial())
    assert asked.details["radii"] == result.details["radii"]


def test_a_private_space_is_marked_and_its_noise_is_secret(tmp_path):
    options = {"dp_epsilon": 5.0, "dp_clip": 10.0, "min_count": 2}
    one = run(Gems(space=Cone(**options), checkpoint_dir=tmp_path))
    two = run(Gems(space=Cone(**options)))
    assert not record_equal(one.arrays, two.arrays)
    assert load_space(tmp_path / "spaces" / "0.space.safetensors").privacy == (5.0, 1e-5)
    app = linear_app(limits=UNLIMITED)
    seeded = Gems(space=Cone(dp_seeded=True, **options))
    assert record_equal(run(seeded, app).arrays, run(seeded, app).arrays)


def test_the_result_is_the_same_every_time_and_depends_on_the_seed():
    def weights(seed):
        strategy = Gems(space=Ball(epsilon=0.7, directions=20), seed=seed)
        return run(strategy).details["radii"]["0"]["value"]

    assert weights(1) == weights(1) != weights(2)


# --- networks, and what the mod cannot work with --------------------------------------------


def frozen_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def net_app(freeze=True, **options):
    data = both_parts(lambda context: node_data(context, 1))
    app = ClientApp(mods=[good_enough_mod(data, **{"model": frozen_net, **options})])

    @app.train()
    def train(message, context):
        net = frozen_net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        weights = net[3].parameters() if freeze else net.parameters()
        optimizer = torch.optim.SGD(weights, lr=0.1)
        x, y = node_data(context)
        for _ in range(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def run_net(strategy, app):
    return strategy.start(InProcessGrid(app, 2), ArrayRecord(frozen_net().state_dict()))


def net_accuracy(arrays):
    net = frozen_net()
    net.load_state_dict(arrays.to_torch_state_dict())
    return float((net(TEST[0]).argmax(1) == TEST[1]).float().mean())


@pytest.mark.parametrize("layer", [None, "3"])
def test_the_output_layer_of_a_torch_module_is_found_or_named(layer):
    result = run_net(Gems(verify=True), net_app(layer=layer))
    assert net_accuracy(result.arrays) > 0.9
    sent = ArrayRecord(frozen_net().state_dict())
    assert np.array_equal(result.arrays["1.weight"].numpy(), sent["1.weight"].numpy())
    ball = run_net(Gems(space=Ball(epsilon=0.3, directions=20)), net_app(layer=layer))
    assert ball.details["is_average"]


def test_lower_layers_that_training_changed_are_refused_with_what_to_do():
    with pytest.raises(RoundFailedError, match=r"^write freeze_layers.* changed \['1.weight'"):
        run_net(Gems(space=Ball(epsilon=0.3)), net_app(freeze=False))
    # A cone is about the layers that the server sent, whatever training does.
    assert net_accuracy(run_net(Gems(), net_app(freeze=False)).arrays) > 0.9


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (lambda: net_app(layer="7"), "no layer '7'"),
        (lambda: net_app(model=None), r"^write good_enough_mod\(data, model=Net\): "),
        (lambda: linear_app(model=lambda: nn.Linear(3, 3)), "size mismatch"),
        (lambda: linear_app(lambda c: []), "with train data in it.* there is no sample"),
    ],
)
def test_what_the_mod_cannot_work_with_is_named(app, words):
    start = run_net if "net_app" in app.__code__.co_names else run
    with pytest.raises(RoundFailedError, match=words):
        start(Gems(), app())


@pytest.mark.parametrize(("space", "layer"), [("cone", None), (Ball(directions=5), "")])
def test_a_model_may_be_a_bare_linear_layer(space, layer):
    """The module that is the output layer has no name of its own: in torch the root is ''."""
    app = linear_app(model=lambda: nn.Linear(FEATURES, CLASSES), layer=layer)
    bare, without = run(Gems(space=space, verify=True), app), run(Gems(space=space, verify=True))
    assert record_equal(bare.arrays, without.arrays)
    assert bare.details["node_scores"] == without.details["node_scores"]


def test_a_space_reads_no_data_but_its_own():
    """A cone is made from training data, a ball from validation data; a score from the latter."""
    read = []

    class Loader:
        def __init__(self, name, data):
            self.name, self.data = name, data

        def __iter__(self):
            read.append(self.name)
            return iter([self.data])

    def data(context):
        parts = {"train": 0, "validation": 1}
        return tuple(Loader(name, node_data(context, seed)) for name, seed in parts.items())

    app = linear_app(data=data)
    run(Gems(space=Ball(directions=5)), app)
    assert set(read) == {"validation"}
    read.clear()
    run(Gems(verify=True), app)
    # Without a module there is no layer to be found: each is read once, by each of two nodes.
    assert read == ["train", "train", "validation", "validation"]


def test_batches_that_can_be_had_only_once_are_all_counted(tmp_path):
    """The first batch shows the mod which layer is the last; it is data all the same."""

    def whole(context):
        return node_data(context, 1)

    def once(context):
        x, y = whole(context)
        return ((x[i : i + 40], y[i : i + 40]) for i in range(0, len(y), 40))

    def counts(source):
        app = linear_app(source, model=lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES)))
        start = to_record({f"0.{key}": array.numpy() for key, array in initial().items()})
        folder = tmp_path / source.__name__
        Gems(checkpoint_dir=folder).start(InProcessGrid(app, 2), start)
        return load_space(folder / "spaces" / "0.space.safetensors").counts.tolist()

    assert counts(once) == counts(whole)


def test_a_logistic_model_with_one_output_is_a_model_of_two_classes():
    def data(context):
        return blobs([0, 1], seed=context.node_config["partition-id"])

    app = ClientApp(mods=[good_enough_mod(both_parts(data), limits=UNLIMITED)])

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 10})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    def start(**options):
        model = {"coef": CENTERS[1:2] - CENTERS[:1], "intercept": np.zeros(1)}
        return Gems(**options).start(InProcessGrid(app, 2), to_record(model))

    result = start(refine=2)
    x, y = blobs([0, 1], 200, seed=50)
    scores = x.numpy() @ result.arrays["coef"].numpy()[0] + result.arrays["intercept"].numpy()[0]
    assert ((scores > 0) == y.numpy()).mean() > 0.95
    assert all(each["taken"] for each in result.details["refinement"])
    ball = start(space=Ball(epsilon=0.5, directions=20))
    assert ball.details["status"] == "feasible"


# --- bad nodes ------------------------------------------------------------------------------


def in_meta(change):
    def spoil(content):
        if "space-meta" in content:
            meta = json.loads(content["space-meta"]["text"])
            change(meta)
            content["space-meta"] = ConfigRecord({"text": json.dumps(meta)})

    return spoil


FULL, CURVE = Cone(rank="full"), Ball(radius="certified", epsilon="auto")
FAULTS = {
    "another kind": (FULL, in_meta(lambda meta: meta.update(kind="ball")), "ball"),
    "another task": (FULL, in_meta(lambda meta: meta.update(num_classes=9)), "shape"),
    "invented method": (CURVE, in_meta(lambda m: m["radius"].update(method="guessed")), "method"),
    "no curve": (CURVE, in_space(lambda a: a.pop("curve")), "curve"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_space_is_rejected_by_node_and_reason_and_the_others_are_aggregated(fault):
    space, spoil, words = FAULTS[fault]
    app = linear_app(spoil=spoil, limits=ANY_RANK)
    result = run(Gems(space=space, min_nodes=1), app, nodes=3)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert words in failure.reason
    assert set(result.details["margins"]) == {"0", "2"}


def test_a_node_whose_own_model_is_not_good_enough_is_named():
    hopeless = linear_app(lambda c: (node_data(c)[0], torch.zeros(120, dtype=torch.long) + 3))
    with pytest.raises(RoundFailedError, match=r"the centre must reach accuracy at least 0\.9"):
        run(Gems(space=Ball(epsilon=0.9)), hopeless)


# --- files and resuming ---------------------------------------------------------------------


def test_received_spaces_are_kept_as_files_and_a_finished_run_asks_no_node(tmp_path):
    grid = MeteredGrid(InProcessGrid(linear_app(), 3))
    first = Gems(checkpoint_dir=tmp_path).start(grid, initial())
    names = sorted(path.name for path in (tmp_path / "spaces").iterdir())
    assert names == [f"{node}.space.safetensors" for node in range(3)]
    sent = grid.total
    again = Gems(checkpoint_dir=tmp_path).start(grid, initial(), resume=True)
    assert grid.total == sent
    assert record_equal(first.arrays, again.arrays)
    run(Gems(checkpoint_dir=tmp_path), nodes=2)
    assert len(list((tmp_path / "spaces").iterdir())) == 2  # a new run forgets the old one's


def test_a_disk_without_room_for_spaces_costs_only_those_files(tmp_path, monkeypatch, caplog):
    refuse_writing(monkeypatch, errno.ENOSPC, "spaces/")
    result = run(Gems(checkpoint_dir=tmp_path))
    assert record_equal(result.arrays, run(Gems()).arrays)
    assert "event=spaces_not_kept round=1" in caplog.text


# --- what goes together -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"space": "cube"}, "space must be one of .*'cone', 'ellipsoid'"),
        ({"head": "qda"}, "head must be one of"),
        ({"head": "lda", "space": Ball()}, r"head='lda' needs class moments: write space=Cone\(\)"),
        ({"head": "lda", "tune": PUBLIC}, "tune needs head='cone'"),
        ({"refine": 2, "space": Ball()}, "refine needs class moments"),
        ({"refine": 2, "space": Cone(dp_epsilon=1.0, dp_clip=3.0)}, "refine needs moments without"),
        ({"refine": True}, "refine.rounds must be an integer from 0"),
        ({"robust": True, "space": SUMS}, "robust needs the spaces of single nodes"),
        ({"robust": True, "space": Ball(epsilon="auto")}, "robust needs spaces that can be held"),
        ({"secure": SecureSum()}, r"secure needs sums.* write space=Cone\(sums=True, sketch=20\)"),
        ({"tolerance": Tolerance(max_examples=9), "space": SUMS}, "max_examples needs the spaces"),
        ({"device": "abacus"}, "device"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_with_what_to_write(options, words):
    with pytest.raises(OptionError, match=words):
        Gems(**options)


def test_what_goes_together_is_taken():
    assert Gems(space=Means(), refine=2, robust=True).rounds_needed == 3
    assert Gems(space=SUMS, tune=PUBLIC, head=Head(ridge=0.1), refine=1).is_summed
    assert Gems(space=Cone(dp_epsilon=1.0), head="auto", verify=True).space.dp_epsilon == 1.0
