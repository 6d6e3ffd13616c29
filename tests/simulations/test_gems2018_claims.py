"""The claim about GEMS 2018: said and drawn from findings, and silent where they are missing."""

import matplotlib.pyplot as plt
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from simulations.reproduce.papers import gems2018, gems2018_claims
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.spec import Scope


def some_findings(*left_out):
    found = Findings("gems2018_factors", False, False, [0, 1], [])
    figures = {"Side by side": 0.82, "GEMS": 0.71, "GEMS, second round": 0.5}
    for epochs in (1, 10):
        for method, value in figures.items():
            found.add(
                Finding(f"epochs: {epochs}", method, "accuracy", [value, value + 0.02], x=epochs)
            )
    found.add(Finding("epochs: 1", "GEMS", "hidden neurons", [66.0, 68.0], x=1))
    found.add(Finding("all pairs that meet", "GEMS", "hidden neurons", [879.0, 881.0]))
    found.add(Finding("all pairs that meet", "GEMS", "accuracy", [0.74, 0.74]))
    found.findings = [f for f in found.findings if (f.setting, f.method) not in left_out]
    return found


def test_the_claim_has_the_figures_that_were_found():
    said = gems2018_claims.found(some_findings())
    for figure in ("0.830 ± 0.014", "0.720", "0.510", "10 epochs", "67", "880"):
        assert figure in said


@pytest.mark.parametrize("method", ["Side by side", "GEMS", "GEMS, second round"])
def test_nothing_is_claimed_where_a_run_is_missing(method):
    assert gems2018_claims.found(some_findings(("epochs: 1", method))) == ""
    assert gems2018_claims.found(Findings("gems2018_factors", False, False, [], [])) == ""


def test_it_is_drawn_from_the_same_findings():
    figure = gems2018_claims.draw(some_findings())
    upper, lower = figure.axes[:2]
    drawn = [line for line in upper.get_lines() if len(line.get_xdata()) == 2]
    assert drawn
    assert lower.get_xlabel() == "test accuracy at one epoch"
    plt.close(figure)


def test_the_factors_have_what_the_claim_reads():
    cells = {(cell.setting, cell.method) for cell in gems2018._factors(Scope())}
    for method in ("Side by side", "GEMS", "GEMS, second round"):
        assert (gems2018_claims.BASE, method) in cells
    assert ("all pairs that meet", "GEMS") in cells


def test_learners_that_train_longer_know_their_own_data_better_and_add_up_to_less():
    """The smallest experiment behind the claim: digits, and digits with permuted pixels.

    Side by side two networks' logits add up (tests/strategies/test_outgoing_head.py). Each
    learner's grow as it trains, on data that it has never seen as on its own.
    """
    digits = load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=generator)
    inputs = torch.tensor(digits.data).float()[order] / 16
    labels = torch.tensor(digits.target)[order]
    both = [inputs, inputs[:, torch.randperm(64, generator=generator)]]
    held_out = torch.cat([each[1400:] for each in both])
    own: dict[int, list[float]] = {300: [], 1500: []}
    logits = dict.fromkeys(own, torch.zeros(1))
    for learner, mine in enumerate(both):
        torch.manual_seed(learner + 1)
        model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        for step in range(1, 1501):
            batch = torch.randint(0, 1400, (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(mine[batch]), labels[batch]).backward()
            optimizer.step()
            if step in own:
                found = model(mine[1400:]).argmax(1) == labels[1400:]
                own[step].append(float(found.float().mean()))
                logits[step] = logits[step] + model(held_out).detach()
    right = labels[1400:].repeat(2)
    short, long = (float((each.argmax(1) == right).float().mean()) for each in logits.values())
    assert min(own[1500]) > max(own[300])
    assert long < short - 0.1
