"""The frontier: rows that exist are run, with options that validation data chose."""

import csv

import pytest
from matplotlib.text import Annotation
from rich.console import Console

from simulations.report.byte_curves import ByteCurve, CurvePoint
from simulations.report.frontier_plot import draw_frontier, family_styles
from simulations.reproduce.__main__ import main
from simulations.reproduce.studies import frontier_tuning
from simulations.reproduce.studies.frontier import _take_rounds, collect, write_frontier
from simulations.reproduce.studies.frontier_methods import (
    CONES,
    FAMILIES,
    FLOWER,
    METHODS,
    PEERS,
    RIVALS,
    FrontierMethod,
)
from simulations.reproduce.studies.frontier_tuning import Tuning

DIGITS = ("dataset=digits", "nodes=3", "progress=false", "train.epochs=1")
FEW = (
    FrontierMethod("FedAvg", FLOWER, ("strategy=fedavg",)),
    FrontierMethod("average", PEERS, ("strategy=one_shot_average",)),
    FrontierMethod("cone", CONES, ("strategy=gems",)),
    FrontierMethod("nowhere", CONES, ("strategy=gems", "strategy.no_such_option=1")),
    FrontierMethod("no lift", CONES, ("strategy=gems", "model=no_such_model")),
)


def test_methods_are_run_once_and_what_does_not_exist_is_left_out(tmp_path):
    quiet = Console(quiet=True)
    ceilings = {"pooled": ("strategy=global",)}
    found = collect(FEW, ceilings, DIGITS, 3, tmp_path / "runs", quiet)
    assert [curve.name for curve in found.curves] == ["FedAvg", "average", "cone"]
    assert [len(curve.points) for curve in found.curves] == [3, 1, 1]
    assert found.left_out.keys() == {"nowhere", "no lift"}
    assert found.ceilings["pooled"] > 0.9
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert collect(FEW, ceilings, DIGITS, 3, tmp_path / "runs", quiet) == found
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}

    page = write_frontier(found, tmp_path, quiet)
    assert "pooled" in page.read_text()
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "frontier.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["round"]) for row in rows if row["family"] == FLOWER] == [
        ("FedAvg", "1"),
        ("FedAvg", "2"),
        ("FedAvg", "3"),
    ]


class Tried(Tuning):
    """A tuning whose candidates are scored by a rule instead of a run."""

    def __init__(self, tmp_path, rule):
        super().__init__(("dataset=digits",), 2, tmp_path, Console(quiet=True))
        self.rule, self.seen = rule, []

    def _score(self, config):
        self.seen.append(config)
        return self.rule(config)


def test_the_best_on_validation_data_is_chosen_from_the_grid(tmp_path):
    def rule(config):
        train, inner = config.train, config.strategy.get("inner", {})
        closeness = abs(train["lr"] - 0.3) + abs(inner.get("eta", 0.1) - 0.1)
        return 1 - closeness - 0.01 * train["epochs"] - 1e-6 * train["batch_size"]

    tuning = Tried(tmp_path, rule)
    fedadam = next(method for method in METHODS if method.name == "FedAdam")
    local = ("train.lr=0.3", "train.batch_size=64", "train.epochs=1")
    assert tuning.options_for(fedadam) == (*local, "strategy.inner.eta=0.1")
    # Nobody's results are made with this seed, and no test score is looked at on the way.
    assert {config.seed for config in tuning.seen} == {frontier_tuning.SEED}
    assert {config.rounds for config in tuning.seen} == {2}
    before = len(tuning.seen)
    fedavg = next(method for method in METHODS if method.name == "FedAvg")
    assert tuning.options_for(fedavg) == local
    assert len(tuning.seen) == before


@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "SCAFFOLD"])
def test_every_member_of_the_family_has_its_learning_rate_tuned(tmp_path, name):
    method = next(method for method in METHODS if method.name == name)
    tuning = Tried(tmp_path, lambda config: -abs(config.train["lr"] - 0.1))
    options = tuning.options_for(method)
    assert "train.lr=0.1" in options
    own = [t for t in tuning.trials if t.method == name]
    assert len({next(o for o in t.options if o.startswith("train.lr")) for t in own}) >= 3


def test_a_candidate_is_scored_on_the_nodes_validation_parts(tmp_path):
    """One that does not learn is right for about a tenth, one that learns for most."""
    tuning = Tuning(("dataset=digits", "nodes=3"), 3, tmp_path, Console(quiet=True))
    for method in (METHODS[0], next(m for m in METHODS if m.name == "SCAFFOLD")):
        tuning._best(method.name, method.overrides, [("train.lr=1e-6",), ("train.lr=0.3",)])
    for poor, good in (tuning.trials[:2], tuning.trials[2:]):
        assert poor.accuracy < 0.3 < 0.6 < good.accuracy


def test_rounds_are_for_the_family_alone():
    assert _take_rounds(["rounds=7", "nodes=3"]) == (7, ["nodes=3"])
    assert _take_rounds(["nodes=3"])[0] == 200
    with pytest.raises(ValueError, match="rounds must be a whole number"):
        _take_rounds(["rounds=many"])


def test_names_in_the_picture_do_not_cover_each_other():
    """Twenty methods, some of which end at the same place."""
    families = FAMILIES[:4]
    curves = [
        ByteCurve(
            f"method {number}",
            families[number % 4],
            (CurvePoint(1, 3e4 * 1.3 ** (number // 2), 0.8 + 0.009 * number),),
        )
        for number in range(20)
    ]
    figure = draw_frontier(
        curves, {"pooled": 0.95}, family_styles(families, RIVALS), subtitle="made up"
    )
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    names = [
        text.get_window_extent(renderer)
        for text in figure.axes[0].texts
        if isinstance(text, Annotation) and text.get_text().startswith(("method", "pooled"))
    ]
    assert len(names) == 21
    for number, box in enumerate(names):
        assert not any(box.overlaps(other) for other in names[:number])


def test_models_that_end_at_one_place_share_a_name():
    same = [ByteCurve(name, FLOWER, (CurvePoint(1, 1e5, 0.9),)) for name in ("one", "other")]
    figure = draw_frontier(same, {}, family_styles(FAMILIES, RIVALS), subtitle="")
    assert "one, other .900" in [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.deep
def test_the_whole_study_runs_on_digits(tmp_path, capsys):
    assert main(["frontier", "--dataset", "digits", "--quick", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "frontier-quick" / "frontier.png").is_file()
    assert (tmp_path / "frontier-quick" / "frontier.html").is_file()
    assert "At equal accuracy" in capsys.readouterr().out
