"""The slides' FedAvg table: rates that are searched, cells that fit, what is said of them."""

import json

import numpy as np
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from simulations.config import compose_config
from simulations.experiment.experiment import Experiment
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.entry import Options
from simulations.reproduce.papers import fedavg_cells, runner, slides2025, slides_claims
from simulations.reproduce.papers.fedavg_cells import TableCell, chosen_rate, grid_rate
from simulations.reproduce.papers.findings import Finding, Findings, published
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope
from simulations.reproduce.papers.table_figures import rounds_bars
from simulations.reproduce.studies import fedavg_causes, fedavg_rates
from simulations.reproduce.studies.fedavg_rates import climb

QUIET = Console(quiet=True)


@pytest.mark.parametrize("start", [-6, 0, 2, 6])
@pytest.mark.parametrize("peak", [-2, 0, 3])
def test_a_search_ends_with_the_best_between_two_worse_neighbours(start, peak):
    tried = climb(lambda step: -abs(step - peak), start, most=20)
    assert max(tried, key=tried.get) == peak
    assert {peak - 1, peak, peak + 1} <= set(tried)
    # Walks from the start to the peak, one step beyond, and one to look the other way.
    assert len(tried) <= abs(start - peak) + 3


def test_a_search_gives_up_after_so_many_candidates():
    assert sorted(climb(float, 0, most=4)) == [0, 1, 2, 3]


def test_three_rates_of_the_grid_make_a_decade():
    assert grid_rate(-3) == pytest.approx(0.1)
    assert grid_rate(1) / grid_rate(-2) == pytest.approx(10)


def test_rates_of_the_table_are_those_with_the_best_validation_accuracy():
    """And between two that were worse: McMahan et al. want the best not at the grid's edge."""
    assert fedavg_cells.kept()
    for name, entry in fedavg_cells.kept().items():
        found = entry["validation accuracy"]
        assert entry["rate"] == max(found, key=found.get), name
        assert min(found) < entry["rate"] < max(found), name
        assert entry["bracketed"]


def test_a_cell_has_the_rate_of_the_nearest_that_was_searched(monkeypatch):
    table = {
        "2NN, C = 0 | IID, B = 10": {"rate": 0.1},
        "2NN, C = 0.1 | IID, B = 10": {"rate": 0.2},
        "2NN, C = 0 | non-IID, B = 10": {"rate": 0.3},
    }
    monkeypatch.setattr(fedavg_cells, "kept", lambda: table)
    assert chosen_rate(TableCell.at("2NN, C = 0", "IID, B = 10")) == 0.1
    assert chosen_rate(TableCell.at("2NN, C = 0.5", "IID, B = 10")) == 0.2
    assert chosen_rate(TableCell.at("2NN, C = 0.5", "non-IID, B = 10")) == 0.3
    with pytest.raises(KeyError, match="CNN, C = 0, IID, B = 10"):
        chosen_rate(TableCell.at("CNN, C = 0", "IID, B = 10"))


def test_rates_are_searched_without_the_test_data_and_without_a_target():
    for search in fedavg_rates.SEARCHES:
        config = fedavg_rates._config(search, search.start, ["dataset=digits"])
        assert config.evaluate_on == "validation"
        assert config.stop.target is None
        assert config.seed not in range(slides2025.REPRODUCTIONS[0].seeds)
    assert len(Experiment(config).held_out) > 0


def test_a_search_writes_the_table_that_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(fedavg_rates, "SEARCHES", fedavg_rates.SEARCHES[:1])
    path = fedavg_rates.run(["dataset=digits", "rounds=2"], tmp_path, QUIET)
    ((name, entry),) = OmegaConf.to_container(OmegaConf.load(path)).items()
    assert name in fedavg_cells.kept()
    assert entry.keys() == fedavg_cells.kept()[name].keys()
    assert entry["rounds"] == 2
    assert all(0 < accuracy < 1 for accuracy in entry["validation accuracy"].values())


def test_causes_are_runs_that_differ_in_one_thing(tmp_path, monkeypatch):
    monkeypatch.setattr(fedavg_causes, "SLOWER", (3,))
    path = fedavg_causes.run(["dataset=digits", "rounds=1", "stop.target=0"], tmp_path, QUIET, [0])
    found = json.loads(path.read_text())
    assert found.keys() == fedavg_causes.variants().keys()
    # A target of 0 is met at once, and by runs of their own.
    assert all(values == [0.0] for values in found.values())
    assert len(list(tmp_path.rglob("result.json"))) == len(found)


@pytest.mark.parametrize(
    ("setting", "column", "rounds", "seconds"),
    [
        # 10 clients with 5 passes of 0.9 s each, and a look of 4.2 s.
        ("CNN, C = 0.1", "IID, B = 10", 1, 10 * 5 * 0.9 + 4.2),
        ("2NN, C = 0", "non-IID, B = ∞", 100, 100 * (0.0125 + 0.065)),
    ],
)
def test_what_a_cell_takes_is_clients_passes_and_looks(setting, column, rounds, seconds):
    assert TableCell.at(setting, column).minutes(rounds) * 60 == pytest.approx(seconds)


def test_cells_that_are_not_run_are_named_with_what_they_take():
    left = slides2025.not_run()
    assert len(left) + len(slides2025._rows(Scope())) == len(published(slides2025.NAME))
    assert all(each.endswith(("minutes)", "hours)")) for each in left)
    assert all(each in slides2025.REPRODUCTIONS[0].scaled for each in left)


def test_all_examples_are_trained_on_but_one_of_each_client():
    cell = slides2025._rows(Scope(stand_in=True))[0]
    words = PAPERS[slides2025.NAME].overrides(cell, Scope(stand_in=True), 0)
    experiment = Experiment(compose_config(words))
    assert len(experiment.dataset.public) == 0
    assert {len(share.validation) for share in experiment.shares} == {1}


# --- seeds of a cell ---------------------------------------------------------------------------


def reproduction(**more):
    cells = [Cell("cheap", "A", ("rounds=1",)), Cell("dear", "A", ("rounds=2",), seeds=1)]
    return Reproduction(
        name="none",
        paper="",
        where="",
        about="",
        cells=lambda scope: cells,
        draw=rounds_bars,
        seeds=3,
        minutes=1,
        quick=(),
        **more,
    )


def test_a_dear_cell_has_fewer_seeds_unless_they_are_asked_for(tmp_path):
    def played(options):
        jobs = runner._jobs(reproduction(), list(reproduction().seeds_of(options)), options)
        return [(cell.setting, job.seed) for job in jobs for cell in job.cells]

    assert played(Options(tmp_path)) == [("cheap", 0), ("dear", 0), ("cheap", 1), ("cheap", 2)]
    assert ("dear", 1) in played(Options(tmp_path, seeds=2))


def test_training_is_kept_on_disk_only_where_runs_share_it(tmp_path):
    for remembers in (True, False):
        options = Options(tmp_path / str(remembers), seeds=1)
        entry = reproduction(remembers=remembers)
        jobs = list(runner._jobs(entry, [0], options))
        outcome = runner._work(jobs[0])
        assert not outcome.failures
        assert (options.output / runner.TRAINED).exists() == remembers


# --- what is said and drawn ---------------------------------------------------------------------


def found(*cells):
    parts = [Finding(setting, column, "rounds", values) for setting, column, values in cells]
    return Findings(slides2025.NAME, False, False, [0, 1], parts)


def test_the_claim_has_ratios_and_the_gain_of_ten_clients():
    """Published are 316 and 87: ours are half of the one and twice the other."""
    said = slides_claims.fedavg_found(
        found(
            ("2NN, C = 0", "IID, B = 10", [158.0, 158.0]),
            ("2NN, C = 0.1", "IID, B = 10", [174.0]),
            ("2NN, C = 0.1", "non-IID, B = 10", [None]),
        )
    )
    assert "in 2 of 3 cells" in said
    assert "0.50 to 2.00 times" in said
    assert "a factor of 0.9 (IID, B = 10; the paper 3.6)" in said


def test_pictures_have_a_bar_for_ours_and_one_for_the_papers_and_say_what_is_not_reached():
    findings = found(
        ("2NN, C = 0", "IID, B = 10", [158.0, 300.0]), ("2NN, C = 1", "IID, B = 10", [None])
    )
    (axes,) = rounds_bars(findings).axes
    widths = {bar.get_width() for bar in axes.patches}
    assert {316, 70, np.mean([158, 300])} <= widths
    assert any("1 of 1 seeds not reached" in text.get_text() for text in axes.texts)
    (axes,) = slides_claims.fedavg_draw(findings).axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
