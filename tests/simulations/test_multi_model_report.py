"""What a report says of runs with several models, from files written by hand."""

import csv
import io
import json

import pytest
from rich.console import Console

from simulations.report.multi_model_table import models_of, models_rows, texts
from simulations.report.runs import read_runs
from simulations.report.summary import summarise
from simulations.report.write_report import build_report

MODELS = ("faces", "words")


def write_run(folder, label, seed, accuracies, step):
    """Write a run of two rounds with two nodes; node 1 lacks the second model."""
    folder.mkdir(parents=True)
    mean = sum(accuracies) / len(accuracies)
    details = {
        "label": label,
        "sampling": label,
        "models": list(MODELS),
        "accuracies": dict(zip(MODELS, accuracies, strict=True)),
        "sampled": {"0": {"faces": 2, "words": 1}, "1": {"faces": 1}},
        "examples": {"0": {"faces": 50, "words": 5}, "1": {"faces": 5}},
        "server_memory_bytes": 1200,
    }
    result = {
        "strategy": "multi_model",
        "dataset": "digits",
        "partition": "skew",
        "model": "mlp",
        "seed": seed,
        "nodes": 2,
        "rounds": 2,
        "accuracy": mean,
        "loss": 1.0,
        "bytes_up": 10,
        "bytes_down": 20,
        "messages": 8,
        "seconds": 1.0,
        "nodes_failed": 0,
        "details": details,
    }
    (folder / "result.json").write_text(json.dumps(result))
    rounds = [
        {
            "round": number,
            "bytes_up": 5,
            "bytes_down": 10,
            "train_metrics": {
                **{f"step_size/{m}": step for m in MODELS},
                **{f"variance/{m}": step * number for m in MODELS},
            },
            "server_metrics": {"accuracy": mean * number / 2},
        }
        for number in (1, 2)
    ]
    (folder / "rounds.jsonl").write_text("\n".join(map(json.dumps, rounds)))


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "full-0", "full", 0, (0.8, 0.8), 1.0)
    write_run(tmp_path / "full-1", "full", 1, (0.5, 0.5), 1.0)
    write_run(tmp_path / "lvr-0", "lvr", 0, (0.8, 0.4), 0.7)
    write_run(tmp_path / "lvr-1", "lvr", 1, (0.4, 0.4), 0.7)
    return tmp_path


def test_accuracy_is_relative_to_full_participation_with_the_same_seed(runs):
    """With lvr 0.6 / 0.8 = 0.75 and 0.4 / 0.5 = 0.8; mean 0.775, sd 0.05 / √2."""
    (summary,) = summarise(read_runs([runs]).runs)
    assert models_of(summary) == list(MODELS)
    full, lvr = models_rows(summary)
    assert full.relative.mean == 1
    assert full.relative.sd == 0
    assert lvr.relative.mean == pytest.approx(0.775)
    assert lvr.relative.sd == pytest.approx(0.05 / 2**0.5)
    assert texts(lvr, MODELS) == {
        "method": "lvr",
        "relative": "0.775 ± 0.035",
        "mean": "0.500 ± 0.141",
        "faces": "0.600 ± 0.283",
        "words": "0.400 ± 0.000",
        "server memory": "1.20 KB",
    }


def test_the_report_has_the_table_and_the_plots(runs, tmp_path):
    console = Console(record=True, width=80, file=io.StringIO())
    page = build_report([runs], tmp_path / "report", console).read_text()
    assert "Accuracy of every model" in page
    assert "0.775 ± 0.035" in page
    assert "0.775 ± 0.035" in console.export_text()
    plots = {path.stem.rsplit("-", 1)[1] for path in (tmp_path / "report/plots").glob("*.png")}
    assert {"models", "sampled", "steps"} <= plots
    with (tmp_path / "report/results.csv").open() as file:
        relative = {row["method"]: float(row["relative_mean"]) for row in csv.DictReader(file)}
    assert relative == pytest.approx({"full": 1, "lvr": 0.775})


def test_without_full_participation_there_is_no_relative_accuracy(runs):
    (summary,) = summarise([r for r in read_runs([runs]).runs if r.method == "lvr"])
    (row,) = models_rows(summary)
    assert row.relative is None
    assert texts(row, MODELS)["relative"] == "–"


def test_damaged_numbers_are_named_and_the_run_left_out(runs):
    path = runs / "lvr-0" / "result.json"
    result = json.loads(path.read_text())
    result["details"]["sampled"] = {"0": 3}
    path.write_text(json.dumps(result))
    collection = read_runs([runs])
    assert len(collection.runs) == 3
    assert "'0' should be an object" in collection.warnings[0]
