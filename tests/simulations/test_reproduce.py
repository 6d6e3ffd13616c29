"""Reproductions: a whole catalogue, right comparisons, runs that resume, one-line complaints."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from simulations.config import compose_config
from simulations.reproduce import __main__ as command
from simulations.reproduce import results
from simulations.reproduce.catalogue import CATALOGUE, PAPERS, STUDIES, print_catalogue
from simulations.reproduce.comparison import AGREES, DIFFERS, Line, compare, comparison_table, count
from simulations.reproduce.findings import PUBLISHED, Finding, Findings, Published, kept, published
from simulations.reproduce.measures import BYTES, LATE_ACCURACY, LOSS, MEASURES
from simulations.reproduce.papers import driving2018, dynamic2018, gems2019, multi_model2025
from simulations.reproduce.pictures import draw_curves, draw_frontier, draw_methods
from simulations.reproduce.runner import run_study
from simulations.reproduce.study import OURS, Cell, Scope, Study

QUIET = Console(quiet=True)
SMALL = ("dataset=digits", "nodes=3", "train.epochs=1")
MADE = {"versions": {"torch": "1"}, "commit": "abc", "date": "2026-01-01", "machine": "2 cores"}
MADE |= {"python": "3", "minutes": 1.0}


def findings(name, *parts, **more):
    """Two seeds of an experiment."""
    return Findings(name, False, False, [0, 1], list(parts), made=MADE, **more)


def toy(*cells, **more):
    return Study("toy", OURS, "", "A toy.", 2, 1.0, cells=lambda scope: cells, **more)


# --- the catalogue ----------------------------------------------------------------------------


def test_every_published_number_is_set_beside_a_run_or_named_as_not_run():
    """A misspelt row would compare nothing; `differs` says what is left out of Table 1."""
    names = {line[:-1] for line in PUBLISHED.read_text().splitlines() if line[:1].isalpha()}
    assert names <= set(PAPERS)
    for name in names:
        study = PAPERS[name]
        runs = {(c.setting, c.method, q) for c in study.cells(Scope()) for q in c.reads}
        derived = {each.key for each in kept(name).findings} - runs
        left = set(published(name)) - runs - derived
        assert not left or (name == "slides_fedavg" and "Not run" in study.differs), left


@pytest.mark.slow
@pytest.mark.parametrize(
    "scope", [Scope(), Scope(quick=True, dataset="digits")], ids=["full", "quick"]
)
def test_runs_compose_and_differ(scope):
    """Each is an ordinary config; the first and the last cell of each experiment are composed."""
    for study in CATALOGUE.values():
        if study.cells is None or (scope.stand_in and not study.has_stand_in):
            continue
        cells = study.cells(scope)
        assert {quantity for cell in cells for quantity in cell.reads} <= set(MEASURES)
        words = [tuple(study.overrides(cell, scope, 3)) for cell in cells]
        # Of GEMS 2019 the pooled model is one run that stands in several rows.
        assert len(set(words)) >= len(
            {(c.setting, c.method) for c in cells if c.method != "Global"}
        )
        for each in (words[0], words[-1]):
            assert compose_config(list(each)).seed == 3


def listed():
    console = Console(file=io.StringIO(), width=80)
    print_catalogue([*CATALOGUE.values()], Scope(PUBLISHED), console)
    return console.file.getvalue()


def test_the_list_has_a_line_for_each_with_its_table_and_its_state():
    lines = listed().splitlines()
    for each in CATALOGUE.values():
        (line,) = [line for line in lines if line.startswith(f"{each.name} ")]
        assert each.where in line
        assert ("in full" in line) == (kept(each.name) is not None)


def test_the_list_comes_without_torch_and_flower():
    code = "import sys; from simulations.reproduce import __main__ as c; c.main([]); "
    code += "assert not {'torch', 'flwr', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# --- the comparison ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "known", "verdict"),
    [
        ([0.83, 0.85], Published(0.81, 0.01), AGREES),
        ([0.84, 0.86], Published(0.81, 0.01), DIFFERS),  # 0.04 beside 2·√(0.014² + 0.01²) = 0.035
        ([0.514], Published(0.51, None, 0.01), AGREES),  # rounding explains it
        ([0.516], Published(0.51, None, 0.01), DIFFERS),
        ([None, None], Published(316), DIFFERS),  # a target that was never reached
        ([], Published(316), ""),
    ],
)
def test_a_number_differs_beyond_twice_the_joint_spread(values, known, verdict):
    assert Line(Finding("s", "m", "accuracy", values), known).verdict == verdict
    assert Line(Finding("s", "m", "accuracy", values), known, is_judged=False).verdict == ""


def test_published_text_is_read_with_its_spread_and_its_last_digit():
    known = published("gems2019_convex")["MNIST, 2 nodes", "Local", "accuracy"]
    assert (known.mean, known.sd, known.digit) == (0.481, 0.027, 0.001)
    assert published("gems2018_mnist")["MNIST and permuted", "Global", "accuracy"].digit == 0.01


def test_the_table_has_ours_beside_the_papers_and_no_empty_column():
    found = findings("x", Finding("s", "m", "accuracy", [0.5, None], [2.0]))
    assert comparison_table(found).rows[0].cells == ("s", "m", "0.500 (1 missing)", "2.0")
    known = findings("gems2019_convex", Finding("MNIST, 2 nodes", "Local", "accuracy", [0.5, 0.5]))
    cells = ("MNIST, 2 nodes", "Local", "0.481 ± 0.027", "0.500 ± 0.000", "+0.019", AGREES)
    assert comparison_table(known).rows[0].cells == cells
    assert count(known) == (1, 1)
    # Neither of a quick run nor of other data a number is judged.
    assert count(replace(known, quick=True)) == count(replace(known, stand_in=True)) == (0, 0)


def test_the_page_has_the_tables_of_what_is_kept():
    text = results.PAGE.read_text(encoding="utf-8")
    assert results.with_tables(text) == text


@pytest.mark.parametrize("name", [name for name in CATALOGUE if kept(name)])
def test_what_is_kept_is_read_compared_and_drawn(name):
    found, study = kept(name), CATALOGUE[name]
    assert not found.failures
    assert Findings.from_bytes(found.to_bytes()) == found
    assert comparison_table(found, study.shown).rows
    if study.draw is not None:
        assert study.draw(found).axes


def test_kept_data_are_small():
    files = [*results.PAGE.parents[1].glob("simulations/reproduce/measured/*")]
    assert sum(each.stat().st_size for each in files) < 3e6


# --- what is read off runs, and derived from several --------------------------------------------


def protocols(name, setting, runs):
    """Return findings of protocols; in the second seed periodic averaging failed."""
    parts = []
    for method, pair in runs.items():
        for quantity, value in zip((LOSS, BYTES), pair, strict=True):
            values = [value, None if method.startswith("b") else value]
            parts.append(Finding(setting, method, quantity, values))
    return findings(name, *parts)


def test_bytes_are_compared_at_equal_loss():
    """Between (loss 1, 100 MB) and (3, 1 MB) lies (2, √(100 · 1) = 10 MB): 5 MB are half of it."""
    runs = {"b = 1": (1.0, 100.0), "b = 4": (3.0, 1.0), "Δ = 0.7": (2.0, 5.0), "Δ = 9": (3.5, 0.1)}
    found = protocols("dynamic_protocols", "100 learners", runs)
    dynamic2018.compare_with_periodic(found)
    (share,) = found.of(dynamic2018.AT_EQUAL_LOSS)
    assert share.by_seed == [pytest.approx(0.5), None]
    assert compare(found)[-1].published.mean == 0.5


def test_protocols_are_set_beside_one_other_seed_by_seed():
    """Half of the bytes at 1.1 times the loss."""
    found = protocols("x", "100 learners", {"b = 4": (10.0, 8.0), "Δ = 0.3": (11.0, 4.0)})
    dynamic2018.compare_with(found, "100 learners", "b = 4", ("Δ = 0.3", "Δ = 0.7"))
    sent, loss = found.findings[-2:]
    assert (sent.quantity, sent.by_seed) == ("bytes beside b = 4", [pytest.approx(0.5), None])
    assert (loss.quantity, loss.by_seed) == ("loss beside b = 4", [pytest.approx(1.1), None])


def test_gains_of_fine_tuning_are_means_over_settings():
    """0.8 and 0.6 beside 0.5 in the one seed and 0.4 in the other: 0.2 and 0.3 on average."""
    parts = []
    for setting, ours in (("MNIST, convex", 0.8), ("HAM10000, network", 0.6)):
        title = f"{setting}, 100 samples"
        parts.append(Finding(title, "GEMS, rate 0.01", "accuracy", [ours, ours]))
        parts.append(Finding(title, "raw, rate 0.001", "accuracy", [0.5, 0.4]))
    found = findings("gems2019_tuning", *parts)
    gems2019.gains(found)
    gain = found.get("all, as released", "over raw", "gain with 100 samples")
    assert gain.values == pytest.approx([0.2, 0.3])


def test_accuracies_of_several_models_are_relative_to_full_participation_of_the_same_seed():
    setting = multi_model2025.AS_PUBLISHED
    found = findings(
        "slides_multi_model",
        Finding(setting, "full", "accuracy", [0.8, 0.5]),
        Finding(setting, "random", "accuracy", [0.4, None]),
        Finding(multi_model2025.LARGE_STEPS, "random", "accuracy", [0.45, 0.4]),
    )
    multi_model2025.relate(found)
    shares = {each.key: each.by_seed for each in found.of(multi_model2025.RELATIVE)}
    assert shares[setting, "random", multi_model2025.RELATIVE] == [0.5, None]
    assert len(shares) == 2  # without full participation there is nothing to divide by


@pytest.mark.parametrize(("loss", "share"), [(0.2, [0.5]), (0.3, None)])
def test_a_dynamic_protocol_outperforms_if_it_drives_better_and_sends_less(loss, share):
    """Δ beats b = 1 in both; b = 2 sends less. Where all drive alike nothing is said."""
    found = findings("dynamic_driving")
    for method, sent in (("b = 1", 9.0), ("b = 2", 1.0), ("Δ = 1", 2.0)):
        value = loss if method.startswith("Δ") else 0.3
        found.findings.append(Finding("10 learners", method, driving2018.L_DD, [value]))
        found.findings.append(Finding("10 learners", method, BYTES, [sent]))
    driving2018.compare_drivers(found)
    known = found.get("10 learners", "periodic", driving2018.BEATEN)
    assert (known and known.by_seed) == share


def test_late_rounds_are_the_last_third_without_the_initial_model(tmp_path):
    scores = {0: 0.9, 1: 0.1, 2: 0.4, 3: 0.6}
    lines = [{"round": n, "server_metrics": {"accuracy": value}} for n, value in scores.items()]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert MEASURES[LATE_ACCURACY]({}, tmp_path) == pytest.approx(0.5)


# --- pictures -----------------------------------------------------------------------------------


def test_pictures_have_a_panel_per_setting_and_what_is_measured():
    parts = [
        Finding(f"γ = {x:g}", method, "loss", [x, x + 1], x=x)
        for method in ("GEMS", "Local")
        for x in (0.5, 1.0)
    ]
    (panel,) = draw_curves(findings("x", *parts), "loss").axes
    assert panel.get_title("left") == "γ = …"
    assert [list(line[0].get_ydata()) for line in panel.containers] == [[1.0, 1.5]] * 2
    assert len(draw_methods(findings("x", *parts)).axes) == 2
    runs = {"b = 1": (1.0, 9.0), "Δ = 1": (2.0, 3.0), "total, Δ = 1": (2.0, 4.0), "nosync": (9, 1)}
    (panel,) = draw_frontier(protocols("x", "s", runs)).axes
    names = panel.get_legend_handles_labels()[1]
    assert names == ["periodic", "dynamic", "dynamic, total"]
    assert panel.get_title("left") == "s; without messages: 9"


# --- running ------------------------------------------------------------------------------------


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    words = (*SMALL, "strategy=gems")
    impossible = (*words, "strategy/space=ball", "strategy.space.epsilon=1")
    study = toy(Cell("digits", "impossible", impossible), Cell("digits", "possible", words))
    found = run_study(study, Scope(tmp_path, jobs=1), QUIET)
    assert [each.partition(":")[0] for each in found.failures] == [
        "digits, impossible, seed 0",
        "digits, impossible, seed 1",
    ]
    assert [each.missing for each in found.findings] == [2, 0]


def test_minutes_are_those_of_all_runs_even_if_most_were_finished_before(tmp_path):
    """Two runs that took ten minutes each, one after the other: 20 minutes, though only read."""
    study = toy(Cell("digits", "Local", (*SMALL, "strategy=local")))
    options = Scope(tmp_path, jobs=1)
    assert run_study(study, options, QUIET).made["minutes"] < 5
    for path in tmp_path.rglob("result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 600.0}))
    assert run_study(study, options, QUIET).made["minutes"] == 20.0


def test_a_dear_run_has_fewer_seeds_unless_they_are_asked_for(tmp_path):
    study = toy(Cell("cheap", "A", ()), Cell("dear", "A", (), seeds=1))

    def played(options):
        seeds = study.seeds_of(options)
        return [(c.setting, seed) for seed in seeds for c in study.cells_of(options, seed)]

    assert played(Scope(tmp_path)) == [("cheap", 0), ("dear", 0), ("cheap", 1)]
    assert ("dear", 1) in played(Scope(tmp_path, seeds=2))


@pytest.mark.deep
def test_processes_give_the_numbers_of_one(tmp_path):
    methods = {"Local": "local", "Averaged": "one_shot_average"}
    study = toy(*(Cell("digits", m, (*SMALL, f"strategy={s}")) for m, s in methods.items()))
    one, two = (run_study(study, Scope(tmp_path / str(n), jobs=n), QUIET) for n in (1, 2))
    assert one.findings == two.findings


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def entry(monkeypatch, tmp_path):
    """A study of the catalogue with a published number, whose results are kept elsewhere."""
    cells = [Cell("digits", "Local", (*SMALL, "strategy=local"))]
    study = toy(*cells, draw=draw_methods, quick=("train.epochs=2",))
    monkeypatch.setitem(CATALOGUE, "toy", study)
    (tmp_path / "published.yaml").write_text(
        'toy: [{source: "T", methods: [Local], rows: {digits: ["0.990 (0.001)"]}}]'
    )
    from simulations.reproduce import catalogue, findings

    monkeypatch.setattr(findings, "PUBLISHED", tmp_path / "published.yaml")
    for module in (findings, catalogue):
        monkeypatch.setattr(module, "MEASURED", tmp_path)
    page = tmp_path / "results.md"
    page.write_text("# By hand\n\n<!-- table: toy -->\nold\n<!-- end -->\nthe end\n")
    monkeypatch.setattr(results, "write_tables", partial(results.write_tables, page))
    findings._tables.cache_clear()
    yield study
    findings._tables.cache_clear()


def test_a_new_experiment_is_an_entry_and_its_published_numbers(entry, tmp_path, capsys):
    """It is run, compared, drawn, kept, shown, written into the page; then it is not run again."""
    words = ["toy", "--jobs=1", "--output", str(tmp_path / "out")]
    assert command.main([*words, "--keep"]) == 0
    assert "0.990 ± 0.001" in capsys.readouterr().out
    for suffix in ("json", "png", "html"):
        assert (tmp_path / "out" / "toy" / f"toy.{suffix}").stat().st_size > 100
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("# By hand\n")
    assert "|digits|Local|0.990 ± 0.001|" in page
    assert "old" not in page
    assert command.main(["toy", "--show"]) == 0
    assert "0 of 1 published numbers agree" in capsys.readouterr().out.replace("\n", " ")
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(made) == 2
    assert command.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == made


def test_quick_ones_come_first_so_that_what_is_said_by_hand_counts(entry, tmp_path):
    words = ["toy", "--quick", "train.lr=0.2", "--output", str(tmp_path), "--jobs=1"]
    assert command.main(words) == 0
    (path,) = tmp_path.rglob("config.yaml")
    assert "lr: 0.2" in path.read_text()
    # What a cell sets is part of the experiment's shape.
    assert "epochs: 1" in path.read_text()
    assert (tmp_path / "toy-quick" / "toy-quick.html").is_file()


def test_all_runs_what_is_missing_the_shortest_first_and_a_failure_does_not_stop_it(
    monkeypatch, tmp_path, capsys
):
    log = []

    def measure(name, overrides, seed, folder, console):
        log.append(name)
        if name == "broken" and log.count("broken") == 1:
            raise RuntimeError("[no] disk")
        yield Finding("s", "m", "accuracy", [0.5])

    for name in [*CATALOGUE]:
        monkeypatch.delitem(CATALOGUE, name)
    for name, minutes in (("long", 9), ("broken", 1), ("short", 2)):
        study = Study(name, OURS, "", "A toy.", 1, minutes, measure=partial(measure, name))
        monkeypatch.setitem(CATALOGUE, name, study)
    words = ["all", "--output", str(tmp_path)]
    assert command.main(words) == 1
    assert "broken failed: [no] disk" in capsys.readouterr().out
    assert command.main(words) == 0
    assert log == ["broken", "short", "long", "broken"]
    assert command.main([*words, "--seeds", "2"]) == 0
    assert log[4:] == ["broken", "short", "long"]  # the finished seed is read


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gems2019_conve"], "there is no 'gems2019_conve': did you mean gems2019_convex"),
        (["leaks", "leekage"], "there is no 'leekage'"),
        (["nodes=3"], "'nodes=3' is for a study"),
        (["gems2019_convex", "--seeds", "none"], "--seeds: must be a whole number of at least 1"),
        (["gems2019_convex", "--dataset", "mnist"], "--dataset must be digits"),
        (["dynamic_driving", "--dataset", "digits"], "data that nothing can stand in for"),
        (["gems2019_convex", "nodes=3"], "has the paper's settings, got 'nodes=3'"),
        (["gems2019_convex", "--keep", "--quick"], "only what full runs give is kept"),
        (["leaks", "--show"], "nothing of leaks is kept"),
        (["leaks", "--dataset", "minst"], "minst"),
        (["leaks", "speed=9"], "there is no key 'speed'"),
    ],
)
def test_a_wrong_word_is_one_line_with_what_is_allowed(words, said, capsys, tmp_path):
    output = tmp_path / "out"
    try:
        status = command.main([*words, "--output", str(output)])
    except SystemExit as end:
        status = end.code
    complaint = capsys.readouterr().err
    assert status == 2
    assert said in complaint
    assert complaint.count("\n") == 1
    assert not list(output.rglob("result.json"))


@pytest.mark.parametrize("name", ["gems2019_convex", "leaks"])
def test_missing_data_are_named_with_the_folder_before_anything_runs(name, capsys, tmp_path):
    words = [name, "--data-dir", str(tmp_path / "none"), "--output", str(tmp_path)]
    assert command.main([*words, *(["--dataset", "mnist"] if name in STUDIES else [])]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "none") in said
    assert ("--dataset digits" in said) == (name in PAPERS)
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.slow
def test_the_demo_ends_with_a_table_a_report_and_a_picture(monkeypatch, tmp_path, capsys):
    from simulations.reproduce import demo

    few = {name: demo.METHODS[name] for name in ("global", "gems (cone)", "fedavg")}
    monkeypatch.setattr(demo, "METHODS", few)
    assert command.main(["demo", "--quick", "rounds=2", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in few:
        assert name in said
    folder = tmp_path / "demo" / "report"
    assert "fedavg" in (folder / "report.html").read_text()
    assert (folder / "frontier.png").read_bytes().startswith(b"\x89PNG")
