"""Reproductions of the papers: the catalogue is whole, the comparison right, the page written."""

import json
import math
from dataclasses import replace

import pytest
from helpers_findings import findings
from rich.console import Console

from simulations.config import compose_config
from simulations.data.archives import MissingDataError
from simulations.reproduce import __main__ as command
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.entry import Options
from simulations.reproduce.papers import (
    comparison,
    dynamic_claims,
    equal_loss,
    explanations,
    gems2019,
    results_page,
    run_measures,
    runner,
    slides2025,
)
from simulations.reproduce.papers.findings import (
    PUBLISHED,
    Finding,
    Findings,
    Line,
    Published,
    compare,
    merge,
    published,
)
from simulations.reproduce.papers.run_measures import MEASURES
from simulations.reproduce.papers.runner import in_lockstep, reproduce
from simulations.reproduce.papers.spec import EXPERIMENTS, Cell, Reproduction, Scope

QUIET = Console(quiet=True)
# Added from several runs rather than read off one.
DERIVED = {
    "gain with 100 samples",
    "bytes beside periodic at equal loss",
    "least bytes beside periodic at equal loss",
    "bytes beside FedAvg",
    "loss beside FedAvg",
    "accuracy less FedAvg's",
    "accuracy relative to full participation",
}


# --- the catalogue ----------------------------------------------------------------------------


def test_every_published_number_has_a_run_that_is_set_beside_it():
    """A misspelt row would silently compare nothing."""
    for name, reproduction in PAPERS.items():
        runs = {(c.setting, c.method, q) for c in reproduction.cells(Scope()) for q in c.reads}
        left = {key for key in published(name) if key[2] not in DERIVED} - runs
        if name == slides2025.NAME:
            assert len(left) == len(slides2025.not_run())
        else:
            assert not left, f"{name}: {sorted(left)[:5]}"


def test_published_numbers_belong_to_reproductions_and_say_where_they_stand():
    names = {
        line.rstrip(":\n") for line in PUBLISHED.read_text().splitlines() if line[:1].isalpha()
    }
    assert names <= set(PAPERS)
    for name in names:
        assert published(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize(
    "scope", [Scope(), Scope(quick=True, stand_in=True)], ids=["full", "quick"]
)
def test_runs_compose(name, scope):
    """Each is an ordinary config: ``python -m simulations.run experiment=…``. Some of each kind."""
    reproduction = PAPERS[name]
    cells = reproduction.cells(scope)
    assert {quantity for cell in cells for quantity in cell.reads} <= set(MEASURES)
    for cell in [cells[0], *cells[5::11], cells[-1]]:
        config = compose_config(reproduction.overrides(cell, scope, 3))
        assert config.seed == 3


def test_every_reproduction_says_which_config_its_runs_have():
    """A misspelt name would silently run the default config."""
    for reproduction in PAPERS.values():
        for cell in reproduction.cells(Scope()):
            chosen = reproduction.overrides(cell, Scope(), 0)
            (config,) = [word for word in chosen if word.startswith("experiment=")]
            assert (EXPERIMENTS / f"{config.split('=')[1]}.yaml").exists()


def test_runs_of_a_reproduction_differ():
    """Two cells with the same config would be one run shown twice."""
    for name in ("gems2019_tuning", "gems2018_mixing", "dynamic_protocols"):
        reproduction = PAPERS[name]
        said = [tuple(reproduction.overrides(c, Scope(), 0)) for c in reproduction.cells(Scope())]
        assert len(said) == len(set(said))


# --- the comparison ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "known", "notable"),
    [
        ([0.80, 0.82], Published(0.81, 0.01), False),
        ([0.90, 0.92], Published(0.81, 0.01), True),  # 0.10 beside 2·√(0.014² + 0.01²) = 0.035
        ([0.84, 0.86], Published(0.81, 0.01), True),
        ([0.83, 0.85], Published(0.81, 0.01), False),
        ([0.514], Published(0.51, None, 0.01), False),  # rounding explains it
        ([0.516], Published(0.51, None, 0.01), True),
    ],
)
def test_a_difference_is_notable_beyond_twice_the_joint_spread(values, known, notable):
    assert Line(Finding("s", "m", "accuracy", values), known).notable is notable


def test_published_text_is_read_with_its_spread_and_its_last_digit():
    known = published("gems2019_convex")["MNIST, 2 nodes", "Local", "accuracy"]
    assert (known.mean, known.sd, known.digit) == (0.481, 0.027, 0.001)
    assert published("gems2018_mnist")["MNIST and permuted", "Global", "accuracy"].digit == 0.01


def test_seeds_are_joined_in_order_and_missing_ones_counted():
    parts = [
        Finding("s", "m", "rounds", [3.0]),
        Finding("s", "n", "rounds", [None]),
        Finding("s", "m", "rounds", [5.0]),
    ]
    joined = merge(parts)
    assert [(each.method, each.values, each.missing) for each in joined] == [
        ("m", [3.0, 5.0], 0),
        ("n", [], 1),
    ]
    assert joined[0].mean == 4.0
    assert math.isclose(joined[0].sd, math.sqrt(2))
    row = comparison.cells(Line(joined[1], Published(7.0)), "gems2019_convex")
    assert row[4:6] == ("7", "not reached")


def test_findings_stand_in_the_order_of_the_experiment():
    """Though the two references are a group of their own and run before the second setting."""
    cells = [
        Cell("a", "Global", (), group="pooled"),
        Cell("a", "Local", ()),
        Cell("b", "Global", (), group="pooled"),
        Cell("b", "Local", ()),
    ]
    ran = [Finding(s, m, "accuracy") for s, m in (("a", "Global"), ("b", "Global"))]
    ran += [Finding(s, "Local", "accuracy") for s in ("b", "a")]
    ordered = runner._in_order(ran, cells)
    assert [(f.setting, f.method) for f in ordered] == [(c.setting, c.method) for c in cells]


def test_findings_survive_their_file():
    found = findings("gems2019_convex", Finding("MNIST, 2 nodes", "Local", "accuracy", [0.5, 0.6]))
    assert Findings.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["name"] == "gems2019_convex"


def test_bytes_are_compared_at_equal_loss():
    """Between (loss 1, 100 MB) and (3, 1 MB) lies (2, 10 MB): 5 MB are half of it."""
    found = findings("dynamic_protocols")
    for method, loss, sent in (("b = 1", 1.0, 100.0), ("b = 4", 3.0, 1.0), ("Δ = 0.7", 2.0, 5.0)):
        # In the second seed the first run of periodic averaging failed: nothing to compare with.
        lost = method == "b = 1"
        found.add(Finding("100 learners", method, equal_loss.LOSS, [loss, None if lost else loss]))
        found.add(Finding("100 learners", method, equal_loss.BYTES, [sent, None if lost else sent]))
    equal_loss.compare_with_periodic(found)
    (share,) = found.of(equal_loss.AT_EQUAL_LOSS)
    assert share.by_seed == [pytest.approx(0.5), None]
    assert compare(found)[-1].published.mean == 0.5


def test_protocols_are_set_beside_one_other_seed_by_seed():
    """Half of the bytes at 1.1 times the loss; in the second seed the other failed."""
    found = findings("dynamic_drift")
    for method, loss, sent in (("b = 4", 10.0, 8.0), ("Δ = 0.3", 11.0, 4.0)):
        lost = method == "b = 4"
        found.add(Finding("100 learners", method, equal_loss.LOSS, [loss, None if lost else loss]))
        found.add(Finding("100 learners", method, equal_loss.BYTES, [sent, None if lost else sent]))
    equal_loss.compare_with(found, "100 learners", "b = 4", ("Δ = 0.3", "Δ = 0.7"))
    sent, loss = found.findings[-2:]
    assert (sent.quantity, sent.by_seed) == ("bytes beside b = 4", [pytest.approx(0.5), None])
    assert (loss.quantity, loss.by_seed) == ("loss beside b = 4", [pytest.approx(1.1), None])
    text = dynamic_claims.drift_found(found)
    assert "Δ = 0.3 sends 0.50 of the bytes at 1.10 of the loss" in text


def test_gains_of_fine_tuning_are_means_over_settings():
    found = findings("gems2019_tuning")
    for setting, ours in (
        ("MNIST, convex, 100 samples", 0.8),
        ("HAM10000, network, 100 samples", 0.6),
    ):
        found.add(Finding(setting, "GEMS, rate 0.01", "accuracy", [ours, ours]))
        found.add(Finding(setting, "raw, rate 0.001", "accuracy", [0.5, 0.4]))
    gems2019._gains(found)
    gain = found.get("all, as released", "over raw", "gain with 100 samples")
    assert gain.values == pytest.approx([0.2, 0.3])


# --- explanations and the page ----------------------------------------------------------------


def test_what_differs_is_explained_or_named_as_not_explained(monkeypatch):
    entry = {"setting": "^MNIST", "method": "Local", "says": "because."}
    monkeypatch.setattr(explanations, "_entries", lambda: {"gems2019_convex": [entry]})
    found = findings(
        "gems2019_convex",
        Finding("MNIST, 2 nodes", "Local", "accuracy", [0.9, 0.91]),
        Finding("MNIST, 3 nodes", "Averaged", "accuracy", [0.1, 0.11]),
        Finding("MNIST, 2 nodes", "Global", "accuracy", [0.926, 0.927]),
    )
    first, second = explanations.explain(found)
    assert first == "Local (MNIST, 2 nodes): because."
    assert second == "Averaged (MNIST, 3 nodes): not explained."


def test_the_results_page_is_what_the_command_writes():
    """Nobody edits it by hand, and nobody forgets to write it again."""
    page = results_page.DOCS / "results.md"
    assert page.read_text() == results_page.render(results_page.MEASURED)
    assert "not explained" not in page.read_text()


def test_every_explanation_explains_something():
    for name, entries in explanations._entries().items():
        path = results_page.MEASURED / f"{name}.json"
        if not path.exists():  # not run in full yet
            continue
        notable = [e for e in compare(Findings.from_json(path.read_text())) if e.notable]
        for entry in entries:
            assert any(explanations._covers(entry, line) for line in notable), entry


# --- running ----------------------------------------------------------------------------------


@pytest.mark.deep
def test_a_reproduction_runs_resumes_and_writes_its_files(tmp_path, capsys):
    """On the digits; the second time every run is read, not made again."""
    words = [
        "gems2019_epsilon_grid",
        "--quick",
        "--dataset=digits",
        f"--output={tmp_path}",
        "--jobs=1",
    ]
    assert command.main(words) == 0
    name = "gems2019_epsilon_grid-quick-digits"
    for suffix in ("json", "csv", "png", "html"):
        assert (tmp_path / name / f"{name}.{suffix}").stat().st_size > 500
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(made) == 18
    before = json.loads((tmp_path / name / f"{name}.json").read_text())
    assert command.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == made
    after = json.loads((tmp_path / name / f"{name}.json").read_text())
    assert after["findings"] == before["findings"]
    strict = next(f for f in after["findings"] if "0.9 and 0.9" in f["setting"])
    assert strict["method"] == "radii sampled"
    assert "digits as a stand-in" in capsys.readouterr().out


def tiny(*cells):
    return Reproduction(
        name="gems2019_convex",
        paper="p",
        where="w",
        about="a",
        cells=lambda scope: cells,
        draw=lambda found: None,
        seeds=2,
        minutes=1,
        quick=(),
    )


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    base = ("dataset=digits", "nodes=3", "train.epochs=1", "strategy=gems")
    impossible = Cell(
        "digits", "impossible", (*base, "strategy/space=ball", "strategy.space.epsilon=1")
    )
    possible = Cell("digits", "possible", base)
    found = reproduce(tiny(impossible, possible), Options(tmp_path, jobs=1), QUIET)
    assert len(found.failures) == 2
    assert "digits, impossible, seed 0" in found.failures[0]
    assert found.findings[0].by_seed == [None, None]
    assert found.findings[1].missing == 0


def test_minutes_are_those_of_all_runs_even_if_most_were_finished_before(tmp_path):
    """Two runs that took ten minutes each, one after the other: 20 minutes, though read at once."""
    cell = Cell(
        "digits", "Local", ("dataset=digits", "nodes=3", "train.epochs=1", "strategy=local")
    )
    options = Options(tmp_path, jobs=1)
    assert reproduce(tiny(cell), options, QUIET).made["minutes"] < 5
    for path in tmp_path.rglob("result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 600.0}))
    again = reproduce(tiny(cell), options, QUIET)
    assert (again.made["minutes"], again.made["jobs"]) == (20.0, 1)


@pytest.mark.deep
def test_public_data_do_not_harm_the_cone_and_alone_are_worse(tmp_path):
    base = ("dataset=digits", "nodes=5", "train.epochs=5")
    methods = {
        "cone": ("strategy=gems",),
        "tuned": ("strategy=gems", "strategy.tune=100"),
        "raw": ("strategy=public_only", "strategy.tune=100", "strategy.tune_rate=0.01"),
    }
    cells = [Cell("digits", method, (*base, *words)) for method, words in methods.items()]
    found = reproduce(tiny(*cells), Options(tmp_path, jobs=1), QUIET)
    mean = {each.method: each.mean for each in found.findings}
    assert mean["tuned"] >= mean["cone"] - 0.01
    assert mean["tuned"] > mean["raw"]


@pytest.mark.deep
def test_strongly_different_beginnings_break_averaging(tmp_path):
    """The claim of Figure A.8, on digits: ε = 20 costs accuracy, most with rare averaging."""
    options = Options(tmp_path, quick=True, dataset="digits", jobs=1)
    found = reproduce(PAPERS["dynamic_initialisation"], options, QUIET)
    at = {f.setting: f.mean for f in found.findings if f.method == "periodic"}
    assert at["ε = 3, b = 1"] > 0.8 * at["ε = 0, b = 1"]
    assert at["ε = 20, b = 50"] < 0.9 * at["ε = 0, b = 50"]


@pytest.mark.deep
def test_processes_give_the_numbers_of_one(tmp_path):
    base = ("dataset=digits", "nodes=3", "train.epochs=2")
    cells = [
        Cell("digits", "Local", (*base, "strategy=local")),
        Cell("digits", "Averaged", (*base, "strategy=one_shot_average")),
    ]
    one = reproduce(tiny(*cells), Options(tmp_path / "one", jobs=1), QUIET)
    two = reproduce(tiny(*cells), Options(tmp_path / "two", jobs=2), QUIET)
    assert one.findings == two.findings


def test_missing_data_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("GEMS_FLWR_DATA", raising=False)
    cells = [
        Cell("digits", "Local", ("dataset=digits", "nodes=3", "strategy=local")),
        Cell("MNIST", "Local", ("dataset=mnist", "nodes=3", "strategy=local")),
    ]
    with pytest.raises(MissingDataError, match="--dataset digits"):
        reproduce(tiny(*cells), Options(tmp_path, data_dir=str(tmp_path), jobs=1), QUIET)
    assert not list(tmp_path.rglob("result.json"))


def test_a_burst_is_what_is_sent_after_a_drift_beside_quiet_times(tmp_path):
    """Rounds 100 … 149 send 8 bytes each, all others 2: four times as much."""
    lines = [
        {
            "round": r,
            "bytes_up": 4 if 100 <= r < 150 else 1,
            "bytes_down": 4 if 100 <= r < 150 else 1,
        }
        for r in range(300)
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run_measures.burst(tmp_path, [100]) == pytest.approx(4)
    assert run_measures.burst(tmp_path, []) is None


def test_the_bytes_of_equal_loss_lie_on_the_line_between_two_runs():
    """Between (loss 1, 100 bytes) and (loss 3, 10,000 bytes) lies (2, √(100 · 10,000) = 1,000)."""
    periodic = [(1.0, 100), (3.0, 10_000)]
    assert equal_loss.equal_loss_bytes(periodic, 2.0) == pytest.approx(1000)
    assert equal_loss.equal_loss_bytes(periodic, 4.0) is None


def test_the_grid_of_protocols_compares_bytes_at_equal_loss_and_draws_frontiers(tmp_path):
    """A quick look at three protocols on one stream with a drift."""
    grid = PAPERS["dynamic_frontiers"]
    chosen = ("b = 1", "b = 64", "total, Δ = 0.1")
    small = ("backend=lockstep", "nodes=3", "rounds=160", "evaluate_every=160")
    cells = [
        replace(cell, overrides=(*cell.overrides, *small))
        for cell in grid.cells(Scope(quick=True, stand_in=True))
        if cell.setting == "graphical models, drifts" and cell.method in chosen
    ]
    assert len(cells) == 3
    found = reproduce(replace(grid, cells=lambda scope: cells), Options(tmp_path, jobs=1), QUIET)
    assert not found.failures
    assert len(found.of("burst after drift")) == 3
    (share,) = found.of(equal_loss.AT_EQUAL_LOSS)
    assert share.method == "total, Δ = 0.1"
    assert grid.draw(found).axes[0].get_xlabel() == "MB in all, up + down"


def test_lockstep_is_another_run_and_leaves_streams_and_other_backends_alone():
    one_by_one = compose_config(["strategy=fedavg"])
    together = in_lockstep(one_by_one)
    assert together == compose_config(["strategy=fedavg", "backend=lockstep"])
    assert together.run_name() != one_by_one.run_name()
    for words in (["strategy=fedavg", "stream.batches_per_round=1"], ["backend=ray"]):
        config = compose_config(words)
        assert in_lockstep(config) == config
