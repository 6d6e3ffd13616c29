"""The report: right numbers from known files, nothing lost silently, one file that stands alone."""

import csv
import io
import json
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from simulations.report import columns, run_tables
from simulations.report.__main__ import main
from simulations.report.curves import method_curve, run_curve
from simulations.report.runs import NoRunsError, read_runs
from simulations.report.stream_plots import family_of
from simulations.report.summary import comparability_warnings, format_bytes, spread, summarise
from simulations.report.tables import TextTable, html_table, markdown_table, print_table
from simulations.report.write_report import build_report

PNG_START = b"\x89PNG\r\n\x1a\n"


def write_run(folder: Path, history: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """Write a run directory; keyword arguments change `result.json`."""
    result = {
        "strategy": "fedavg",
        "dataset": "digits",
        "partition": "labels",
        "model": "logistic",
        "seed": 0,
        "nodes": 2,
        "rounds": 3,
        "accuracy": 0.9,
        "loss": 0.3,
        "bytes_up": 600,
        "bytes_down": 300,
        "messages": 12,
        "seconds": 1.5,
        "nodes_failed": 0,
        "details": {},
    }
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result | changes))
    if history is None:
        history = [round_line(0, None, 0.1)] + [round_line(n, 200, 0.2 * n) for n in (1, 2, 3)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    division = {
        "nodes": [
            {"name": "0", "train": [30, 0], "validation": [5, 0]},
            {"name": "1", "train": [0, 40], "validation": [0, 5]},
        ],
        "classes": 2,
    }
    (folder / "partition.json").write_text(json.dumps(division))
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


def test_accuracy_is_the_mean_and_sample_standard_deviation_over_seeds(tmp_path: Path) -> None:
    """0.8, 0.9, 1.0: mean 0.9; deviations −0.1, 0, 0.1; sd = sqrt(0.02 / (3 − 1)) = 0.1."""
    for seed, accuracy in enumerate((0.8, 0.9, 1.0)):
        write_run(tmp_path / "runs" / str(seed), seed=seed, accuracy=accuracy)
    printed, page = report([tmp_path / "runs"], tmp_path / "out")
    assert "0.900 ± 0.100" in printed
    assert "0.900 ± 0.100" in page
    (row,) = read_csv(tmp_path / "out" / "results.csv")
    assert float(row["accuracy_mean"]) == pytest.approx(0.9)
    assert float(row["accuracy_sd"]) == pytest.approx(0.1)
    assert row["seeds"] == "3"


def test_a_single_run_has_no_standard_deviation(tmp_path: Path) -> None:
    write_run(tmp_path / "run", accuracy=0.9)
    printed, _ = report([tmp_path / "run"], tmp_path / "out")
    assert "±" not in printed.split("up, down:")[0]
    (row,) = read_csv(tmp_path / "out" / "results.csv")
    assert row["accuracy_sd"] == ""


def test_an_unknown_accuracy_is_left_out_of_the_mean_and_said_so(tmp_path: Path) -> None:
    """0.8 and 1.0 are known, null and NaN are not: mean 0.9 of 2 of 4 runs."""
    for seed, accuracy in enumerate((0.8, None, 1.0, math.nan)):
        write_run(tmp_path / "runs" / str(seed), seed=seed, accuracy=accuracy)
    printed, _ = report([tmp_path / "runs"], tmp_path / "out")
    assert "0.900 ± 0.141 (2 of 4)" in printed


def test_the_mean_of_no_value_is_unknown_not_zero() -> None:
    assert spread([None, None]) is None


def test_bytes_of_a_curve_add_up_over_rounds_including_rounds_without_evaluation(
    tmp_path: Path,
) -> None:
    """Rounds cost 0, 100 + 50, 200 + 100, 300 + 150; so far: 0, 150, 450, 900."""
    rounds = [
        round_line(0, None, 0.1),
        round_line(1, 100, 0.4),
        round_line(2, 200, None),
        round_line(3, 300, 0.7),
    ]
    write_run(tmp_path / "run", rounds)
    (run,) = read_runs([tmp_path]).runs
    assert [(p.round, p.total_bytes, p.score) for p in run_curve(run)] == [
        (0, 0, 0.1),
        (1, 150, 0.4),
        (3, 900, 0.7),
    ]


def test_a_round_repeated_after_a_resume_counts_once_with_its_later_line(tmp_path: Path) -> None:
    """Round 1 twice: only the second line's 200 + 100 bytes stand, then 100 + 50 more."""
    rounds = [round_line(1, 100, 0.3), round_line(1, 200, 0.4), round_line(2, 100, 0.5)]
    write_run(tmp_path / "run", rounds)
    (run,) = read_runs([tmp_path]).runs
    assert [(p.total_bytes, p.score) for p in run_curve(run)] == [(300, 0.4), (450, 0.5)]


def test_seeds_are_averaged_round_by_round_up_to_the_last_round_that_all_have(
    tmp_path: Path,
) -> None:
    """Seed 0: 0.2, 0.4 with 150 bytes a round; seed 1: 0.4, 0.6, 0.8 with 300 bytes a round.

    Common rounds 1 and 2: accuracies 0.3 and 0.5; bytes (150 + 300) / 2 and (300 + 600) / 2;
    sd of two values 0.2 apart is 0.2 / sqrt(2).
    """
    write_run(tmp_path / "0", [round_line(n, 100, 0.2 * n) for n in (1, 2)])
    write_run(tmp_path / "1", [round_line(n, 200, 0.2 + 0.2 * n) for n in (1, 2, 3)], seed=1)
    ((method,),) = (summary.methods for summary in summarise(read_runs([tmp_path]).runs))
    curve = method_curve(method)
    assert curve is not None
    assert [point.round for point in curve.mean] == [1, 2]
    assert [point.score for point in curve.mean] == pytest.approx([0.3, 0.5])
    assert [point.total_bytes for point in curve.mean] == pytest.approx([225, 450])
    assert [point.sd for point in curve.mean] == pytest.approx([0.2 / math.sqrt(2)] * 2)
    assert len(curve.singles) == 2  # the longer seed's third round is still shown


def test_one_round_is_a_point_and_not_a_curve_even_with_an_initial_evaluation(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "0", [round_line(0, None, 0.1), round_line(1, 100, 0.4)], rounds=1)
    ((method,),) = (summary.methods for summary in summarise(read_runs([tmp_path]).runs))
    assert method_curve(method) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (512, "512 B"),
        (999, "999 B"),
        (26_400, "26.4 KB"),
        (999_999, "1.00 MB"),
        (1_048_576, "1.05 MB"),
        (320e6, "320 MB"),
        (2.5e9, "2.50 GB"),
        (4.2e12, "4,200 GB"),
    ],
)
def test_bytes_are_written_in_decimal_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


# ---- grouping ----


def test_rows_run_from_the_ceiling_over_best_to_worst_to_the_floor(tmp_path: Path) -> None:
    finals = {"local": 0.95, "fedavg": 0.8, "gems": 0.9, "global": 0.1, "ensemble": None}
    for strategy, accuracy in finals.items():
        write_run(tmp_path / strategy, strategy=strategy, accuracy=accuracy)
    (summary,) = summarise(read_runs([tmp_path]).runs)
    order = [method.name for method in summary.methods]
    assert order == ["global", "gems", "fedavg", "ensemble", "local"]


def test_a_label_tells_variants_of_a_strategy_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", details={"label": "fedavg C=0.3"})
    write_run(tmp_path / "b", details={"label": "fedavg C=1.0"})
    report([tmp_path], tmp_path / "out")
    rows = read_csv(tmp_path / "out" / "results.csv")
    assert [row["method"] for row in rows] == ["fedavg C=0.3", "fedavg C=1.0"]
    assert {row["strategy"] for row in rows} == {"fedavg"}


def test_each_setting_has_its_own_heading_and_its_own_plots(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", partition="labels")
    write_run(tmp_path / "runs" / "deep" / "er" / "b", partition="dirichlet")
    printed, page = report([tmp_path / "runs"], tmp_path / "out")
    for title in (
        "digits · labels · 2 nodes · logistic",
        "digits · dirichlet · 2 nodes · logistic",
    ):
        assert title in printed
        assert f"<h2>{title}</h2>" in page
    assert len(list((tmp_path / "out" / "plots").glob("*.png"))) == 6


def test_a_run_that_is_reachable_twice_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    assert len(read_runs([tmp_path, run, tmp_path / "runs"]).runs) == 1


def test_a_seed_that_occurs_twice_in_a_row_of_the_table_is_pointed_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=4)
    write_run(tmp_path / "b", seed=4)
    (warning,) = comparability_warnings(summarise(read_runs([tmp_path]).runs))
    assert "fedavg has more than one run for seed 4" in warning


def test_runs_on_differently_divided_data_are_pointed_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", strategy="ensemble")
    division = {"nodes": [{"name": "0", "train": [1, 2], "validation": [0, 0]}], "classes": 2}
    (other / "partition.json").write_text(json.dumps(division))
    (warning,) = comparability_warnings(summarise(read_runs([tmp_path]).runs))
    assert "do not share one division of the data" in warning


# ---- what is missing or damaged ----


def test_an_unfinished_run_is_named_with_its_rounds_and_left_out(tmp_path: Path) -> None:
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
        ('{"strategy": "fedavg"}', "'dataset' should be a text, is missing"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_a_damaged_result_is_named_and_skipped(
    tmp_path: Path, content: str | bytes, complaint: str
) -> None:
    write_run(tmp_path / "runs" / "good")
    bad = write_run(tmp_path / "runs" / "bad") / "result.json"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    printed, page = report([tmp_path / "runs"], tmp_path / "out")
    assert "runs/bad/result.json" in printed
    assert complaint in printed
    assert "runs/bad/result.json" in page
    assert len(read_csv(tmp_path / "out" / "runs.csv")) == 1


@pytest.mark.parametrize("value", [-1, 1.5, "12", True, None])
def test_a_byte_count_that_is_no_count_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    write_run(tmp_path / "bad", bytes_up=value)
    collection = read_runs([tmp_path])
    assert not collection.runs
    assert "'bytes_up' should be a whole number ≥ 0" in collection.warnings[0]


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "bytes_up": 10')
    collection = read_runs([tmp_path])
    assert [entry.number for entry in collection.runs[0].history] == [0, 1, 2, 3]
    assert "rounds.jsonl: line 5" in collection.warnings[0]


def test_a_run_with_nothing_but_a_result_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "rounds.jsonl").unlink()
    (run / "partition.json").write_text('{"nodes": [], "classes": 2}')
    printed, _ = report([run], tmp_path / "out")
    assert "0.900" in printed
    assert "run/partition.json: 'nodes' should be a list" in printed
    names = sorted(path.name for path in (tmp_path / "out" / "plots").iterdir())
    stem = "digits-labels-2-nodes-logistic-accuracy"
    assert names == [f"{stem}-bytes.png", f"{stem}-rounds.png"]


def test_a_report_on_reference_runs_alone_has_no_empty_plots(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [], strategy="local", bytes_up=0, bytes_down=0, rounds=0)
    report([tmp_path / "run"], tmp_path / "out")
    names = [path.name for path in (tmp_path / "out" / "plots").iterdir()]
    assert names == ["digits-labels-2-nodes-logistic-labels.png"]


def test_no_run_is_one_sentence_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoRunsError, match="No finished run"):
        build_report([tmp_path], tmp_path / "out")
    assert main([str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(tmp_path) in message
    assert not (tmp_path / "out").exists()


# ---- what is written ----


def test_failures_are_listed_by_node_and_reason_and_counted_in_the_table(tmp_path: Path) -> None:
    failure = {"node": "3", "reason": "TimeoutError: <no reply>"}
    rounds = [round_line(n, 100, 0.5, [failure] if n in (1, 2, 4) else []) for n in range(1, 6)]
    write_run(tmp_path / "run", rounds, nodes_failed=1, seed=7)
    printed, page = report([tmp_path / "run"], tmp_path / "out")
    assert "failed" in printed.splitlines()[1]
    assert "TimeoutError: &lt;no reply&gt;" in page
    assert "1–2, 4 (seed 7)" in page


def test_without_failures_there_is_no_column_for_them(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    printed, _ = report([tmp_path / "run"], tmp_path / "out")
    assert "failed" not in printed


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_terminal_is_so_narrow_that_a_column_is_lost(tmp_path: Path, width: int) -> None:
    write_run(tmp_path / "a", strategy="one_shot_average", seed=0, nodes_failed=1)
    write_run(tmp_path / "b", strategy="one_shot_average", seed=1, nodes_failed=2, accuracy=0.8)
    printed, _ = report([tmp_path], tmp_path / "out", width)
    heading = printed.splitlines()[1].split()
    assert heading == ["method", "rounds", "up", "down", "accuracy", "seeds", "seconds", "failed"]
    assert re.search(r"3 +600 B +300 B +0\.850 ± 0\.071 +2 +1\.5 +3\s*$", printed, re.MULTILINE)


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    _, page = report([tmp_path / "run"], tmp_path / "out")
    sources = re.findall(r"""(?:src|href|srcset|data|action)\s*=\s*["']([^"']*)""", page)
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    assert str(tmp_path) not in page  # nor does it tell where it was made


def test_names_from_files_cannot_break_the_page_or_the_terminal(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>[/red]"
    write_run(tmp_path / "run", dataset=evil, details={"label": evil})
    printed, page = report([tmp_path / "run"], tmp_path / "out")
    assert "<script>" not in page
    assert evil in printed


def test_plots_are_png_images_with_content(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", [round_line(1, 100, 0.5)], strategy="ensemble", rounds=1)
    write_run(tmp_path / "runs" / "c", strategy="global", bytes_up=0, bytes_down=0)
    report([tmp_path / "runs"], tmp_path / "out")
    images = sorted((tmp_path / "out" / "plots").iterdir())
    stem = "digits-labels-2-nodes-logistic"
    assert [image.name for image in images] == [
        f"{stem}-accuracy-bytes.png",
        f"{stem}-accuracy-rounds.png",
        f"{stem}-labels.png",
    ]
    for image in images:
        assert image.read_bytes().startswith(PNG_START)
        assert image.stat().st_size > 5_000


def test_a_method_that_sends_nothing_does_not_break_the_logarithmic_axis(tmp_path: Path) -> None:
    silent = [round_line(n, None, 0.1 * n) for n in (1, 2, 3)]
    write_run(tmp_path / "a", silent, strategy="nosync", bytes_up=0, bytes_down=0)
    write_run(tmp_path / "b")
    report([tmp_path], tmp_path / "out")
    assert len(list((tmp_path / "out" / "plots").iterdir())) == 3


def test_csv_files_give_back_what_the_runs_said(tmp_path: Path) -> None:
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


def test_the_same_runs_give_the_same_report(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    _, first = report([tmp_path / "runs"], tmp_path / "one")
    _, second = report([tmp_path / "runs"], tmp_path / "two")
    assert first == second


def test_a_report_can_be_made_outside_the_main_thread(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    thread = threading.Thread(target=report, args=([tmp_path / "run"], tmp_path / "out"))
    thread.start()
    thread.join()
    assert (tmp_path / "out" / "report.html").is_file()


def test_the_command_writes_next_to_the_runs_or_below_runs_if_several_folders_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    assert main([str(first)]) == 0
    assert (first / "report.html").is_file()
    assert main([str(first), str(second)]) == 0
    assert (tmp_path / "runs" / "report" / "report.html").is_file()
    # A second report over a folder that already holds one finds the same runs.
    assert len(read_runs([tmp_path]).runs) == 2


def test_runs_on_streams_are_drawn_as_a_frontier_and_over_time(tmp_path):
    """Two protocols with a cumulative loss: one point each, and one curve each with its drift."""

    def line(number, size):
        metrics = {"cumulative_loss": 10.0 * number}
        return round_line(number, size, None) | {"train_metrics": metrics}

    for index, (strategy, label) in enumerate(
        [("dynamic", "dynamic Δ=0.7"), ("periodic", "periodic b=4"), ("serial", "serial")]
    ):
        details = {
            "label": label,
            "cumulative_loss": 30.0 + index,
            "drifts": [2],
            "full_synchronisations": [1, 3],
        }
        sent = 0 if strategy == "serial" else 500
        write_run(
            tmp_path / label,
            [line(n, sent) for n in (1, 2, 3)],
            strategy=strategy,
            details=details,
            bytes_up=sent,
            bytes_down=sent,
        )
    page = build_report([tmp_path], tmp_path / "report", Console(quiet=True))
    drawn = {path.name for path in (tmp_path / "report" / "plots").glob("*.png")}
    assert {"digits-labels-2-nodes-logistic-frontier.png"} <= drawn
    assert {"digits-labels-2-nodes-logistic-timeline.png"} <= drawn
    assert "cumulative loss per node" in page.read_text()


def test_a_method_belongs_to_the_family_of_its_name():
    assert family_of("dynamic total Δ=0.7") == "dynamic total"
    assert family_of("periodic b=4") == "periodic"
    assert family_of("nosync") == "nosync"


def test_a_new_column_is_an_entry_and_is_seen_in_the_terminal_the_page_and_the_csv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file: `columns`, which holds what the table and what the CSV file say."""
    run = write_run(tmp_path / "a", loss=0.25)
    shown = columns.Column(
        "final loss", lambda m: f"{m.loss.mean:.2f}" if m.loss else "–", caption="final loss: mean."
    )
    monkeypatch.setattr(run_tables, "COLUMNS", [*columns.COLUMNS, shown])
    monkeypatch.setitem(columns.METHOD_FIELDS, "half_loss", lambda s, m: m.loss.mean / 2)
    printed, page = report([run], tmp_path / "out")
    assert "final loss" in printed
    assert " 0.25" in printed
    assert "final loss: mean." in printed
    assert '<th scope="col">final loss</th>' in page
    (row,) = read_csv(tmp_path / "out" / "results.csv")
    assert row["half_loss"] == "0.125"


@pytest.mark.parametrize("width", [20, 60, 200])
def test_tables_fold_names_and_never_cut_numbers(width: int) -> None:
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


def test_a_name_stays_where_numbers_alone_are_wider_than_the_terminal() -> None:
    numbers = ["0.123 ± 0.456"] * 5
    console = Console(file=io.StringIO(), width=60)
    print_table(TextTable.of(("method", *"abcde"), [("random", *numbers)]), console)
    assert console.file.getvalue().splitlines()[-1].split() == [
        "random",
        *" ".join(numbers).split(),
    ]


def test_a_star_in_markdown_stays_a_star_and_html_is_escaped() -> None:
    table = TextTable.of(("name", "n"), [("<b>", "+0.1 *")])
    assert markdown_table(table)[-1] == "| <b> | +0.1 \\* |"
    assert '<td class="text">&lt;b&gt;</td><td>+0.1 *</td>' in html_table(table)
