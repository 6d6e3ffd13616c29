"""The study of compression on streams: what it compares, and that it runs on the digits."""

import json

import pytest
from rich.console import Console

from simulations.config import ConfigError, compose_config
from simulations.reproduce.papers.equal_loss import AT_EQUAL_LOSS, BYTES, LOSS
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.run_measures import MEASURES, quiet_bytes
from simulations.reproduce.studies import compressed_grid, compressed_streams
from simulations.reproduce.studies.compressed_comparison import (
    BYTES_BESIDE_PLAIN,
    LOSS_BESIDE_PLAIN,
    SAME_FORM,
    compare_forms,
    families,
    stream_table,
)
from simulations.reproduce.studies.compressed_grid import (
    FINAL_LOSS,
    FORMS,
    LABELS,
    Stream,
    chosen_cells,
    named,
    split_name,
)


def findings(runs, seeds=1):
    """Return findings of one stream, from loss and MB by method."""
    found = [
        Finding("stream", method, quantity, [value] * seeds)
        for method, pair in runs.items()
        for quantity, value in zip((LOSS, BYTES), pair, strict=True)
    ]
    return Findings("compressed_streams", False, False, list(range(seeds)), found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("protocol", ["b = 8", "total, Δ = 0.3", "FedAvg, C = 0.3", "mlp"])
def test_a_name_tells_protocol_and_compression(protocol, form):
    assert split_name(named(protocol, form)) == (protocol, form)


def test_compressed_runs_are_compared_with_plain_ones_and_with_equally_compressed_ones():
    """Halfway between two losses lie geometric means of the bytes.

    Plain periodic averaging: √(100 · 25) = 50 MB at a loss of 1.5, compressed √(16 · 4) = 8 MB. The
    compressed run has 4 MB: 0.08 and 0.5 of these. Beside its plain self it has 4 of 20 MB.
    """
    found = findings(
        {
            "b = 2": (1.0, 100.0),
            "b = 8": (2.0, 25.0),
            "b = 2, int8": (1.0, 16.0),
            "b = 8, int8": (2.0, 4.0),
            "Δ = 0.3": (1.2, 20.0),
            "Δ = 0.3, int8": (1.5, 4.0),
        }
    )
    compare_forms(found)

    def value(quantity):
        return found.get("stream", "Δ = 0.3, int8", quantity).mean

    assert value(AT_EQUAL_LOSS) == pytest.approx(4 / 50)
    assert value(SAME_FORM) == pytest.approx(4 / 8)
    assert value(BYTES_BESIDE_PLAIN) == pytest.approx(4 / 20)
    assert value(LOSS_BESIDE_PLAIN) == pytest.approx(1.5 / 1.2)
    assert found.get("stream", "b = 8, int8", BYTES_BESIDE_PLAIN).mean == pytest.approx(4 / 25)
    assert found.get("stream", "b = 8", BYTES_BESIDE_PLAIN) is None


def test_a_loss_beyond_those_of_periodic_averaging_is_compared_with_nothing():
    found = findings({"b = 2": (1.0, 9.0), "b = 8": (2.0, 4.0), "Δ = 9, int4": (2.5, 1.0)})
    compare_forms(found)
    assert found.get("stream", "Δ = 9, int4", AT_EQUAL_LOSS) is None
    (row,) = [row for row in stream_table(found).rows if row.cells[2] == "int4"]
    assert row.cells[8] == row.cells[9] == "–"


def test_skewed_streams_are_compared_by_the_loss_on_test_data():
    """On their own labels learners lose less the less they hear; half of the bytes is read off."""
    runs = {"b = 2": (0.2, 16.0), "b = 8": (0.4, 4.0), "Δ = 1": (0.3, 4.0)}
    found = findings(runs)
    for each in found.findings:
        each.setting = "label-skewed"
        each.quantity = {LOSS: FINAL_LOSS}.get(each.quantity, each.quantity)
    own = {"b = 2": 300.0, "b = 8": 200.0, "Δ = 1": 100.0}
    found.findings += [Finding("label-skewed", name, LOSS, [value]) for name, value in own.items()]
    compare_forms(found)
    assert found.get("label-skewed", "Δ = 1", AT_EQUAL_LOSS).mean == pytest.approx(4 / 8)


def test_points_of_a_picture_are_kept_apart_by_protocol_and_compression():
    found = findings(
        {
            "b = 2": (1.0, 9.0),
            "Δ = 1, int8": (2.0, 4.0),
            "total, Δ = 1": (2.0, 3.0),
            "FedAvg, C = 0.3, int4": (2.5, 1.0),
            "nosync": (9.0, 0.1),
        }
    )
    assert families(found, "stream") == {
        ("periodic", "float32"): [(9.0, 1.0, "b = 2")],
        ("dynamic, local", "int8"): [(4.0, 2.0, "Δ = 1")],
        ("dynamic, total", "float32"): [(3.0, 2.0, "Δ = 1")],
        ("FedAvg", "int4"): [(1.0, 2.5, "C = 0.3")],
    }


def test_quiet_messages_are_counted_at_what_they_take_in_rounds_without_a_model(tmp_path):
    """Ten bytes up and twenty down in the quiet round, per message.

    The other round has 8 messages without a model up and none down, so 40 and 80 of the quiet
    round and 80 of the other are quiet.
    """
    rounds = [
        {"models": (0, 0), "messages": (4, 4), "bytes": (40, 80)},
        {"models": (2, 10), "messages": (10, 10), "bytes": (5000, 9000)},
    ]
    lines = [
        {
            "round": number,
            "train_metrics": dict(zip(("models_up", "models_down"), r["models"], strict=True)),
            **dict(zip(("messages_up", "messages_down"), r["messages"], strict=True)),
            **dict(zip(("bytes_up", "bytes_down"), r["bytes"], strict=True)),
        }
        for number, r in enumerate(rounds, 1)
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert quiet_bytes(tmp_path) == pytest.approx(40 + 80 + 80)


def test_another_stream_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no 'mnist_cnn'.*mnist_100.*mnist_drift"):
        chosen_cells(["experiment=mnist_100,mnist_cnn"])


def test_a_shortened_stream_with_drifts_still_has_one():
    cells = chosen_cells(["experiment=graphical_drift", "rounds=40", "dataset=digits"])
    config = compose_config([*cells[0].overrides])
    assert config.rounds == 40
    assert list(config.stream.drift.rounds) == [21]
    assert config.names["dataset"] == "graphical"


def test_epochs_are_shortened_more_than_single_batches_are():
    (first, *_) = chosen_cells([f"experiment={LABELS}", "rounds=80", "evaluate_every=80"])
    config = compose_config([*first.overrides])
    assert (config.rounds, config.evaluate_every) == (4, 1)


@pytest.mark.slow
def test_all_runs_compose_and_differ():
    cells = chosen_cells([])
    assert {quantity for cell in cells for quantity in cell.reads} <= set(MEASURES)
    names = [compose_config([*cell.overrides]).run_name() for cell in cells]
    assert len(set(names)) == len(names)


def test_learners_of_the_skewed_stream_have_their_own_labels():
    config = compose_config(["experiment=mnist_skewed", "strategy=periodic"])
    assert config.names["partition"] == "dirichlet"
    assert config.stream.source == "share"
    assert config.nodes == 100


def test_the_study_runs_once_saves_bytes_and_draws(tmp_path, monkeypatch):
    """A model of 8 bits is a quarter of one of 32; that is so here, but for what goes beside it."""
    streams = (Stream("digits", "mnist_100", (2, 4), (0.01,), ()),)
    monkeypatch.setattr(compressed_grid, "STREAMS", streams)
    words = ["dataset=digits", "nodes=4", "rounds=8", "evaluate_every=8"]
    output = tmp_path / "compressed_streams"
    output.mkdir()
    console = Console(record=True, width=160)
    picture = compressed_streams.run([*words, "experiment=mnist_100"], output, console)
    assert picture.stat().st_size > 10_000
    assert "b = 4" in console.export_text()
    found = Findings.from_json(picture.with_suffix(".json").read_text())
    assert not found.failures
    assert found.get("digits", "b = 2, int8", BYTES_BESIDE_PLAIN).mean < 0.45
    assert found.get("digits", "b = 2, int8", LOSS_BESIDE_PLAIN).mean == pytest.approx(1, abs=0.01)
    assert "b = 2, int8,bytes beside float32" in picture.with_suffix(".csv").read_text().replace(
        '"', ""
    )
    results = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(results) == 13
    compressed_streams.run([*words, "experiment=mnist_100"], output, Console(quiet=True))
    assert results == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}


def test_fedavg_by_label_is_judged_by_its_test_loss(tmp_path):
    output = tmp_path / "compressed_streams"
    output.mkdir()
    words = [f"experiment={LABELS}", "dataset=digits", "rounds=2"]
    numbers = compressed_streams.run(words, output, Console(quiet=True))
    found = Findings.from_json(numbers.read_text())
    assert not found.failures
    assert found.get("FedAvg by label", "mlp, int4", BYTES_BESIDE_PLAIN).mean < 0.35
