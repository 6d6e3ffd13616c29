"""Streams: which batch comes when, drifts, and runs of nodes that learn from them."""

import numpy as np
import pytest
from helpers_learners import StopAfter

from simulations.config import DriftConfig, StreamConfig, compose_config
from simulations.data import Dataset, Examples, graphical
from simulations.experiment.execution import run_server
from simulations.run import run
from simulations.streams import BatchSource, Drift

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
    return sorted(int(row[0]) // 2 for batch in batches for row in batch.features)


def test_a_node_passes_over_its_own_share_again_and_again_in_another_order():
    stream = source(batch_size=5)
    passes = [[stream.batch(1, t) for t in range(k * 5 + 1, k * 5 + 6)] for k in range(3)]
    for each in passes:
        assert ids(each) == list(range(25, 50))
    assert not np.array_equal(passes[0][0].features, passes[1][0].features)


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
    batches = [each.batch(1, 4).features for each in (one, other, source(seed=1))]
    assert np.array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], batches[2])


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
    before, after = (drift.apply(concept, features, labels, 10) for concept in (0, 1))
    assert (before[0] is features, before[1] is labels) == (True, True)
    if kind == "labels":
        assert after[0] is features
        assert len(set(after[1])) == 3
        assert not np.array_equal(after[1], labels)
    else:
        assert after[1] is labels
        order = after[0][0].ravel()
        assert sorted(order) == list(range(8))
        assert np.array_equal(features[1].ravel()[order], after[0][1].ravel())


def test_a_stream_of_a_graphical_model_never_repeats_and_drifts_with_its_test_set():
    config = StreamConfig(drift=DriftConfig(rounds=[3]))
    stream = BatchSource(DATASET, SHARES, config, batch_size=4, seed=0)
    batches = [stream.batch(n, t).features.tobytes() for n in range(2) for t in range(1, 5)]
    assert len(set(batches)) == 8
    assert stream.test(2) is DATASET.test
    assert not np.array_equal(stream.test(3).features, DATASET.test.features)


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


def test_fedavg_learns_from_the_same_stream(tmp_path):
    words = ("stream.batches_per_round=5", "rounds=6")
    half = result(tmp_path, "strategy=fedavg", "strategy.fraction_train=0.5", *words)["details"]
    assert half["batches"] == 6 * 2 * 5
    losses = [
        result(tmp_path, f"strategy={name}", *words)["details"]["cumulative_loss"]
        for name in ("fedavg", "periodic")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_run_whose_nodes_lost_their_models_starts_again(tmp_path, monkeypatch):
    """The nodes of a simulation live and die with its process: going on would not be exact."""
    config = compose_config([*SMALL, "strategy=dynamic", "rounds=8"])
    whole = run(config, tmp_path / "whole")

    def breaks(experiment, grid, folder, callbacks, **options):
        return run_server(experiment, grid, folder, [StopAfter(4)])

    with monkeypatch.context() as patch:
        patch.setattr("simulations.run.run_server", breaks)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "broken")
    again = run(config, tmp_path / "broken")
    for key in ("cumulative_loss", "models_up", "lost_states"):
        assert again["details"][key] == whole["details"][key]
