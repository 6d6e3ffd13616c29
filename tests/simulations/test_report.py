"""The report: right numbers from known files, nothing lost silently, one file that stands alone."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from simulations.report import NoRunsError, build_report, read_runs
from simulations.report.__main__ import main
from simulations.report.summary import comparability_warnings, format_bytes, run_curve, summarise
from simulations.report.tables import TextTable, html_table, markdown_table, print_table

RESULT = {
    **{"strategy": "fedavg", "dataset": "digits", "partition": "labels", "model": "logistic"},
    **{"seed": 0, "nodes": 2, "rounds": 3, "accuracy": 0.9, "loss": 0.3, "details": {}},
    **{"bytes_up": 600, "bytes_down": 300, "messages": 12, "seconds": 1.5, "nodes_failed": 0},
}


def write_run(folder: Path, history: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """Write a run directory; keyword arguments change `result.json`."""
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(RESULT | changes))
    if history is None:
        history = [round_line(0, None, 0.1)] + [round_line(n, 200, 0.2 * n) for n in (1, 2, 3)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    nodes = [{"name": "0", "train": [30, 0]}, {"name": "1", "train": [0, 40]}]
    (folder / "partition.json").write_text(json.dumps({"nodes": nodes, "classes": 2}))
    return folder


def round_line(
    number: int, bytes_up: int | None, accuracy: float | None, failures: Any = ()
) -> dict[str, Any]:
    """Make a line of `rounds.jsonl`; half as many bytes go down as up."""
    return {
        "round": number,
        "bytes_up": bytes_up or 0,
        "bytes_down": (bytes_up or 0) // 2,
        "failures": list(failures),
        "server_metrics": {} if accuracy is None else {"accuracy": accuracy, "loss": 1.0},
    }


def report(paths: list[Path], output: Path, width: int = 200) -> tuple[str, str]:
    """Build a report; return what was printed and the page."""
    printed = io.StringIO()
    page = build_report(paths, output, Console(file=printed, width=width))
    return printed.getvalue(), page.read_text(encoding="utf-8")


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- numbers ----


def test_accuracy_is_the_mean_and_sample_deviation_over_the_seeds_that_have_one(tmp_path):
    """0.8, 0.9, 1.0: mean 0.9; deviations −0.1, 0, 0.1; sd = sqrt(0.02 / (3 − 1)) = 0.1."""
    for seed, accuracy in enumerate((0.8, 0.9, None, 1.0, math.nan)):
        write_run(tmp_path / "runs" / str(seed), seed=seed, accuracy=accuracy)
    printed, page = report([tmp_path / "runs"], tmp_path / "out")
    assert "0.900 ± 0.100 (3 of 5)" in printed
    assert "0.900 ± 0.100" in page
    (row,) = read_csv(tmp_path / "out" / "results.csv")
    assert float(row["accuracy_mean"]) == pytest.approx(0.9)
    assert float(row["accuracy_sd"]) == pytest.approx(0.1)
    assert row["seeds"] == "5"


def test_bytes_of_a_curve_add_up_with_those_of_rounds_without_evaluation(tmp_path):
    """Rounds cost 0, 100 + 50, 200 + 100, 300 + 150; so far: 0, 150, 450, 900."""
    sizes, scores = (None, 100, 200, 300), (0.1, 0.4, None, 0.7)
    rounds = [round_line(*line) for line in zip(range(4), sizes, scores, strict=True)]
    write_run(tmp_path / "run", rounds)
    (run,) = read_runs([tmp_path]).runs
    points = [(p.round, p.total_bytes, p.score) for p in run_curve(run)]
    assert points == [(0, 0, 0.1), (1, 150, 0.4), (3, 900, 0.7)]


def test_a_round_repeated_after_a_resume_counts_once_with_its_later_line(tmp_path):
    """Round 1 twice: only the second line's 200 + 100 bytes stand, then 100 + 50 more."""
    rounds = [round_line(1, 100, 0.3), round_line(1, 200, 0.4), round_line(2, 100, 0.5)]
    write_run(tmp_path / "run", rounds)
    (run,) = read_runs([tmp_path]).runs
    assert [(p.total_bytes, p.score) for p in run_curve(run)] == [(300, 0.4), (450, 0.5)]


def test_seeds_are_averaged_up_to_the_last_round_that_all_have(tmp_path):
    """Seed 0: 0.2, 0.4 with 150 bytes a round; seed 1: 0.4, 0.6, 0.8 with 300 bytes a round.

    Common rounds 1 and 2: accuracies 0.3 and 0.5; bytes (150 + 300) / 2 and (300 + 600) / 2;
    sd of two values 0.2 apart is 0.2 / sqrt(2).
    """
    write_run(tmp_path / "0", [round_line(n, 100, 0.2 * n) for n in (1, 2)])
    write_run(tmp_path / "1", [round_line(n, 200, 0.2 + 0.2 * n) for n in (1, 2, 3)], seed=1)
    ((method,),) = (summary.methods for summary in summarise(read_runs([tmp_path]).runs))
    curve = method.mean_curve
    assert [point.round for point in curve] == [1, 2]
    assert [point.score for point in curve] == pytest.approx([0.3, 0.5])
    assert [point.total_bytes for point in curve] == pytest.approx([225, 450])
    assert [point.sd for point in curve] == pytest.approx([0.2 / math.sqrt(2)] * 2)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (512, "512 B"), (26_400, "26.4 KB"), (999_999, "1.00 MB"), (4.2e12, "4,200 GB")],
)
def test_bytes_are_written_in_decimal_units(count: float, text: str):
    assert format_bytes(count) == text


# ---- grouping ----


def test_rows_run_from_the_ceiling_over_best_to_worst_to_the_floor(tmp_path):
    finals = {"local": 0.95, "fedavg": 0.8, "gems": 0.9, "global": 0.1, "ensemble": None}
    for strategy, accuracy in finals.items():
        write_run(tmp_path / strategy, strategy=strategy, accuracy=accuracy)
    (summary,) = summarise(read_runs([tmp_path]).runs)
    order = [method.name for method in summary.methods]
    assert order == ["global", "gems", "fedavg", "ensemble", "local"]


def test_a_seed_that_occurs_twice_and_differently_divided_data_are_pointed_out(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, seed=4)
    other = write_run(tmp_path / "c", strategy="ensemble", seed=4)
    division = {"nodes": [{"name": "0", "train": [1, 2], "validation": [0, 0]}], "classes": 2}
    (other / "partition.json").write_text(json.dumps(division))
    warnings = "\n".join(comparability_warnings(summarise(read_runs([tmp_path]).runs)))
    assert "fedavg has more than one run for seed 4" in warnings
    assert "do not share one division of the data" in warnings


# ---- what is missing or damaged ----


def test_an_unfinished_run_is_named_with_its_rounds_and_left_out(tmp_path):
    write_run(tmp_path / "runs" / "done")
    unfinished = write_run(tmp_path / "runs" / "cut")
    (unfinished / "result.json").unlink()
    printed, page = report([tmp_path / "runs"], tmp_path / "out")
    for text in (printed, page):
        assert "runs/cut (3 rounds done)" in text
    assert len(read_csv(tmp_path / "out" / "runs.csv")) == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{nope", "not valid JSON"),
        ("[1, 2]", "should be a JSON object"),
        ('{"strategy": "fedavg"}', "'dataset' should be str, is missing"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (json.dumps(RESULT | {"bytes_up": -1}), "'bytes_up' should be int, is -1"),
        (json.dumps(RESULT | {"bytes_up": True}), "'bytes_up' should be int, is true"),
    ],
)
def test_a_damaged_result_is_named_and_skipped(tmp_path, content: str | bytes, complaint: str):
    write_run(tmp_path / "runs" / "good")
    bad = write_run(tmp_path / "runs" / "bad") / "result.json"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    printed, page = report([tmp_path / "runs"], tmp_path / "out")
    assert "runs/bad/result.json" in printed
    assert complaint in printed
    assert "runs/bad/result.json" in page
    assert len(read_csv(tmp_path / "out" / "runs.csv")) == 1


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "bytes_up": 10')
    collection = read_runs([tmp_path])
    assert [entry.number for entry in collection.runs[0].history] == [0, 1, 2, 3]
    assert "rounds.jsonl: line 5" in collection.warnings[0]


def test_a_run_with_nothing_but_a_result_is_reported(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "rounds.jsonl").unlink()
    (run / "partition.json").write_text('{"nodes": [], "classes": 2}')
    printed, _ = report([run], tmp_path / "out")
    assert "0.900" in printed
    assert "run/partition.json: 'nodes' should be a list" in printed
    names = sorted(path.name for path in (tmp_path / "out" / "plots").iterdir())
    stem = "digits-labels-2-nodes-logistic-accuracy"
    assert names == [f"{stem}-bytes.png", f"{stem}-rounds.png"]


def test_no_run_is_one_sentence_and_exit_status_2(tmp_path, capsys):
    with pytest.raises(NoRunsError, match="No finished run"):
        build_report([tmp_path], tmp_path / "out")
    assert main([str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(tmp_path) in message
    assert not (tmp_path / "out").exists()


# ---- what is written ----


def test_failures_are_listed_by_node_and_reason_and_counted_in_the_table(tmp_path):
    failure = {"node": "3", "reason": "TimeoutError: <no reply>"}
    rounds = [round_line(n, 100, 0.5, [failure] if n in (1, 2, 4) else []) for n in range(1, 6)]
    write_run(tmp_path / "run", rounds, nodes_failed=1, seed=7)
    printed, page = report([tmp_path / "run"], tmp_path / "out")
    assert "failed" in printed.splitlines()[1]
    assert "TimeoutError: &lt;no reply&gt;" in page
    assert '<td>7</td><td class="text reason">1, 2, 4</td>' in page


def test_the_page_loads_nothing_from_anywhere(tmp_path):
    write_run(tmp_path / "run")
    _, page = report([tmp_path / "run"], tmp_path / "out")
    sources = re.findall(r"""(?:src|href|srcset|data|action)\s*=\s*["']([^"']*)""", page)
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    assert str(tmp_path) not in page  # nor does it tell where it was made


def test_names_from_files_cannot_break_the_page_or_the_terminal(tmp_path):
    evil = "<script>alert(1)</script>[/red]"
    write_run(tmp_path / "run", dataset=evil, details={"label": evil})
    printed, page = report([tmp_path / "run"], tmp_path / "out")
    assert "<script>" not in page
    assert evil in printed


def test_csv_files_give_back_what_the_runs_said(tmp_path):
    write_run(
        tmp_path / "runs" / "a",
        seed=3,
        accuracy=0.123456789,
        loss=None,
        bytes_up=1_234_567,
        details={"stopped_because": 'target "0.9", reached', "label": "fedavg, C=0.3"},
    )
    report([tmp_path / "runs"], tmp_path / "out")
    (row,) = read_csv(tmp_path / "out" / "runs.csv")
    assert row["run"] == "runs/a"
    assert row["method"] == "fedavg, C=0.3"
    assert row["stopped_because"] == 'target "0.9", reached'
    assert (int(row["seed"]), int(row["bytes_up"])) == (3, 1_234_567)
    assert float(row["accuracy"]) == 0.123456789
    assert row["loss"] == ""
    (summary,) = read_csv(tmp_path / "out" / "results.csv")
    assert float(summary["bytes_up_mean"]) == 1_234_567


def test_the_command_writes_next_to_the_runs_or_below_runs_if_several_folders_are_given(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    assert main([str(first)]) == 0
    assert (first / "report.html").is_file()
    assert main([str(first), str(second)]) == 0
    assert (tmp_path / "runs" / "report" / "report.html").is_file()
    # A second report over a folder that already holds one finds the same runs.
    assert len(read_runs([tmp_path]).runs) == 2


def test_runs_on_streams_are_drawn_as_a_frontier(tmp_path):
    """Two protocols with a cumulative loss; what sends nothing has no place on the axis."""
    runs = {"dynamic Δ=0.7": "dynamic", "periodic b=4": "periodic", "serial": "serial"}
    for index, (label, strategy) in enumerate(runs.items()):
        details = {"label": label, "cumulative_loss": 30.0 + index}
        sent = 0 if strategy == "serial" else 500
        history = [round_line(n, sent, 0.1 * n) for n in (1, 2, 3)]
        changes = {"strategy": strategy, "details": details, "bytes_up": sent, "bytes_down": sent}
        write_run(tmp_path / label, history, **changes)
    page = build_report([tmp_path], tmp_path / "report", Console(quiet=True))
    drawn = {path.name for path in (tmp_path / "report" / "plots").glob("*.png")}
    assert {"digits-labels-2-nodes-logistic-frontier.png"} <= drawn
    assert "Cumulative loss against bytes" in page.read_text()


@pytest.mark.parametrize("width", [20, 60])
def test_tables_fold_names_and_never_cut_numbers(width: int):
    table = TextTable.of(
        ("setting", "method", "ours"),
        [("MNIST, two nodes", "a method with words", "0.123 ± 0.456")] * 2,
        names=(0, 1),
        group_by=0,
    )
    console = Console(file=io.StringIO(), width=width)
    print_table(table, console, title="T", caption="c")
    printed = console.file.getvalue()
    assert printed.count("0.123 ± 0.456") == 2
    assert "…" not in printed
    assert printed.count("MNIST,") == 1


def test_markdown_is_compact_and_html_is_escaped():
    table = TextTable.of(("name", "n"), [("<b>", "+0.1")])
    assert markdown_table(table) == ["|name|n|", "|---|--:|", "|<b>|+0.1|"]
    assert '<td class="text">&lt;b&gt;</td><td>+0.1</td>' in html_table(table)


# ---- several models ----


def test_accuracy_of_models_is_relative_to_full_participation_by_seed(tmp_path):
    """With lvr 0.6 / 0.8 = 0.75 and 0.4 / 0.5 = 0.8: mean 0.775, sd 0.05 / √2."""
    accuracies = {"full": [(0.8, 0.8), (0.5, 0.5)], "lvr": [(0.8, 0.4), (0.4, 0.4)]}
    for label, seeds in accuracies.items():
        for seed, pair in enumerate(seeds):
            details = {"label": label, "sampling": label, "server_memory_bytes": 1200}
            details["accuracies"] = dict(zip(("faces", "words"), pair, strict=True))
            folder = tmp_path / f"{label}-{seed}"
            write_run(folder, seed=seed, accuracy=sum(pair) / 2, details=details)
    printed, page = report([tmp_path], tmp_path / "out")
    (summary,) = summarise(read_runs([tmp_path]).runs)
    relative = summary.relative(next(m for m in summary.methods if m.name == "lvr"))
    assert (relative.mean, relative.sd) == pytest.approx((0.775, 0.05 / math.sqrt(2)))
    # relative, mean over the models, each model
    numbers = re.findall(r"\d\.\d{3} ± 0\.\d{3}", printed.split("server memory")[1])
    assert numbers[4:8] == ["0.775 ± 0.035", "0.500 ± 0.141", "0.600 ± 0.283", "0.400 ± 0.000"]
    assert "Accuracy of every model" in page
