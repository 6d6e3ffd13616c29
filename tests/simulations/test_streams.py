"""Streams: which batch comes when, drifts, prequential losses, optimisers that remember."""

import numpy as np
import pytest
import torch

from gems_flwr.server.settings import Callback
from gems_flwr.wire.keys import BATCHES, LOSS_SUM
from simulations.config import ConfigError, compose_config
from simulations.data.examples import Dataset, Examples
from simulations.data.graphical import graphical
from simulations.experiment.execution import run_server
from simulations.experiment.experiment import add_noise
from simulations.experiment.training import TrainOptions
from simulations.options import DriftConfig, StreamConfig
from simulations.run import run
from simulations.streams.drift import Drift
from simulations.streams.learning import learn
from simulations.streams.source import BatchSource

DATASET = graphical(seed=1, examples=60, public=10)
SHARES = [DATASET.train.take(range(25)), DATASET.train.take(range(25, 50))]


def numbered(count=50):
    """A data set whose features tell which example they are."""
    rows = Examples(np.arange(count * 2, dtype=np.float32).reshape(count, 2), np.arange(count) % 2)
    return Dataset("numbered", 2, (2,), 1.0, train=rows, public=rows, test=rows)


def source(config=None, dataset=None, batch_size=10, seed=0):
    dataset = dataset or numbered()
    halves = [dataset.train.take(range(25)), dataset.train.take(range(25, 50))]
    return BatchSource(dataset, halves, config or StreamConfig(), batch_size=batch_size, seed=seed)


def ids(batches):
    return sorted(int(row[0]) // 2 for features, _ in batches for row in features)


def test_a_node_passes_over_its_own_share_again_and_again_in_another_order():
    stream = source(batch_size=5)
    passes = [[stream.batch(1, t) for t in range(k * 5 + 1, k * 5 + 6)] for k in range(3)]
    for each in passes:
        assert ids(each) == list(range(25, 50))
    assert not np.array_equal(passes[0][0][0], passes[1][0][0])


def test_a_batch_may_span_two_passes():
    """25 examples in batches of 10: after five batches every example was there twice."""
    stream = source()
    assert ids([stream.batch(0, t) for t in range(1, 6)]) == sorted([*range(25)] * 2)


def test_from_a_pool_all_nodes_together_see_every_example_once_per_pass():
    stream = source(StreamConfig(source="pool"), batch_size=5)
    assert ids([stream.batch(n, t) for t in range(1, 6) for n in range(2)]) == list(range(50))


def test_a_batch_depends_on_seed_node_and_round_alone():
    one, other = source(), source()
    other.batch(0, 9)
    assert np.array_equal(one.batch(1, 4)[0], other.batch(1, 4)[0])
    assert not np.array_equal(one.batch(1, 4)[0], source(seed=1).batch(1, 4)[0])


def test_sampling_rates_are_spread_evenly():
    stream = source(StreamConfig(rate_spread=0.5))
    assert stream.sizes == [5, 15]
    assert len(stream.batch(0, 3)[1]) == 5


# --- drift --------------------------------------------------------------------------------------


def test_concepts_change_at_the_given_rounds():
    drift = Drift(DriftConfig(rounds=[3, 5]), seed=0)
    assert [drift.concept(t) for t in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert drift.rounds(4) == [3]


def test_random_drifts_come_at_their_rate_and_do_not_depend_on_the_length_of_the_run():
    drift = Drift(DriftConfig(probability=0.01), seed=3)
    assert 60 < len(drift.rounds(10_000)) < 140
    assert drift.rounds(500) == [r for r in drift.rounds(10_000) if r <= 500]
    last = drift.rounds(3000)[-1]
    assert drift.concept(last) - drift.concept(last - 1) == 1


@pytest.mark.parametrize("kind", ["labels", "pixels"])
def test_a_drift_permutes_labels_or_pixels_for_all_nodes_alike(kind):
    drift = Drift(DriftConfig(rounds=[2], kind=kind), seed=5)
    features, labels = np.arange(24).reshape(3, 2, 4), np.array([0, 1, 2])
    same_features, same_labels = drift.apply(0, features, labels, 10)
    assert same_features is features
    assert same_labels is labels
    new_features, new_labels = drift.apply(1, features, labels, 10)
    if kind == "labels":
        assert new_features is features
        assert len(set(new_labels)) == 3
        assert not np.array_equal(new_labels, labels)
    else:
        assert new_labels is labels
        assert sorted(new_features[0].ravel()) == list(range(8))
        order = new_features[0].ravel()
        assert np.array_equal(features[1].ravel()[order], new_features[1].ravel())


def test_a_new_graphical_model_is_another_concept_that_can_be_learned():
    """The sign of each feature's covariance with the class classifies its own concept alone."""
    dataset = graphical(seed=2, examples=3000)

    def rule(examples):
        signs = np.where(examples.labels == 1, 1, -1)
        return examples.features.T @ signs

    def accuracy(weights, examples):
        return np.mean((examples.features @ weights > 0) == (examples.labels == 1))

    draws = [dataset.draw(c, 2000, np.random.default_rng(c)) for c in (0, 1)]
    first = rule(draws[0])
    assert accuracy(first, dataset.test) > 0.8
    assert accuracy(rule(draws[1]), draws[1]) > 0.8
    # Some hidden variables keep their sign by chance, so the old rule is not always worthless.
    others = [dataset.draw(c, 2000, np.random.default_rng(c)) for c in range(1, 9)]
    assert 0.3 < np.mean([accuracy(first, each) for each in others]) < 0.7


def test_a_stream_of_a_graphical_model_never_repeats_and_drifts_with_its_test_set():
    config = StreamConfig(drift=DriftConfig(rounds=[3]))
    stream = BatchSource(DATASET, SHARES, config, batch_size=4, seed=0)
    batches = [stream.batch(n, t)[0].tobytes() for n in range(2) for t in range(1, 5)]
    assert len(set(batches)) == 8
    assert stream.test(2) is DATASET.test
    assert not np.array_equal(stream.test(3).features, DATASET.test.features)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"examples": 0}, "examples must be at least 1"),
        ({"hidden": 0}, "hidden must be at least 1"),
        ({"public": 99, "examples": 50}, "public must be from 0 to 49"),
    ],
)
def test_an_impossible_graphical_model_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        graphical(seed=0, **wrong)


# --- learning -----------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(50, 2)


def batches(count):
    rng = np.random.default_rng(1)
    return [(b.features, b.labels) for b in (DATASET.draw(0, 10, rng) for _ in range(count))]


def test_the_loss_is_measured_before_each_update():
    """Two batches by hand: loss of the untouched model, then of the model after one step."""
    model, by_hand = net(), net()
    (x1, y1), (x2, y2) = ((torch.tensor(x), torch.tensor(y)) for x, y in batches(2))
    first = torch.nn.functional.cross_entropy(by_hand(x1), y1)
    first.backward()
    with torch.no_grad():
        for weight in by_hand.parameters():
            weight -= 0.1 * weight.grad
    second = torch.nn.functional.cross_entropy(by_hand(x2), y2)
    options = TrainOptions(optimizer="sgd", lr=0.1)
    count, metrics, memory = learn(model, batches(2), scale=1.0, options=options, seed=0, memory={})
    assert count == 20
    assert metrics[BATCHES] == 2
    assert metrics[LOSS_SUM] == pytest.approx((first + second).item())
    assert memory == {}


@pytest.mark.parametrize(
    "options",
    [
        TrainOptions(optimizer="sgd", lr=0.1, momentum=0.9),
        TrainOptions(optimizer="adam", lr=0.01),
        TrainOptions(optimizer="rmsprop", lr=0.01, momentum=0.5),
    ],
    ids=lambda o: o.optimizer,
)
def test_an_optimiser_goes_on_where_it_was(options):
    """Six batches at once, or two at a time with the state kept in between: the same bits."""
    at_once, in_parts, memory = net(), net(), {}
    settings = {"scale": 1.0, "options": options, "seed": 0}
    learn(at_once, batches(6), memory={}, **settings)
    for part in range(3):
        chosen = batches(6)[2 * part : 2 * part + 2]
        _, _, memory = learn(in_parts, chosen, memory=memory, **settings)
    assert memory
    for one, other in zip(at_once.parameters(), in_parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_noise_is_relative_to_the_scale_of_the_weights():
    model = torch.nn.Linear(100, 100)
    before = model.weight.detach().clone()
    add_noise(model, 3.0, seed=1)
    ratio = float((model.weight.detach() - before).std() / before.std())
    assert ratio == pytest.approx(3.0, rel=0.05)


# --- whole runs ---------------------------------------------------------------------------------

SMALL = ["partition=iid", "nodes=4", "train.batch_size=5", "progress=false", "evaluate_every=100"]


def result(tmp_path, *overrides):
    config = compose_config([*SMALL, *overrides])
    return run(config, tmp_path / config.run_name())


def test_protocols_are_compared_on_the_same_batches(tmp_path):
    """Until the first synchronisation all are the same run."""
    losses = [
        result(tmp_path, "rounds=3", *protocol)["details"]["cumulative_loss"]
        for protocol in (
            ["strategy=nosync"],
            ["strategy=periodic", "strategy.b=3"],
            ["strategy=dynamic", "strategy.delta=1e9", "strategy.check_every=3"],
            ["strategy=nosync", "strategy.report_every=2"],
        )
    ]
    assert losses == pytest.approx([losses[0]] * 4)


def test_several_batches_in_a_round_are_several_rounds_of_one(tmp_path):
    one = result(tmp_path, "strategy=periodic", "strategy.b=3", "rounds=12")
    other = result(
        tmp_path, "strategy=periodic", "rounds=4", "stream.batches_per_round=3", "strategy.b=1"
    )
    assert one["details"]["cumulative_loss"] == pytest.approx(other["details"]["cumulative_loss"])
    assert one["bytes_up"] == pytest.approx(other["bytes_up"], rel=0.01)


def test_fedavg_learns_from_the_same_stream(tmp_path):
    done = result(
        tmp_path,
        "strategy=fedavg",
        "strategy.fraction_train=0.5",
        "stream.batches_per_round=5",
        "rounds=6",
    )
    assert done["details"]["batches"] == 6 * 2 * 5
    assert done["details"]["cumulative_loss"] > 0
    full = result(tmp_path, "strategy=fedavg", "stream.batches_per_round=5", "rounds=6")
    periodic = result(tmp_path, "strategy=periodic", "stream.batches_per_round=5", "rounds=6")
    assert full["details"]["cumulative_loss"] == pytest.approx(
        periodic["details"]["cumulative_loss"], rel=1e-4
    )


def test_a_serial_learner_sees_all_batches_and_learns_most(tmp_path):
    serial = result(tmp_path, "strategy=serial", "rounds=30")
    alone = result(tmp_path, "strategy=nosync", "rounds=30")
    assert serial["details"]["batches"] == alone["details"]["batches"] == 120
    assert serial["details"]["cumulative_loss"] < alone["details"]["cumulative_loss"]
    assert serial["bytes_up"] == serial["bytes_down"] == 0


@pytest.mark.parametrize(
    "options", [[], ["train.optimizer=adam", "train.lr=0.01"], ["stream.initial_noise=1.0"]]
)
def test_lockstep_is_the_same_run_as_with_messages(options, tmp_path):
    """Same losses up to rounding, same decisions, same bytes."""
    common = ["strategy=dynamic", "strategy.delta=0.05", "rounds=15", *options]
    slow = result(tmp_path, *common)
    quick = result(tmp_path, *common, "backend=lockstep")
    for key in ("cumulative_loss", "correct", "models_up", "models_down", "queries", "violations"):
        assert quick["details"][key] == pytest.approx(slow["details"][key], rel=1e-4), key
    assert quick["details"]["synchronisations"] == slow["details"]["synchronisations"]
    assert quick["bytes_up"] == slow["bytes_up"]
    assert quick["bytes_down"] == slow["bytes_down"]
    assert quick["accuracy"] == pytest.approx(slow["accuracy"], abs=0.01)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=fedavg", "stream.batches_per_round=1"], "dynamic, periodic, nosync"),
        (["strategy=dynamic", "stream.rate_spread=0.5"], "rate_spread=0"),
    ],
)
def test_lockstep_says_what_it_cannot_do(overrides, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        result(tmp_path, *overrides, "backend=lockstep")


def test_drifts_are_part_of_the_result_and_of_the_test_set(tmp_path):
    done = result(
        tmp_path,
        "strategy=dynamic",
        "dataset=graphical",
        "dataset.examples=500",
        "model=mlp",
        "rounds=12",
        "stream.drift.rounds=[7]",
        "evaluate_every=6",
    )
    assert done["details"]["drifts"] == [7]


class Breaks(Callback):
    def on_round_end(self, record):
        if record.round == 4:
            raise KeyboardInterrupt


def test_a_run_whose_nodes_lost_their_models_starts_again(tmp_path, monkeypatch):
    """The nodes of a simulation live and die with its process: going on would not be exact."""
    config = compose_config([*SMALL, "strategy=dynamic", "rounds=8"])
    whole = run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(
            "simulations.run.run_server",
            lambda experiment, grid, folder, _, **__: run_server(
                experiment, grid, folder, [Breaks()]
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "broken")
    again = run(config, tmp_path / "broken")
    for key in ("cumulative_loss", "models_up", "lost_states"):
        assert again["details"][key] == whole["details"][key]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stream.batches_per_round=0", "stream.batches_per_round must be at least 1"),
        ("stream.source=cloud", "share, pool"),
        ("stream.rate_spread=1.0", "stream.rate_spread"),
        ("stream.initial_noise=-1.0", "stream.initial_noise"),
        ("stream.drift.kind=weather", "labels, pixels"),
        ("stream.drift.rounds=[0]", "at least 1 each"),
        ("stream.drift.probability=2.0", "between 0 and 1"),
        ("evaluate_every=0", "evaluate_every must be at least 1"),
    ],
)
def test_a_stream_out_of_range_is_refused_with_what_is_allowed(override, words):
    with pytest.raises(ConfigError, match=words):
        compose_config([override])


@pytest.mark.deep
def test_ray_gives_the_same_digits_as_in_process(tmp_path):
    common = ["strategy=dynamic", "strategy.delta=0.05", "rounds=6", "train.optimizer=adam"]
    one = result(tmp_path, *common)
    other = result(tmp_path, *common, "backend=ray")
    for key in ("cumulative_loss", "synchronisations", "models_up", "models_down"):
        assert one["details"][key] == other["details"][key]
    assert one["accuracy"] == other["accuracy"]
