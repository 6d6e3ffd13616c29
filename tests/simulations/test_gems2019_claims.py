"""Claims about GEMS 2019: sentences and pictures come from findings; some runs are made again."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from simulations.command_line import UsageError
from simulations.config import compose_config
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.entry import Options
from simulations.reproduce.papers import gems2019_checks, run_again
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.gems2019_check_figures import (
    draw_neuron_sizes,
    draw_output_layers,
    draw_points,
    found_neuron_sizes,
    found_output_layers,
    found_points,
)
from simulations.reproduce.papers.gems2019_claims import (
    CLAIMS,
    found_average,
    found_radii,
    found_tuning,
)
from simulations.reproduce.papers.runner import reproduce
from simulations.reproduce.papers.space_sweep import config_of
from simulations.reproduce.papers.spec import Scope
from simulations.run import run

QUIET = Console(quiet=True)

MADE = {"commit": "abc", "date": "2026-01-01", "minutes": 1.0}


def findings(name, *parts, **made):
    return Findings(name, False, False, [0, 1], list(parts), made=MADE | made)


def averages(epsilon, method, values, is_average, empty):
    setting = f"MNIST, 5 nodes, ε = {epsilon:g}"
    return [
        Finding(setting, method, quantity, numbers, x=epsilon)
        for quantity, numbers in (
            ("accuracy", values),
            ("is average", is_average),
            ("empty", empty),
        )
    ]


def test_the_first_epsilon_at_which_one_seed_is_not_the_average_is_named():
    found = findings(
        "gems2019_spaces",
        *averages(0.4, "GEMS ball", [0.4, 0.42], [1, 1], [0, 0]),
        *averages(0.7, "GEMS ball", [0.3, 0.42], [0, 1], [0, 0]),
        *averages(0.9, "GEMS ball", [0.2, 0.22], [0, 0], [1, 1]),
    )
    text = found_average(found)
    assert "in all 2 seeds, up to ε = 0.4; at ε = 0.7 it is not, and has 0.360 ± 0.085" in text
    assert text.endswith("no common model from ε = 0.9 on.")


def radii():
    setting = "MNIST, 5 nodes, ε = 0.4"
    parts = [Finding(setting, "radii worst", "empty", [1, 1])]
    for node in range(5):
        parts += [
            Finding(setting, "radii sampled", f"radius of node {node}", [40.0, 60.0]),
            Finding(setting, "radii worst", f"radius of node {node}", [2.0, 2.0]),
            Finding(setting, "radii sampled", f"accuracy of node {node}", [0.1 * node, 0.9]),
        ]
    found = findings("gems2019_spaces", *parts)
    PAPERS["gems2019_spaces"].derive(found)
    return found


def test_radii_are_compared_node_by_node_and_seed_by_seed():
    """40 and 60 beside 2: 20 and 30 times, 25 on average; 0, .1, .2, .3 are below .4."""
    text = found_radii(radii())
    assert "are 20 to 30 times" in text
    assert "(mean 25)" in text
    assert "of 10 nodes, which were all promised 0.4, 4 get less, the worst 0.000" in text
    assert "no common model, which is proved" in text


def test_the_gain_of_tuning_is_told_beside_the_papers():
    gain = "gain with 100 samples"
    found = findings(
        "gems2019_tuning",
        Finding("all, as released", "over raw", gain, [0.1, 0.2]),
        Finding("all, equal rates of 0.01", "over raw", gain, [0.05, 0.05]),
    )
    text = found_tuning(found)
    assert "0.150 ± 0.071 as released, 0.050 ± 0.000 at equal rates of 0.01" in text
    assert "the paper: 0.226" in text


def examples(name):
    if name == "gems2019_spaces":
        parts = averages(0.4, "GEMS ball", [0.4, 0.42], [1, 1], [0, 0])
        parts += averages(0.9, "GEMS ball", [0.3, 0.2], [0, 0], [1, 1])
        return findings(name, *parts, *radii().findings)
    if name == "gems2019_ellipsoids":
        return points()
    gain = "gain with 100 samples"
    return findings(name, Finding("all, as released", "over raw", gain, [0.1, 0.2]))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_reads_an_experiment_and_has_a_picture(claim):
    assert claim.experiment in PAPERS
    found = examples(claim.experiment)
    assert claim.found(found).endswith(".")
    assert claim.draw(found).axes


def points():
    setting, base = "HAM10000, 5 nodes", "balanced accuracy"
    return findings(
        "gems2019_ellipsoids",
        Finding(setting, "GEMS ellipsoid", base, [0.4, 0.5]),
        Finding(setting, "GEMS ellipsoid", f"{base} of the average", [0.2, 0.2]),
        Finding(setting, "GEMS ellipsoid", f"{base} by descent on Eq. 2", [0.3, 0.3]),
        Finding(setting, "GEMS ellipsoid", "largest level of the average", [1.5, 1.7]),
    )


def test_points_of_ellipsoids_are_told_and_drawn_beside_the_papers():
    found = points()
    text = found_points(found)
    assert "average 0.200 ± 0.000, ours 0.450 ± 0.071, released descent 0.300 ± 0.000" in text
    assert "(level of the average 1.60)" in text
    (axes,) = draw_points(found).axes
    assert {"paper: average", "paper: GEMS"} <= set(axes.get_legend_handles_labels()[1])


def test_sizes_of_merged_layers_are_drawn_beside_the_papers():
    cells = PAPERS["gems2019_neuron_sizes"].cells(Scope())
    parts = [
        Finding(c.setting, c.method, quantity, values, x=c.x)
        for c in cells
        for quantity, values in (("hidden neurons", [200, 210]), (c.reads[1], [0.5, 0.5]))
    ]
    found = findings("gems2019_neuron_sizes", *parts)
    figure = draw_neuron_sizes(found)
    drawn = [line.get_xydata() for axes in figure.axes for line in axes.lines]
    assert any([0.3, 379.6] in points.tolist() for points in drawn)
    assert any([0.07, 161.6] in points.tolist() for points in drawn)
    text = found_neuron_sizes(found)
    assert "CIFAR-10, 5 nodes, ε_j = 0.3: 205 neurons, 0.500 ± 0.000" in text


def test_output_layers_are_listed_and_drawn():
    setting, (first, second, *_) = "CIFAR-10, 5 nodes", gems2019_checks.STARTS
    found = findings(
        "gems2019_output_layer",
        Finding(setting, first, "accuracy", [0.4, 0.44]),
        Finding(setting, second, "accuracy", [0.2, 0.2]),
    )
    assert found_output_layers(found).startswith(f"{setting}: {first} 0.420 ± 0.028, {second} 0.2")
    assert draw_output_layers(found).axes


def finished(name, folder):
    options = Options(output=folder, dataset="digits", seeds=1, jobs=1)
    return reproduce(PAPERS[name], options, QUIET)


def test_swept_spaces_are_those_of_whole_runs(tmp_path):
    """Radii at the run's own ε are the run's to the last bit, and so is the model."""
    found = finished("gems2019_spaces", tmp_path)
    assert found.failures == []
    (path,) = tmp_path.glob("runs/*/*/result.json")
    result = json.loads(path.read_text())
    setting = "MNIST, 5 nodes, ε = 0.4"
    for node, radius in result["details"]["radii"].items():
        swept = found.get(setting, "radii sampled", f"radius of node {node}")
        assert swept.values == [radius["value"]]
    swept = found.get(setting, "GEMS ball", "accuracy")
    assert swept.values == [pytest.approx(result["accuracy"], abs=1e-9)]
    assert found.get(setting, "GEMS ball", "is average").values == [1.0]
    config = config_of(path.parent)
    words = ["strategy=gems", "strategy/space=ellipsoid", "strategy.space.labels=sampled"]
    words += ["strategy.space.fisher_samples=200", "experiment=gems2019_convex", "dataset=digits"]
    other = run(compose_config([*words, f"nodes={config.nodes}"]), tmp_path / "one", QUIET)
    for node, radius in other["details"]["radii"].items():
        swept = found.get(setting, "GEMS ellipsoid", f"radius of node {node}")
        assert swept.values == [radius["value"]]
    factor = found.get(setting, "sampled / worst", "radius of node 0")
    assert factor.mean > 1


def test_the_points_of_ellipsoids_come_from_the_spaces_that_runs_keep(tmp_path):
    found = finished("gems2019_ellipsoids", tmp_path)
    assert found.failures == []
    for setting in found.settings():
        level = found.get(setting, "GEMS ellipsoid", "largest level of the average").mean
        is_average = found.get(setting, "GEMS ellipsoid", "is average").mean
        assert (level <= 1) == bool(is_average)
        if is_average:
            points = [found.get(setting, "GEMS ellipsoid", "accuracy").mean]
            for what in ("of the average", "by descent on Eq. 2"):
                points.append(found.get(setting, "GEMS ellipsoid", f"accuracy {what}").mean)
            assert max(points) == pytest.approx(min(points), abs=1e-9)


# --- running some of an experiment again --------------------------------------------------------


def test_what_is_run_again_takes_its_place_and_the_rest_stays():
    whole = PAPERS["gems2019_tuning"]
    settings = list(dict.fromkeys(each.setting for each in whole.cells(Scope())))
    method = "GEMS, rate 0.01"
    old = [
        Finding(setting, name, "accuracy", [value, value])
        for setting in settings[:2]
        for name, value in ((method, 0.5), ("raw, rate 0.01", 0.3), ("raw, rate 0.001", 0.2))
    ]
    kept = findings(whole.name, *old)
    whole.derive(kept)
    new = findings(whole.name, Finding(settings[0], method, "accuracy", [0.7, 0.8]), commit="def")
    joined = run_again.join(whole, kept, new, {"only": "GEMS"})
    assert joined.get(settings[0], method, "accuracy").by_seed == [0.7, 0.8]
    assert joined.get(settings[1], method, "accuracy").by_seed == [0.5, 0.5]
    assert joined.get(settings[0], "raw, rate 0.01", "accuracy").by_seed == [0.3, 0.3]
    # Derived anew, and once: .7 − .2 and .8 − .2 where .5 − .2 was.
    gains = [f for f in joined.findings if f.method == "over raw" and f.setting.endswith("leased")]
    assert len(gains) == 1
    assert gains[0].by_seed == pytest.approx([0.5, 0.6])
    assert joined.made["again"] == [{"only": "GEMS", "seeds": 2} | MADE | {"commit": "def"}]
    assert joined.made["commit"] == "abc"


def test_runs_that_are_not_kept_or_of_other_seeds_are_refused():
    whole = PAPERS["gems2019_convex"]
    cell = whole.cells(Scope())[0]
    kept = findings(whole.name, Finding(cell.setting, cell.method, "accuracy", [1.0, 1.0]))
    other = findings(whole.name, Finding("Mars", cell.method, "accuracy", [1.0, 1.0]))
    with pytest.raises(UsageError, match="not among what is kept"):
        run_again.join(whole, kept, other, {})
    with pytest.raises(UsageError, match="run the whole"):
        run_again.join(whole, kept, replace(kept, seeds=[1]), {})
    fewer = findings(whole.name, Finding(cell.setting, cell.method, "accuracy", [0.5]))
    joined = run_again.join(whole, kept, replace(fewer, seeds=[0]), {})
    assert joined.findings[0].by_seed == [0.5]
    assert joined.made["again"][0]["seeds"] == 1
    with pytest.raises(UsageError, match="no runs of gems2019_convex match"):
        run_again.only(whole, "GEMS", "Mars")
    some = run_again.only(whole, "^GEMS ellipsoid", "HAM").cells(Scope())
    assert {each.setting.split(",")[0] for each in some} == {"HAM10000"}
    assert {each.method for each in some} == {"GEMS ellipsoid", "GEMS ellipsoid, tuned"}
