"""Every command line: what is there is listed whole, and a user's mistake is one line, status 2."""

import importlib
import inspect
import io
import subprocess
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from gems_flwr.__main__ import main as library
from simulations.bench.__main__ import main as bench
from simulations.deployment.__main__ import main as deployment
from simulations.report.__main__ import main as report
from simulations.reproduce import __main__ as command
from simulations.reproduce import estimates
from simulations.reproduce.catalogue import CATALOGUE, PAPERS, STUDIES
from simulations.reproduce.entry import Options
from simulations.reproduce.listing import print_catalogue, short
from simulations.reproduce.papers import findings, results_page
from simulations.reproduce.papers.spec import Cell, Reproduction
from simulations.reproduce.papers.table_figures import method_panels
from simulations.reproduce.studies.study import Study

reproduce = command.main


def status_of(main, words):
    """Return the exit status, whether it is returned or argparse exits with it."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code


def complaint(main, words, capsys):
    assert status_of(main, words) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("\n") == 1, said
    return said


# --- the list ---------------------------------------------------------------------------------


def listed(width):
    console = Console(file=io.StringIO(), width=width)
    print_catalogue([*CATALOGUE.values()], Options(Path("nowhere")), console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_list_has_every_name_whole_at_any_width(width):
    said = listed(width)
    assert [name for name in CATALOGUE if name not in said.split()] == []
    assert "…" not in said


def test_the_list_has_one_line_for_each_at_80_columns():
    lines = listed(80).splitlines()
    assert max(map(len, lines)) <= 80
    for each in CATALOGUE.values():
        (line,) = [line for line in lines if line.startswith(f"{each.name} ")]
        assert short(each.where) in line


def test_the_list_says_how_long_which_table_and_whether_it_was_run(monkeypatch):
    monkeypatch.setattr(estimates, "training_seconds", lambda: 2 * estimates.PUBLISHED_SECONDS)
    monkeypatch.setattr(estimates, "_made", lambda name: None)
    lines = listed(80).splitlines()
    (line,) = [x for x in lines if x.startswith("gems2019_convex ")]
    assert "T. 1, 5" in line
    assert f" {2 * CATALOGUE['gems2019_convex'].minutes:g} " in line
    assert line.split()[-2:] == ["in", "full"]
    (line,) = [x for x in lines if x.startswith("leaks ")]
    assert line.split()[-1] == "–"


def test_every_quick_version_was_measured_to_take_five_minutes_at_most():
    for each in PAPERS.values():
        if each.quick_minutes is not None:
            assert each.quick_minutes <= estimates.QUICK_MINUTES, each.name


def test_what_an_entry_shows_is_said_on_demand(capsys):
    assert reproduce(["--about", "leaks"]) == 0
    said = capsys.readouterr().out
    assert "What do class moments give away?" in said
    assert "gems2019_convex" not in said
    assert reproduce(["--about"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in CATALOGUE)


def test_the_list_comes_without_torch_and_flower():
    code = "import sys; from simulations.reproduce import __main__ as c; c.main([]); "
    code += "assert not {'torch', 'flwr', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_papers_and_studies_share_one_list_of_names():
    assert set(CATALOGUE) == set(PAPERS) | set(STUDIES)
    assert not set(PAPERS) & set(STUDIES)
    assert not set(CATALOGUE) & {*command.GROUPS, command.ALL}


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gems2019_conve"], "there is no 'gems2019_conve': did you mean gems2019_convex"),
        (["xyz"], "there is no 'xyz': python -m simulations.reproduce lists"),
        (["nodes=3"], "'nodes=3' is for a study"),
        (["gems2019_convex", "--seeds", "none"], "--seeds: must be a whole number of at least 1"),
        (["gems2019_convex", "--jobs", "0"], "--jobs: must be a whole number of at least 1"),
        (["gems2019_convex", "--dataset", "mnist"], "--dataset must be digits"),
        (["gems2019_convex", "nodes=3"], "has the paper's settings, got 'nodes=3'"),
        (["gems2019_convex", "--speed"], "unrecognized arguments: --speed"),
        (["gems2019_convex", "--publish", "--quick"], "only what full runs give is published"),
        (["dynamic_frontiers", "--show"], "dynamic_frontiers has not been run in full"),
        (["leaks", "--show"], "leaks is a study"),
        (["all", "leaks"], "'all' stands alone: leave 'leaks' out"),
        (["all", "nodes=3"], "'all' stands alone: leave 'nodes=3' out"),
        (["all", "--show"], "'all' runs what is missing"),
        (["all", "--publish", "--quick"], "only what full runs give is published"),
        (["leaks", "--status"], "--status says how far 'all' is"),
        (["leaks", "--jobs", "2"], "leaks runs in one process"),
        (["leaks", "--seeds", "2"], "leaks has one seed"),
        (["leaks", "--dataset", "minst"], "minst"),
        (["leaks", "speed=9"], "there is no key 'speed'"),
        (["honest_radii", "model=mlp"], "models that are one linear layer"),
    ],
)
def test_a_wrong_word_is_one_line_with_what_is_allowed(words, said, capsys, tmp_path):
    assert said in complaint(reproduce, [*words, "--output", str(tmp_path)], capsys)


def test_nothing_runs_if_one_of_several_names_is_wrong(capsys, tmp_path):
    complaint(reproduce, ["honest_radii", "leekage", "--output", str(tmp_path)], capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gems2019_convex", "honest_radii"])
def test_missing_data_is_said_with_the_folder(name, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("GEMS_FLWR_DATA", raising=False)
    words = [name, "--data-dir", str(tmp_path / "none"), "--output", str(tmp_path)]
    words += ["--dataset", "mnist"] if name in STUDIES else []
    assert status_of(reproduce, words) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "none") in said
    assert "Traceback" not in said
    if name in PAPERS:
        assert "--dataset digits" in said


@pytest.mark.parametrize("name", ["gems2019_convex", "honest_radii", "demo"])
def test_a_file_in_the_way_of_the_output_is_one_line(name, capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    said = complaint(reproduce, [name, "--output", str(tmp_path / "file" / "deeper")], capsys)
    assert "a file is in the way" in said


def test_the_other_command_lines_complain_in_one_line_too(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "there is no 'speed'; there are messages" in complaint(bench, ["speed"], capsys)
    assert "unrecognized" in complaint(bench, ["--slow"], capsys)
    assert "required: DIR" in complaint(report, [], capsys)
    assert "No finished run" in complaint(report, [str(tmp_path)], capsys)
    assert "in the way" in complaint(deployment, ["--output", str(tmp_path / "file")], capsys)
    assert "something else" in complaint(deployment, ["--output", str(tmp_path)], capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_library_s_own_command_line_has_the_same_manners(capsys, tmp_path):
    missing = str(tmp_path / "none.space")
    assert missing in complaint(library, ["show", missing], capsys)
    (tmp_path / "text").write_text("no space")
    assert "text" in complaint(library, ["show", str(tmp_path / "text")], capsys)
    # Of several files each is named with its fault; and argparse says what the commands are.
    for words in (["aggregate", missing, "-o", str(tmp_path / "model")], ["agregate"]):
        assert status_of(library, words) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("main", [reproduce, report, bench, deployment])
def test_help_names_the_program_and_its_options(main, capsys):
    assert status_of(main, ["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m simulations.")
    if main is reproduce:
        text = said[said.index("Run the papers'") :]
        assert max(map(len, text.splitlines())) <= 80


# --- what is asked for reaches the entry ------------------------------------------------------


def test_a_study_gets_its_options_as_overrides(monkeypatch, tmp_path):
    """Quick ones first, so that what is said by hand counts; and a folder of its own."""
    asked = []
    toy = types.ModuleType("toy")
    toy.run = lambda overrides, output, console, **more: asked.append((overrides, output, more))
    monkeypatch.setitem(sys.modules, "toy", toy)
    study = Study("toy", "A toy.", 1, seeds=3, quick=("rounds=2",), module="toy")
    monkeypatch.setitem(CATALOGUE, "toy", study)
    base = ["toy", "--output", str(tmp_path), "--dataset", "mnist", "--data-dir", "d"]
    assert reproduce([*base, "nodes=3"]) == 0
    assert reproduce(["toy", "rounds=5", "--output", str(tmp_path), "--quick"]) == 0
    assert reproduce([*base, "--seeds", "7"]) == 0
    assert asked == [
        (["dataset=mnist", "data_dir=d", "nodes=3"], tmp_path / "toy", {"seeds": range(3)}),
        (["rounds=2", "rounds=5"], tmp_path / "toy-quick", {"seeds": range(1)}),
        (["dataset=mnist", "data_dir=d"], tmp_path / "toy", {"seeds": range(7)}),
    ]


def test_a_new_experiment_is_an_entry_and_its_published_numbers(monkeypatch, tmp_path, capsys):
    """Two files, or three with a config of its own: run, compared, drawn, published, shown."""
    toy = Reproduction(
        name="toy",
        paper="Toys 2026",
        where="Table 9",
        about="How good nodes are alone.",
        cells=lambda scope: [Cell("digits", "Local", ("nodes=3", "strategy=local"))],
        draw=method_panels,
        seeds=2,
        minutes=1,
        quick=("train.epochs=1",),
    )
    known = tmp_path / "published.yaml"
    known.write_text('toy: [{source: "T", methods: [Local], rows: {digits: ["0.990 (0.001)"]}}]')
    monkeypatch.setitem(PAPERS, "toy", toy)
    monkeypatch.setitem(CATALOGUE, "toy", toy)
    monkeypatch.setattr(findings, "PUBLISHED", known)
    findings._tables.cache_clear()
    monkeypatch.setattr(results_page, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(results_page, "MEASURED", tmp_path / "measured")
    try:
        assert reproduce(["toy", "--jobs=1", "--publish", "--output", str(tmp_path / "out")]) == 0
        shown = capsys.readouterr().out
        assert "0.990 ± 0.001" in shown
        assert (tmp_path / "out" / "toy" / "toy.html").exists()
        page = (tmp_path / "docs" / "results.md").read_text()
        assert "## toy" in page
        assert "**Toys 2026, Table 9.**" in page
        assert (tmp_path / "docs" / "results" / "toy.png").exists()
        assert reproduce(["toy", "--show"]) == 0
        assert "0.990 ± 0.001" in capsys.readouterr().out
    finally:
        findings._tables.cache_clear()


def test_the_runs_of_an_experiment_are_multiruns(capsys):
    assert reproduce(["gems2018_shallow", "--commands"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("python -m simulations.run -m experiment=gems2018_shallow")
    assert first.endswith("seed=0,1,2")


def test_what_full_runs_gave_is_shown_without_running(capsys):
    assert reproduce(["gems2019_epsilon_grid", "--show"]) == 0
    assert "GEMS 2019, Figure 6" in capsys.readouterr().out


def test_every_study_can_be_imported_and_takes_what_it_is_given():
    for study in STUDIES.values():
        name = study.module or f"simulations.reproduce.studies.{study.name}"
        parameters = inspect.signature(importlib.import_module(name).run).parameters
        assert list(parameters)[:3] == ["overrides", "output", "console"]
        assert ("seeds" in parameters) == (study.seeds > 1)
