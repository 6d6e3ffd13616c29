"""Sampling rules are values: what one class says is all that the rest needs to know."""

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

from gems_flwr import InProcessGrid, MultiModel
from gems_flwr.averaging import data_shares, draw_assignment, optimal_probabilities
from gems_flwr.core import generator
from gems_flwr.core.records import to_numpy
from gems_flwr.errors import OptionError
from gems_flwr.strategies.multi_model import (
    LOSSES,
    NORMS,
    RULES,
    FedVarp,
    FullParticipation,
    LossSampling,
    Mifa,
    NormSampling,
    ResidualSampling,
    SamplingRule,
    Scaffold,
    split_models,
)

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
    measure = LOSSES
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
    assert {action for _, _, action, _ in grid.seen} == {"holdings", "losses", "train"}
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


# --- the library's rules -----------------------------------------------------------------------


def test_a_name_stands_for_a_rule_with_its_defaults():
    names = ["random", "full", "lvr", "gvr", "stale", "fedvarp", "mifa", "scaffold"]
    assert list(RULES) == names
    for name, kind in RULES.items():
        assert MultiModel(sampling=name).rule == kind()
        assert MultiModel(sampling=kind()).rule.name == name
    rule = LossSampling(floor=0.5)
    assert MultiModel(sampling=rule).rule is rule
    assert {name for name in names if RULES[name]().needs_memory_on_nodes} == {"stale", "scaffold"}
    with pytest.raises(OptionError, match="Both corrects gradients, so it cannot have a measure"):
        type("Both", (Scaffold,), {"measure": NORMS})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiModel(budget=0), "budget must be a number above 0"),
        (lambda: MultiModel(fraction_train=0.5), "fraction_train must be 1"),
        (lambda: MultiModel(compress="int8", sampling="scaffold"), "take another sampling"),
        (lambda: MultiModel(sampling="best"), r"one of \['random', .*\], or a SamplingRule, got"),
        (lambda: MultiModel(sampling=LossSampling), "or a SamplingRule, got"),
        (lambda: LossSampling(floor=-1), "floor must be between 0 and 1, got -1"),
    ],
)
def test_options_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_rules_with_control_variates_differ_in_what_they_take_for_a_guess():
    kinds = (NormSampling, FedVarp, Mifa, ResidualSampling)
    assert [kind().beta(0.7) for kind in kinds] == [0.0, 1.0, 1.0, 0.7]
    assert ResidualSampling().beta(None) == 0
    shares, p = np.array([[0.4], [0.6]]), np.array([[0.5], [0.5]])
    drawn = np.array([[True], [False]])
    assert FedVarp().coefficients(shares, p, drawn).tolist() == [[0.8], [0]]
    assert Mifa().coefficients(shares, p, drawn).tolist() == [[0.4], [0]]
