"""Sampling rules are values: what one class says is all that the rest needs to know."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from helpers_multi_model import (
    DataSampling,
    Watching,
    examples_of,
    initial,
    pull,
    pulling_app,
    start_models,
)

from gems_flwr.client_sampling import data_shares, draw_assignment, optimal_probabilities
from gems_flwr.errors import OptionError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.members import split_models
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.strategies.multi_model.sampling_base import LOSSES, NORMS, SamplingRule
from gems_flwr.strategies.multi_model.sampling_rules import (
    RULES,
    FedVarp,
    FullParticipation,
    LossSampling,
    Mifa,
    NormSampling,
    ResidualSampling,
    Scaffold,
    sampling_rule,
)
from gems_flwr.wire.records import to_numpy

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("a", "b")


def counts(nodes=6):
    return np.array([[examples_of(node).get(m, 0) for m in MODELS] for node in range(nodes)])


def play(rule, rounds=1, grid=None, **options):
    grid = grid or InProcessGrid(pulling_app(), 6)
    return MultiModel(sampling=rule, **options).start(grid, initial(), num_rounds=rounds)


def final(result):
    return {m: arrays["w"] for m, arrays in split_models(to_numpy(result.arrays)).items()}


# --- rules of one's own, none of which the library has ------------------------------------------


def test_a_rule_with_an_importance_of_its_own_is_drawn_and_applied_by_it():
    """One round by hand: p by the shares of the data, the same draw, w − Σ (d/p) U."""
    result = play(DataSampling(), budget=4, seed=5)
    shares = data_shares(counts())
    p = optimal_probabilities(shares, 4, 2)
    drawn = draw_assignment(p, generator(5, "assign", 1))
    assert 0 < drawn.sum() < 11
    for s, model in enumerate(MODELS):
        w = start_models()[model]["w"]
        chosen = np.flatnonzero(drawn[:, s])
        step = sum((shares[i, s] / p[i, s] * pull(i, model, w) for i in chosen), np.zeros_like(w))
        assert final(result)[model] == pytest.approx(w - step)
    assert result.details["sampling"] == "DataSampling"


class MostWrong(SamplingRule):
    """The node with the largest loss of a model trains it, for certain, and counts alone."""

    name = "most wrong"
    question = LOSSES
    has_budget = False

    def importance(self, shares, answers, available):
        return np.where(available, answers, -1.0) == answers.max(axis=0)

    def probabilities(self, importance, budget, capacity):
        return importance

    def coefficients(self, shares, probabilities, drawn):
        return drawn.astype(float)


def test_a_rule_may_ask_for_losses_and_say_what_a_pair_counts_for():
    """The loss is ‖U‖, largest for node 5 as it is farthest off: each round is its step alone."""
    grid = Watching(pulling_app(), 6)
    result = play(MostWrong(), rounds=1, grid=grid)
    for model in MODELS:
        w = start_models()[model]["w"]
        sizes = [np.linalg.norm(pull(i, model, w)) for i in range(6) if model in examples_of(i)]
        worst = int(np.argmax(sizes)) + (model == "b")
        assert final(result)[model] == pytest.approx(w - pull(worst, model, w))
    assert {action for _, _, action, _ in grid.seen} == {"introduce", "losses", "train"}
    assert result.details["sampling"] == "most wrong"


class HalfSteps(FullParticipation):
    """Full participation with a server learning rate of ½."""

    def step(self, model, trained, coefficients, shares, old, betas):
        whole = super().step(model, trained, coefficients, shares, old, betas)
        half = {key: (model[key] + whole[key]) / 2 for key in model}
        return {key: array.astype(model[key].dtype) for key, array in half.items()}


def test_a_rule_may_say_what_a_step_is():
    whole, half = final(play(FullParticipation())), final(play(HalfSteps()))
    for model in MODELS:
        assert half[model] == pytest.approx(whole[model] / 2)
    assert HalfSteps.name == "HalfSteps"


class RememberedNorms(NormSampling):
    """GVR whose server takes half of an old update for a guess of the new one."""

    keeps_updates = True

    def beta(self, reported):
        return 0.5


def test_a_rule_may_keep_old_updates_and_say_how_much_of_them_counts():
    """Two rounds by hand: w − Σ_all d h/2 − Σ_drawn (d/p) (U − h/2)."""
    result = play(RememberedNorms(), rounds=2, budget=5, seed=2)
    shares, old = data_shares(counts()), {}
    w = {m: start_models()[m]["w"] for m in MODELS}
    for number in (1, 2):
        updates = {(i, m): pull(i, m, w[m]) for i in range(6) for m in MODELS}
        norms = np.array([[np.linalg.norm(updates[i, m]) for m in MODELS] for i in range(6)])
        p = optimal_probabilities(shares * norms, 5, 2)
        drawn = draw_assignment(p, generator(2, "assign", number))
        for s, m in enumerate(MODELS):
            step = np.zeros_like(w[m])
            for i in range(6):
                guess = old.get((i, m), 0) * np.full_like(w[m], 0.5)
                step += shares[i, s] * guess
                if drawn[i, s]:
                    step += shares[i, s] / p[i, s] * (updates[i, m] - guess)
            w[m] = w[m] - step
        old |= {(i, m): updates[i, m] for i, s in np.argwhere(drawn) for m in [MODELS[s]]}
    for m in MODELS:
        assert final(result)[m] == pytest.approx(w[m])


# --- the library's rules -----------------------------------------------------------------------


def test_a_name_stands_for_a_rule_with_its_defaults():
    assert list(RULES) == [
        "random",
        "full",
        "lvr",
        "gvr",
        "stale",
        "fedvarp",
        "mifa",
        "scaffold",
    ]
    for name, kind in RULES.items():
        assert MultiModel(sampling=name).rule == kind()
        assert MultiModel(sampling=kind()).rule.name == name
    rule = LossSampling(floor=0.5)
    assert sampling_rule(rule) is rule


@pytest.mark.parametrize("kind", RULES.values(), ids=list(RULES))
def test_a_rule_is_a_frozen_value_that_says_what_it_is(kind):
    assert kind() == kind()
    assert len(kind.__doc__) > 60
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().floor = 0.3


def test_unknown_names_and_values_are_refused_with_what_there_is():
    for wrong in ("best", "LVR", 3, {"floor": 0.1}, LossSampling):
        with pytest.raises(ValueError, match=r"one of \['random', .*\], or a SamplingRule, got"):
            MultiModel(sampling=wrong)
    with pytest.raises(ValueError, match="floor must be between 0 and 1, got -1"):
        LossSampling(floor=-1)


def test_the_floor_is_what_a_node_without_loss_counts_with():
    """Shares of ½, losses 0 and 2, mean 1: with a floor of 0.4 the first counts as 0.4 × ½."""
    shares, available = np.full((2, 1), 0.5), np.ones((2, 1), bool)
    losses = np.array([[0.0], [2.0]])
    importance = LossSampling(floor=0.4).importance(shares, losses, available)
    assert importance == pytest.approx(np.array([[0.2], [1.0]]))
    assert LossSampling(floor=0).importance(shares, losses, available)[0, 0] == 0


def test_rules_with_control_variates_differ_in_what_they_take_for_a_guess():
    assert [rule().beta(0.7) for rule in (NormSampling, FedVarp, Mifa, ResidualSampling)] == [
        0.0,
        1.0,
        1.0,
        0.7,
    ]
    assert ResidualSampling().beta(None) == 0
    shares, p = np.array([[0.4], [0.6]]), np.array([[0.5], [0.5]])
    drawn = np.array([[True], [False]])
    assert FedVarp().coefficients(shares, p, drawn).tolist() == [[0.8], [0]]
    assert Mifa().coefficients(shares, p, drawn).tolist() == [[0.4], [0]]


def test_nodes_must_remember_for_two_rules():
    names = {name for name, kind in RULES.items() if kind().needs_memory_on_nodes}
    assert names == {"stale", "scaffold"}


def test_corrected_gradients_and_a_question_do_not_go_together():
    with pytest.raises(OptionError, match="Both corrects gradients, so it cannot have a question"):
        type("Both", (Scaffold,), {"question": NORMS})


def test_nobody_else_knows_a_rule_by_name():
    """But for the default of `MultiModel`, and for the rows of the slides' table.

    The names that are common words are left out.
    """
    names = set(RULES) - {"random", "full"}
    for folder in ("gems_flwr", "simulations"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            found = names & {each for each in strings if isinstance(each, str)}
            allowed = {"sampling_rules.py": names, "multi_model.py": {"lvr"}} | {
                f"multi_model{table}.py": names for table in ("2025", "_claims", "_names")
            }
            assert found <= allowed.get(path.name, set()), path


def test_nobody_compares_the_name_of_a_rule():
    """Not with common words either; a report may, which reads names from results."""
    for path in (ROOT / "gems_flwr").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                left = getattr(node.left, "attr", getattr(node.left, "id", ""))
                assert left != "sampling", f"{path}:{node.lineno}"
