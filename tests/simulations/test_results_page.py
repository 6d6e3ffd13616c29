"""The results page: a verdict for every table and figure, and claims judged by findings."""

import re

import pytest
from helpers_findings import findings

from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.papers import (
    average_claims,
    claims,
    dynamic_sentences,
    equal_loss,
    explanations,
    items,
    page_overview,
    page_sections,
    results_page,
    text_claims,
    verdicts,
)
from simulations.reproduce.papers.findings import Finding, Timeline
from simulations.reproduce.papers.items import DOES_NOT_FIT, NO_RESULT, Item, all_items
from simulations.reproduce.papers.method_kinds import method_kind

KEPT = results_page.kept_findings(results_page.MEASURED)


def judged():
    return [verdicts.judge(item, KEPT.get(item.reads)) for item in all_items()]


# --- every table and figure ---------------------------------------------------------------------


def test_everything_measured_is_used_and_every_row_has_a_reproduction_or_a_reason():
    """A check of ours is no table of a paper: once it is kept, a claim or a reason rests on it."""
    read = {item.reads for item in all_items() if item.reads}
    used = read | {claim.reads for claim in claims.CLAIMS}
    reasons = explanations.EXPLANATIONS.read_text() + items.ITEMS.read_text()
    assert [name for name in KEPT if name not in used and name not in reasons] == []
    assert read <= set(PAPERS)
    assert [item.name for item in all_items() if not item.reads and not item.says] == []


@pytest.mark.parametrize(
    ("paper", "kind", "places"),
    [
        ("GEMS 2019", "Table", [*map(str, range(1, 12))]),
        ("GEMS 2019", "Figure", ["1", "2", "3", "4", "5", "6"]),
        ("GEMS 2018", "Table", ["1", "2", "3", "4", "5"]),
        ("GEMS 2018", "Figure", ["1", "2", "3"]),
        (
            "Dynamic averaging 2018",
            "Figure",
            [
                "1.1",
                "5.1",
                "5.2",
                "5.3",
                "5.4",
                "5.5",
                "6.1",
                "6.2",
                *(f"A.{i}" for i in range(1, 9)),
            ],
        ),
        ("Slides 2025", "Table", ["1", "I"]),
    ],
)
def test_no_table_and_no_figure_of_a_source_is_left_out(paper, kind, places):
    rows = [i.where for i in all_items() if i.paper == paper and i.where.startswith(kind)]
    named = {word for row in rows for word in re.findall(r"\b(?:[A\d]\.?\d*|I)\b", row)}
    assert set(places) <= named


def test_what_differs_or_does_not_fit_says_why():
    """The lead sentence of a row is written by hand, so that it cannot be forgotten here."""
    for each in judged():
        if each.verdict in (verdicts.DIFFERS, DOES_NOT_FIT, NO_RESULT):
            assert each.item.says, f"{each.item.name} {each.verdict}: say why in items.yaml"


def test_patterns_of_rows_choose_something():
    """A misspelt pattern would judge nothing."""
    for each in judged():
        if each.found is not None:
            assert each.compared or each.claims, each.item.name


def test_claims_of_the_text_belong_to_rows():
    assert set(text_claims.CLAIMS_OF_TEXT) <= {item.name for item in all_items()}


def test_a_row_has_a_verdict_by_hand_or_by_findings_and_not_both():
    with pytest.raises(ValueError, match="no verdict by hand"):
        Item("P", "Table 1", "x", reads="gems2019_convex", verdict=NO_RESULT)
    with pytest.raises(ValueError, match="needs the reproduction"):
        Item("P", "Table 1", "x", verdict="fine")


# --- verdicts -----------------------------------------------------------------------------------


TABLE = Item("GEMS 2019", "Table 5", "x", reads="gems2019_convex", settings="^MNIST, 2")


@pytest.mark.parametrize(
    ("value", "verdict", "beyond"), [(0.78, "reproduced", 0), (0.40, "differs", 1)]
)
def test_one_number_beyond_the_spread_is_a_difference(value, verdict, beyond):
    """The paper has an average of .780 ± .015 with two nodes, and other settings are not asked."""
    found = findings(
        "gems2019_convex",
        Finding("MNIST, 2 nodes", "Averaged", "accuracy", [value, value]),
        Finding("MNIST, 3 nodes", "Averaged", "accuracy", [0.1, 0.1]),
    )
    each = verdicts.judge(TABLE, found)
    assert (each.verdict, each.printed, each.compared, each.beyond) == (verdict, 5, 1, beyond)


def test_what_was_not_run_is_said_to_be_not_run():
    assert verdicts.judge(TABLE, None).verdict == verdicts.NOT_RUN
    elsewhere = findings("gems2019_convex", Finding("MNIST, 5 nodes", "Local", "accuracy", [0.2]))
    assert verdicts.judge(TABLE, elsewhere).verdict == verdicts.NOT_RUN


def test_a_target_that_is_never_reached_differs_and_a_run_that_failed_does_not_count():
    item = Item("Slides 2025", "Table 1", "x", reads="slides_fedavg")
    never = Finding("2NN, C = 0", "IID, B = 10", "rounds", [None, None])
    each = verdicts.judge(item, findings("slides_fedavg", never))
    assert (each.verdict, each.compared, each.beyond) == ("differs", 1, 1)
    failed = findings("slides_fedavg", never, failures=["2NN, C = 0, IID, B = 10, seed 0: disk"])
    assert verdicts.judge(item, failed).verdict == verdicts.NOT_RUN


def test_a_picture_is_judged_by_what_the_text_says_of_it():
    item = next(each for each in all_items() if each.name == "GEMS 2018, Figure 2")
    for counts, verdict in (([90, 70, 70], "reproduced"), ([90, 70, 75], "differs")):
        found = findings("gems2018_neurons")
        for x, neurons in zip((0.01, 0.1, 0.5), counts, strict=True):
            found.add(Finding(f"ε_j = {x:g}", "GEMS", "hidden neurons", [float(neurons)], x=x))
        assert verdicts.judge(item, found).verdict == verdict


def test_more_is_sent_after_a_drift_than_in_quiet_times():
    """One MB per round, but three in the fifty rounds after the drift at 100: a rate of 3."""
    rounds = list(range(0, 301, 10))
    sent = [float(r + 2 * max(0, min(r - 90, 60))) for r in rounds]
    timeline = Timeline("s", "Δ = 1", rounds, sent, sent, [100])
    assert dynamic_sentences.rate_after_drifts(timeline) == pytest.approx(3)
    assert dynamic_sentences.rate_after_drifts(Timeline("s", "Δ = 1", rounds, sent, sent)) is None


def test_a_similar_loss_with_fewer_bytes_is_asked_for_every_period():
    (claim, *_) = text_claims.CLAIMS_OF_TEXT["Dynamic averaging 2018, Figures 5.1 and A.1"]
    runs = {"b = 1": (100.0, 64.0), "b = 8": (120.0, 8.0), "Δ = 0.1": (104.0, 30.0)}
    for last, holds in (((125.0, 7.0), True), ((130.0, 7.0), False), ((125.0, 7.5), False)):
        found = findings("dynamic_protocols")
        for method, (loss, sent) in (runs | {"Δ = 1": last}).items():
            found.add(Finding("100 learners", method, equal_loss.LOSS, [loss]))
            found.add(Finding("100 learners", method, equal_loss.BYTES, [sent]))
        assert claim.holds(found) is holds


# --- the top of the page ------------------------------------------------------------------------


def test_no_row_is_empty_and_each_has_its_command():
    page = page_overview.overview(KEPT)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| table, figure")]
    assert len(rows) == len(all_items())
    for row, item in zip(rows, all_items(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert all(cells), row
        assert (f"reproduce {item.reads}`" in cells[-1]) == bool(item.reads)


def test_the_hours_are_those_of_the_findings():
    """Each experiment once, though several rows share it: 30 and 60 minutes are 1.5 hours."""
    first, second = findings("gems2019_convex"), findings("gems2019_neural")
    first.made["minutes"], second.made["minutes"] = 30.0, 60.0
    page = page_overview.overview({"gems2019_convex": first, "gems2019_neural": second})
    assert "took 1.5 hours on one machine (2 cores)" in page


def test_rivals_can_be_told_from_the_paper_s_methods_and_ours():
    kinds = {m: method_kind("gems2019_convex", m) for m in KEPT["gems2019_convex"].methods()}
    assert kinds["GEMS ellipsoid"] == kinds["Global"] == "paper"
    assert kinds["GEMS cone, rank 20"] == kinds["GEMS ball"] == "ours"
    assert kinds["RegMean"] == kinds["Fisher, K-FAC"] == kinds["Softmax mean"] == "rival"
    # Tables 9 to 11 print the ensemble's numbers.
    assert method_kind("gems2019_model_size", "Majority vote") == "paper"
    assert method_kind("dynamic_protocols", "Δ = 0.7") == "paper"
    assert method_kind("dynamic_protocols", "total, Δ = 0.3") == "ours"


# --- claims -------------------------------------------------------------------------------------


def test_claims_read_findings_that_can_be_kept_and_have_names_of_their_own():
    names = [claim.name for claim in claims.CLAIMS]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)
    assert {claim.reads for claim in claims.CLAIMS} <= set(PAPERS) | set(KEPT)


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_is_judged_and_drawn_from_what_is_kept(claim):
    if claim.reads not in KEPT:
        pytest.skip("not measured yet")
    assert claim.found(KEPT[claim.reads]).endswith(".")
    assert claim.draw(KEPT[claim.reads]).axes
    page = page_sections.claims_section(KEPT)
    assert f"### {claim.paper}: {claim.statement}" in page
    assert f"    {claim.command}\n" in page
    assert f"(results/{claim.picture})" in page


def test_a_claim_that_was_not_measured_is_named_as_such():
    page = page_sections.claims_section({})
    assert "Not measured in full yet" in page
    assert "![" not in page


@pytest.mark.parametrize(("ours", "count"), [(0.5, "2 of 2"), (0.51, "1 of 2")])
def test_gems_is_the_average_if_it_is_as_good_in_every_seed(ours, count):
    found = findings("gems2019_convex")
    for setting, value in (("MNIST, 2 nodes", 0.5), ("MNIST, 3 nodes", ours)):
        found.add(Finding(setting, "Averaged", "accuracy", [0.5, 0.5]))
        found.add(Finding(setting, "GEMS ellipsoid", "accuracy", [0.5, value]))
    said = average_claims.found(found)
    assert f"GEMS ellipsoid has the accuracy of the average to a thousandth in {count}" in said
    assert ("+0.005" in said) == (count == "1 of 2")
