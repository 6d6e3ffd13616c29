"""GEMS in one round: the strategy and the client mod, together over the wire."""

import errno
import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CENTERS, CLASSES, FEATURES, TEST, blobs, both_parts
from helpers_gems import accuracy, initial, linear_app, node_data, run
from safetensors.numpy import load_file
from torch import nn

from conftest import record_equal, refuse_writing
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.limits import UNLIMITED, NodeLimits
from gems_flwr.errors import CheckpointError, EmptyIntersectionError, OptionError, RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.spaces.space_files import load_space
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid, SpaceRequest

ANY_RANK = NodeLimits(largest_rank="full")


# --- what comes out -------------------------------------------------------------------------


def test_cones_give_in_one_round_a_model_that_knows_all_classes():
    """Each node has seen two of four classes; no local model can be right more than half."""
    grid = MeteredGrid(InProcessGrid(linear_app(), 2))
    result = Gems(verify=True).start(grid, initial())
    assert accuracy(result.arrays) > 0.95
    assert result.history[-1].round == 1
    assert result.details["status"] == "feasible"
    assert set(result.details["node_scores"]) == {"0", "1"}
    assert min(result.details["node_scores"].values()) > 0.9
    assert not result.details["is_average"]


@pytest.mark.parametrize("space", [Ball, Ellipsoid])
def test_at_a_low_epsilon_balls_and_ellipsoids_give_the_plain_average(space):
    """The papers' own observation (2019, Appendix C.1), said by the result."""
    average = FedAvg(weighted=False).start(InProcessGrid(linear_app(), 2), initial(), num_rounds=1)
    result = run(Gems(space=space(epsilon=0.3, directions=50)))
    assert result.details["is_average"]
    assert result.details["status"] == "feasible"
    for key in ("weight", "bias"):
        assert result.arrays[key].numpy() == pytest.approx(average.arrays[key].numpy(), abs=1e-5)
    assert {r["method"] for r in result.details["radii"].values()} == {"sampled"}


def test_certified_balls_do_not_meet_and_the_result_says_so():
    result = run(Gems(space=Ball(epsilon=0.95, radius="certified")))
    assert result.details["empty"]
    assert result.details["status"] == "empty"
    assert min(result.details["margins"].values()) < 0


def test_an_empty_intersection_fails_when_that_is_wanted():
    with pytest.raises(EmptyIntersectionError, match="proved to be empty"):
        run(Gems(space=Ball(epsilon=0.95, radius="certified"), on_empty="fail"))


@pytest.mark.parametrize("space", [Ball, Ellipsoid])
def test_an_empty_intersection_is_relaxed_to_the_largest_epsilon_that_works(space):
    """Nodes 0 and 2 hold the same two labels; their models are about one unit apart."""

    def two(strategy):
        alike = [{"partition-id": 0}, {"partition-id": 2}]
        return strategy.start(InProcessGrid(linear_app(offset=0.1), alike), initial()).details

    def strict(epsilon=0.4):
        return {"space": space(epsilon=epsilon, radius="certified"), "verify": True}

    assert two(Gems(**strict(1.0)))["empty"]
    relaxed = two(Gems(**strict(1.0), on_empty="relax"))
    epsilon = relaxed["epsilon"]
    assert relaxed["status"] == "feasible"
    assert 0 < epsilon < 1.0
    automatic = two(Gems(**strict(), epsilon="auto"))
    assert automatic["epsilon"] == epsilon
    assert {r["epsilon"] for r in automatic["radii"].values()} == {epsilon}
    assert two(Gems(**strict(epsilon + 0.02)))["empty"]
    # The radii are certified, so every node is served as promised on its own data.
    assert min(relaxed["node_scores"].values()) >= epsilon


def test_balls_that_meet_at_no_epsilon_are_said_to_be_empty():
    assert run(Gems(space=Ball(radius="certified"), epsilon="auto")).details["empty"]


def test_retraining_adds_balls_until_the_spaces_meet_or_the_rounds_are_over(tmp_path):
    starts = []

    def initialise(server_round):
        starts.append(server_round)
        return to_numpy(initial(seed=server_round))

    strategy = Gems(
        space=Ball(epsilon=0.95, radius="certified"),
        on_empty="retrain",
        retrains=2,
        initialise=initialise,
        verify=True,
        checkpoint_dir=tmp_path,
    )
    result = run(strategy)
    assert [record.round for record in result.history] == [0, 1, 2, 3]
    assert starts == [2, 3]
    assert len(load_space(tmp_path / "spaces" / "0.space.safetensors").balls) == 3
    assert set(result.details["node_scores"]) == {"0", "1"}


def test_retraining_stops_as_soon_as_the_spaces_meet():
    strategy = Gems(
        space=Ball(epsilon=0.3, directions=20), on_empty="retrain", initialise=lambda n: {}
    )
    result = run(strategy)
    assert result.history[-1].round == 1
    assert result.stopped_because == "the spaces meet"


def test_each_node_can_have_an_epsilon_of_its_own():
    class Nameless(InProcessGrid):
        """As on Ray: names must be asked for, which the mod answers."""

        def get_nodes(self):
            return []

    strategy = {"space": Ball(directions=20), "epsilon": {0: 0.3, "1": 0.6}}
    result = run(Gems(**strategy))
    assert {n: r["epsilon"] for n, r in result.details["radii"].items()} == {"0": 0.3, "1": 0.6}
    asked = Gems(**strategy).start(Nameless(linear_app(), 2), initial())
    assert asked.details["radii"] == result.details["radii"]


@pytest.mark.parametrize("space", [Ball(directions=20), Cone()])
def test_fine_tuning_on_public_data_helps_or_does_no_harm(space):
    x, y = blobs(range(CLASSES), 10, seed=5)
    order = np.random.default_rng(0).permutation(len(y))
    public = (x.numpy()[order], y.numpy()[order])
    plain = run(Gems(space=space))
    tuned = run(Gems(space=space, tune=40, public=public))
    assert tuned.details["tuned_on"] == 40
    assert not tuned.details["is_average"]
    assert accuracy(tuned.arrays) >= accuracy(plain.arrays) - 0.01


def test_low_rank_and_clusters_reach_the_node(tmp_path):
    strategy = Gems(space=Cone(rank=2, clusters=2, min_count=10), checkpoint_dir=tmp_path)
    result = run(strategy, linear_app(limits=ANY_RANK))
    assert accuracy(result.arrays) > 0.9
    cone = load_space(tmp_path / "spaces" / "0.space.safetensors")
    assert cone.covariance.form == "low_rank"
    assert cone.labels.tolist() == [0, 0, 1, 1]


def test_sums_give_the_same_layer_as_full_moments_without_looking_at_a_node():
    app = linear_app(limits=ANY_RANK)
    apart, summed = run(Gems(space=Cone(rank="full")), app), run(Gems(space=Cone(sums=True)), app)
    assert summed.arrays["weight"].numpy() == pytest.approx(
        apart.arrays["weight"].numpy(), rel=1e-2, abs=1e-3
    )
    assert set(summed.details["margins"]) == {"all nodes"}


@pytest.mark.parametrize(("options", "kept"), [({"rank": "full"}, 2), ({"sums": True}, 0)])
def test_the_sums_of_a_single_node_are_never_written(options, kept, tmp_path):
    """One of three nodes fails the round: other replies wait on disk to be resumed, sums do not."""

    def unusable(content):
        for key in ("space", "class-sums"):
            content.pop(key, None)

    app = linear_app(spoil=unusable, limits=ANY_RANK)
    with pytest.raises(RoundFailedError):
        run(Gems(space=Cone(**options), min_nodes=3, checkpoint_dir=tmp_path), app, nodes=3)
    assert len(list(tmp_path.glob("inbox/*"))) == kept
    assert not list(tmp_path.glob("spaces/*"))


def test_classes_with_too_few_samples_are_withheld_and_named():
    def few(context):
        x, y = node_data(context, 1)
        keep = (y != 0) | (torch.arange(len(y)) < 5)
        return x[keep], y[keep]

    result = run(Gems(space=Cone(min_count=20)), linear_app(few))
    assert result.details["withheld"] == {"0": [0]}


def test_a_private_space_says_so_and_its_noise_is_secret(tmp_path):
    strategy = {"dp_epsilon": 5.0, "dp_clip": 10.0, "min_count": 2}
    one = run(Gems(space=Cone(**strategy), checkpoint_dir=tmp_path))
    two = run(Gems(space=Cone(**strategy)))
    assert not record_equal(one.arrays, two.arrays)
    assert load_space(tmp_path / "spaces" / "0.space.safetensors").privacy == (5.0, 1e-5)
    app = linear_app(limits=UNLIMITED)
    seeded = Gems(space=Cone(dp_seeded=True, **strategy))
    assert record_equal(run(seeded, app).arrays, run(seeded, app).arrays)


def test_the_result_is_the_same_every_time_and_depends_on_the_seed():
    def weights(seed):
        strategy = Gems(space=Ball(epsilon=0.7, directions=20), seed=seed)
        return run(strategy).details["radii"]["0"]["value"]

    assert weights(1) == weights(1)
    assert weights(1) != weights(2)


# --- the mod --------------------------------------------------------------------------------


def test_without_a_request_the_mod_does_nothing():
    result = FedAvg().start(InProcessGrid(linear_app(), 2), initial(), num_rounds=1)
    assert accuracy(result.arrays) > 0.4


DATA = both_parts(lambda context: node_data(context, 1))


def frozen_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    for weight in net[1].parameters():
        weight.requires_grad = False
    return net


def net_app(freeze=True, **options):
    app = ClientApp(mods=[good_enough_mod(DATA, model=frozen_net, **options)])

    @app.train()
    def train(message, context):
        net = frozen_net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        weights = net[3].parameters() if freeze else net.parameters()
        for weight in net.parameters():
            weight.requires_grad = True
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
    with pytest.raises(RoundFailedError, match=r"^write freeze_layers.* changed \['1.weight'\]"):
        run_net(Gems(space=Ball(epsilon=0.3)), net_app(freeze=False))
    # A cone is about the layers that the server sent, whatever training does.
    assert net_accuracy(run_net(Gems(), net_app(freeze=False)).arrays) > 0.9


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (lambda: net_app(layer="7"), "no layer '7'"),
        (lambda: linear_app(model=lambda: nn.Linear(3, 3)), "size mismatch"),
        (lambda: linear_app(lambda c: (torch.zeros(3, 2), torch.zeros(3))), "has 6 inputs"),
        (lambda: linear_app(lambda c: []), "with train data in it.* there is no sample"),
        (lambda: linear_app(lambda c: iter([])), "no data to build a space on"),
        (lambda: linear_app(lambda c: [{"a": 1, "b": 2}]), "a batch must have"),
    ],
)
def test_what_the_mod_cannot_work_with_is_said(app, words):
    start = run_net if "net_app" in app.__code__.co_names else run
    with pytest.raises(RoundFailedError, match=words):
        start(Gems(), app())


def test_a_network_without_its_module_is_refused():
    app = ClientApp(mods=[good_enough_mod(DATA)])
    app.train()(lambda message, context: None)
    with pytest.raises(RoundFailedError, match=r"^write good_enough_mod\(data, model=Net\): "):
        run_net(Gems(), app)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: (x.numpy(), y.numpy()),
        lambda x, y: [(x[:50], y[:50]), (x[50:], y[50:])],
        lambda x, y: [{"img": x, "label": y}],
        lambda x, y: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32),
    ],
)
def test_data_may_come_in_any_of_the_usual_forms(form):
    result = run(Gems(), linear_app(lambda c: form(*node_data(c, 1))))
    assert accuracy(result.arrays) > 0.95


@pytest.mark.parametrize("space", ["cone", Ball(directions=5)])
def test_a_model_may_be_a_bare_linear_layer(space):
    """The module that is the output layer has no name of its own."""
    bare = run(Gems(space=space), linear_app(model=lambda: nn.Linear(FEATURES, CLASSES)))
    without = run(Gems(space=space), linear_app())
    assert record_equal(bare.arrays, without.arrays)


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
    run(Gems(), app)
    assert set(read) == {"train"}
    read.clear()
    run(Gems(space=Ball(directions=5)), app)
    assert set(read) == {"validation"}
    read.clear()
    run(Gems(verify=True), app)
    # Without a module there is no layer to be found: each is read once, by each of two nodes.
    assert read == ["train", "train", "validation", "validation"]


def test_batches_that_can_be_had_only_once_are_all_counted(tmp_path):
    """The first batch shows the mod which layer is the last; it is data all the same."""

    def once(context):
        x, y = node_data(context, 1)
        return ((x[i : i + 40], y[i : i + 40]) for i in range(0, len(y), 40))

    def counts(source, name):
        app = linear_app(source, model=lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES)))
        start = ArrayRecord({"0.weight": Array(np.zeros((CLASSES, FEATURES), "f4"))})
        start["0.bias"] = Array(np.zeros(CLASSES, "f4"))
        Gems(checkpoint_dir=tmp_path / name).start(InProcessGrid(app, 2), start)
        return load_space(tmp_path / name / "spaces" / "0.space.safetensors").counts.tolist()

    whole = counts(lambda context: node_data(context, 1), "whole")
    assert counts(once, "once") == whole


def test_a_logistic_model_with_one_output_is_a_model_of_two_classes():
    def data(context):
        x, y = blobs([0, 1], seed=context.node_config["partition-id"])
        return x, y

    app = ClientApp(mods=[good_enough_mod(both_parts(data))])

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 10})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    start = ArrayRecord(
        {"coef": Array(CENTERS[1:2] - CENTERS[:1]), "intercept": Array(np.zeros(1))}
    )
    result = Gems().start(InProcessGrid(app, 2), start)
    x, y = blobs([0, 1], 200, seed=50)
    scores = x.numpy() @ result.arrays["coef"].numpy()[0] + result.arrays["intercept"].numpy()[0]
    assert ((scores > 0) == y.numpy()).mean() > 0.95
    ball = Gems(space=Ball(epsilon=0.5, directions=20)).start(InProcessGrid(app, 2), start)
    assert ball.details["status"] == "feasible"


# --- bad nodes ------------------------------------------------------------------------------


def in_space(change):
    """Return a spoiler that changes the arrays of a space."""

    def spoil(content):
        arrays = to_numpy(content["space"])
        change(arrays)
        content["space"] = to_record(arrays)

    return spoil


def in_meta(change):
    def spoil(content):
        meta = json.loads(content["space-meta"]["json"])
        change(meta)
        content["space-meta"] = ConfigRecord({"json": json.dumps(meta)})

    return spoil


def set_item(key, value):
    return lambda mapping: mapping.__setitem__(key, value)


CONE_FAULTS = {
    "NaN mean": (in_space(lambda a: a["means"].__setitem__((0, 0), np.nan)), "means"),
    "class out of range": (in_space(lambda a: a["labels"].__setitem__(0, 17)), "labels"),
    "counts that do not add up": (in_space(lambda a: a["counts"].__setitem__(0, 3)), "total_count"),
    "negative count": (in_space(lambda a: a["counts"].__setitem__(0, -3)), "counts"),
    "absurd scale": (in_space(lambda a: a["means"].__imul__(np.float32(1e9))), "means"),
    "wrong shape": (in_space(set_item("means", np.zeros((2, 3), np.float32))), "means"),
    "surplus array": (in_space(set_item("x", np.zeros(1))), "x"),
    "another kind": (in_meta(set_item("kind", "ball")), "ball"),
    "another task": (in_meta(set_item("num_classes", 9)), "shape"),
    "meta that is no object": (
        lambda c: c.__setitem__("space-meta", ConfigRecord({"json": "3"})),
        "JSON object",
    ),
    "meta that is no JSON": (
        lambda c: c.__setitem__("space-meta", ConfigRecord({"json": "{"})),
        "JSON",
    ),
    "no meta": (lambda c: c.__delitem__("space-meta"), "space-meta"),
    "no space": (lambda c: c.__delitem__("space"), "space"),
}


@pytest.mark.parametrize("fault", CONE_FAULTS)
def test_a_bad_cone_is_rejected_by_node_and_reason_and_the_others_are_aggregated(fault):
    spoil, words = CONE_FAULTS[fault]
    app = linear_app(spoil=spoil, limits=ANY_RANK)
    result = run(Gems(space=Cone(rank="full"), min_nodes=1), app, nodes=3)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert words in failure.reason
    assert set(result.details["margins"]) == {"0", "2"}


def radius(value):
    return in_meta(lambda meta: meta["radius"].__setitem__("value", value))


BALL_FAULTS = {
    "negative radius": (radius(-1.0), "radius"),
    "NaN radius": (radius(float("nan")), "radius"),
    "radius that is no number": (radius("large"), "radius"),
    "invented method": (in_meta(lambda m: m["radius"].__setitem__("method", "guessed")), "method"),
    "short centre": (in_space(lambda a: a.__setitem__("center", a["center"][:-1])), "shape"),
    "rising curve": (in_space(lambda a: a.__setitem__("curve", a["curve"][::-1])), "curve"),
    "no curve": (in_space(lambda a: a.__delitem__("curve")), "curve"),
}


@pytest.mark.parametrize("fault", BALL_FAULTS)
def test_a_bad_ball_is_rejected_by_node_and_reason(fault):
    spoil, words = BALL_FAULTS[fault]
    strategy = Gems(space=Ball(radius="worst"), epsilon="auto", min_nodes=1)
    result = run(strategy, linear_app(spoil=spoil), nodes=3)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert words in failure.reason


SUM_FAULTS = {
    "negative counts": ("counts", lambda a: a * 0 - 1, "counts"),
    "negative squares": ("outers", lambda a: a * 0 - 1, "squares"),
    "another shape": ("sums", lambda a: a[:, 1:], "shape"),
    "NaN": ("sums", lambda a: a * np.float32("nan"), "NaN"),
}


@pytest.mark.parametrize("fault", SUM_FAULTS)
def test_bad_sums_are_rejected(fault):
    key, change, words = SUM_FAULTS[fault]

    def spoil(content):
        arrays = to_numpy(content["class-sums"])
        arrays[key] = change(arrays[key])
        content["class-sums"] = to_record(arrays)

    app = linear_app(spoil=spoil, limits=ANY_RANK)
    result = run(Gems(space=Cone(sums=True), min_nodes=1), app, nodes=3)
    (failure,) = result.history[1].failures
    assert words in failure.reason


@pytest.mark.parametrize("score", [1.5, -0.1, float("nan"), [0.5, 0.5]])
def test_a_score_that_is_none_is_left_out(score):
    def spoil(content):
        if "metrics" in content:
            content["metrics"] = MetricRecord({"score": score})

    result = run(Gems(verify=True), linear_app(spoil=spoil))
    assert set(result.details["node_scores"]) == {"0"}


def test_a_node_whose_own_model_is_not_good_enough_says_so():
    hopeless = linear_app(lambda c: (node_data(c)[0], torch.zeros(120, dtype=torch.long) + 3))
    with pytest.raises(RoundFailedError, match=r"the centre must reach accuracy at least 0\.9"):
        run(Gems(space=Ball(epsilon=0.9)), hopeless)


# --- files and resuming ---------------------------------------------------------------------


def test_received_spaces_are_kept_as_files_and_a_finished_run_asks_nobody(tmp_path):
    grid = MeteredGrid(InProcessGrid(linear_app(), 3))
    first = Gems(checkpoint_dir=tmp_path).start(grid, initial())
    names = sorted(path.name for path in (tmp_path / "spaces").iterdir())
    assert names == [f"{node}.space.safetensors" for node in range(3)]
    sent = grid.total
    again = Gems(checkpoint_dir=tmp_path, resume=True).start(grid, initial())
    assert grid.total == sent
    assert record_equal(first.arrays, again.arrays)


def test_a_new_run_in_the_same_folder_forgets_the_spaces_of_the_old_one(tmp_path):
    run(Gems(checkpoint_dir=tmp_path), nodes=3)
    run(Gems(checkpoint_dir=tmp_path), nodes=2)
    assert len(list((tmp_path / "spaces").iterdir())) == 2


def test_a_disk_without_room_for_spaces_costs_nothing_but_those_files(
    tmp_path, monkeypatch, caplog
):
    refuse_writing(monkeypatch, errno.ENOSPC, "spaces/")
    result = run(Gems(checkpoint_dir=tmp_path))
    assert record_equal(result.arrays, run(Gems()).arrays)
    assert "event=spaces_not_kept round=1" in caplog.text
    # Where later rounds need them, a resumed run would be another one.
    needs = {"space": "ball", "on_empty": "retrain", "initialise": lambda number: initial()}
    with pytest.raises(CheckpointError, match=r"No space left .* a resumed run goes on from it"):
        run(Gems(checkpoint_dir=tmp_path, **needs))


def test_a_verification_that_was_interrupted_does_not_ask_for_spaces_again(tmp_path):
    class Dies(InProcessGrid):
        def collect(self, message_ids, *, timeout):
            for reply in super().collect(message_ids, timeout=timeout):
                if "metrics" in reply.content:
                    raise KeyboardInterrupt
                yield reply

    with pytest.raises(KeyboardInterrupt):
        Gems(verify=True, checkpoint_dir=tmp_path).start(Dies(linear_app(), 2), initial())
    grid = MeteredGrid(InProcessGrid(linear_app(), 2))
    result = Gems(verify=True, checkpoint_dir=tmp_path, resume=True).start(grid, initial())
    assert grid.total.messages_down == 2
    assert set(result.details["node_scores"]) == {"0", "1"}


def test_a_request_survives_the_wire_and_an_unknown_wish_is_refused():
    request = Ball(epsilon=0.7, radius="worst", curve=True)
    assert SpaceRequest.from_json(request.to_json()) == request
    with pytest.raises(ValueError, match="does not know"):
        SpaceRequest.from_json('{"shape": "star"}')


@pytest.mark.parametrize(
    "options",
    [
        {"space": "cube"},
        {"epsilon": "best"},
        {"epsilon": "auto"},
        {"space": "ball", "epsilon": {"0": -1.0}},
        {"space": "ball", "on_empty": "retrain"},
        {"on_empty": "shrug"},
        {"select": "best"},
        {"tune": 5},
        {"tune": -1},
        {"retrains": -1},
        {"ridge": -1.0},
        {"class_weight": "heavy"},
        {"space": Ball(radius="bisection"), "epsilon": "auto"},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValueError, match=r"must|needs|expected"):
        Gems(**options)


@pytest.mark.parametrize(
    ("space", "options"),
    [
        (Cone, {"epsilon": 0.2}),
        (Ball, {"epsilon": 1.5}),
        (Ball, {"radius": "guessed"}),
        (Ball, {"measure": "beauty"}),
        (Ball, {"directions": 0}),
        (Ellipsoid, {"floor": 0.0}),
        (Ellipsoid, {"damping": -1e-5}),
        (Ellipsoid, {"labels": "true"}),
        (Ellipsoid, {"fisher_samples": 0}),
        (Cone, {"rank": 0}),
        (Cone, {"clusters": 0}),
        (Cone, {"min_count": 1}),
        (Cone, {"sums": True, "rank": 3}),
        (Cone, {"dp_epsilon": -1.0}),
    ],
    ids=str,
)
def test_a_space_says_what_is_allowed(space, options):
    with pytest.raises(ValueError, match=r"must|expected"):
        space(**options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ball(rank=20), "a Ball has no rank, it has .*; it is an option of Cone$"),
        (lambda: Cone(floor=0.1), "a Cone has no floor, .*; it is an option of Ellipsoid$"),
        (lambda: Cone(radius="worst"), "; it is an option of Ball and Ellipsoid$"),
        (lambda: Ball(colour="red"), "a Ball has no colour, it has .*directions, curve$"),
        (lambda: Gems(rank=20), r"Gems has no rank; write space=Cone\(rank=…\)$"),
        (lambda: Gems(radius="worst"), r"Gems has no radius; write space=Ball\(radius=…\)$"),
    ],
)
def test_an_option_of_another_space_is_refused_with_where_it_belongs(make, words):
    with pytest.raises(OptionError, match=words):
        make()


@pytest.mark.parametrize("space", ["ball", Ellipsoid(floor=0.3)])
def test_an_epsilon_of_all_nodes_belongs_to_the_space(space):
    name = "Ball" if space == "ball" else "Ellipsoid"
    with pytest.raises(ValueError, match=rf"is the space's: space={name}\(epsilon=0.6\)$"):
        Gems(space=space, epsilon=0.6)


def test_the_model_file_and_the_strategys_layer_agree(tmp_path):
    from gems_flwr.__main__ import main

    result = run(Gems(checkpoint_dir=tmp_path))
    files = [str(path) for path in sorted((tmp_path / "spaces").iterdir())]
    assert main(["aggregate", *files, "-o", str(tmp_path / "m.safetensors")]) == 0
    arrays = load_file(tmp_path / "m.safetensors")
    assert arrays["weight"] == pytest.approx(result.arrays["weight"].numpy(), abs=1e-6)
