"""What Kamp et al. 2018 prove of dynamic averaging, checked on the pure state machine."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.averaging import (
    Balancing,
    BalancingRule,
    Coordinator,
    LocalReport,
    RobustRule,
    squared_distance,
    weighted_mean,
)

ROUNDING = 1e-9


def divergence(models, weights=None):
    """Equation 2: the (weighted) mean of the squared distances of models to their mean."""
    shares = [1.0] * len(models) if weights is None else list(weights)
    mean = weighted_mean(models, shares)
    distances = [squared_distance(model, mean) for model in models]
    return sum(s * d for s, d in zip(shares, distances, strict=True)) / sum(shares)


class Federation:
    """Nodes whose models walk at random, some of them away at times, and their coordinator."""

    def __init__(self, rule, count, seed, weights=None):
        self.rng = np.random.default_rng(seed)
        self.rule = rule
        start = {"w": self.rng.normal(size=4), "n": np.array(1)}
        self.models = {str(i): dict(start) for i in range(count)}
        self.weights = weights or dict.fromkeys(self.models, 1.0)
        self.coordinator = Coordinator(start)
        self.up = self.down = 0

    def walk(self, scale):
        for model in self.models.values():
            model["w"] = model["w"] + scale * self.rng.normal(size=4)

    def check(self, present, dies=()):
        """Play one check with the nodes that are there; some die when they are asked."""
        reports = {
            name: LocalReport(
                squared_distance(self.models[name], self.coordinator.reference), self.weights[name]
            )
            for name in present
        }
        violators = {}
        if self.rule.condition == "local":
            violators = {
                name: self.models[name]
                for name, report in reports.items()
                if report.squared_distance > self.rule.delta
            }
        balancing = Balancing.begin(self.rule, self.coordinator, reports, violators)
        while names := balancing.query(self.rng):
            lost = [name for name in names if name in dies]
            got = {name: self.models[name] for name in names if name not in lost}
            balancing = balancing.receive(got, lost)
        done = balancing.finish()
        self.coordinator = done.coordinator
        self.up += len(balancing.held)
        self.down += len(done.receivers)
        for name in done.receivers:
            self.models[name] = dict(done.average)
        return list(balancing.reports), done

    def of(self, names):
        return [self.models[n] for n in names], [self.weights[n] for n in names]


rules = st.builds(
    BalancingRule,
    delta=st.floats(0.05, 5),
    augmentation=st.sampled_from(["random", "doubling", "all"]),
    condition=st.sampled_from(["local", "total"]),
)


@settings(deadline=None, max_examples=40)
@given(rules, st.integers(1, 9), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_the_mean_stays_and_the_divergence_is_bounded_round_after_round(
    rule, count, seed, weighted, flaky
):
    """Definition 2, over a hundred checks, for the nodes that take part; with weights, Algorithm 2.

    A node that is away keeps its model, so the mean over *all* nodes stays as well.
    """
    rng = np.random.default_rng(seed)
    weights = {str(i): float(rng.integers(1, 9)) for i in range(count)} if weighted else None
    federation = Federation(rule, count, seed, weights)
    everyone = list(federation.models)
    for _ in range(100):
        federation.walk(0.3)
        present = [n for n in everyone if not flaky or rng.random() > 0.2] or everyone[:1]
        dies = [n for n in present if flaky and rng.random() < 0.1]
        before = weighted_mean(*federation.of(everyone))
        took_part, done = federation.check(present, dies)
        after = weighted_mean(*federation.of(everyone))
        assert after["w"] == pytest.approx(before["w"], abs=ROUNDING)
        if took_part:
            assert divergence(*federation.of(took_part)) <= rule.delta + ROUNDING
        if done.full:
            assert federation.coordinator.reference["w"] == pytest.approx(done.average["w"])


# --- single decisions ---------------------------------------------------------------------------


def at(*values):
    return {str(i): {"w": np.array([float(v)])} for i, v in enumerate(values)}


def begin(models, rule, violations=0):
    origin = Coordinator({"w": np.zeros(1)}, violations)
    reports = {n: LocalReport(squared_distance(m, origin.reference)) for n, m in models.items()}
    violators = {n: m for n, m in models.items() if reports[n].squared_distance > rule.delta}
    if rule.condition == "total":
        violators = {}
    return Balancing.begin(rule, origin, reports, violators)


RNG = np.random.default_rng(0)


def test_violators_that_balance_each_other_need_nobody_else():
    """2 and −2 violate Δ = 1; their mean 0 is in the ball. Both get it, the others keep theirs."""
    balancing = begin(at(2, -2, 0.5, 0.1, 0.2), BalancingRule(delta=1))
    assert balancing.query(RNG) == ()
    done = balancing.finish()
    assert done.receivers == ("0", "1")
    assert done.average["w"] == 0
    assert not done.full
    assert done.coordinator.violations == 2


@pytest.mark.parametrize("violations", [2, 3])
def test_the_counter_forces_a_full_synchronisation_even_if_it_jumps_past_m(violations):
    """M = 4, two violators more: 4 and 5 ≥ 4. All others are asked at once; v starts at 0."""
    models = at(2, -2, 0.5, 0.1)
    balancing = begin(models, BalancingRule(delta=1), violations)
    assert balancing.query(RNG) == ("2", "3")
    done = balancing.receive({n: models[n] for n in ("2", "3")}).finish()
    assert done.full
    assert done.coordinator.violations == 0
    assert done.coordinator.reference["w"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("augmentation", "sizes"), [("random", [1] * 7), ("doubling", [1, 2, 4]), ("all", [7])]
)
def test_more_models_are_asked_for_as_the_augmentation_says(augmentation, sizes):
    """One violator far out among eight nodes: no mean is ever in the ball, so all are asked.

    Doubling has 1, then 2, then 4 in; 4 more would be 8 > 8/2, so it asks for the four left.
    """
    models = at(100, 0, 0, 0, 0, 0, 0, 0)
    balancing = begin(models, BalancingRule(delta=1, augmentation=augmentation))
    asked = []
    while names := balancing.query(RNG):
        asked.append(len(names))
        balancing = balancing.receive({n: models[n] for n in names})
    assert asked == sizes
    assert balancing.finish().full


def test_buffers_are_averaged_but_do_not_count_and_counters_stay():
    """The buffers are 10 apart, the weights 0: nothing is violated; averaged they meet at 5."""
    rule = BalancingRule(delta=1)
    models = {
        name: {"w": np.array([w]), "bn.running_mean": np.array([m]), "n": np.array(int(m))}
        for name, w, m in (("a", 2.0, 0.0), ("b", -2.0, 10.0))
    }
    assert squared_distance(models["a"], models["b"]) == 16
    origin = Coordinator({"w": np.zeros(1), "bn.running_mean": np.zeros(1), "n": np.array(7)})
    reports = dict.fromkeys(models, LocalReport(4.0))
    done = Balancing.begin(rule, origin, reports, models).finish()
    assert done.average["bn.running_mean"] == 5
    assert done.coordinator.reference["n"] == 7


# --- liars --------------------------------------------------------------------------------------


class Lies(Federation):
    """Some nodes claim whatever they like; they are the first of the federation."""

    def lie(self, count, scale):
        for name in list(self.models)[:count]:
            self.models[name]["w"] = scale * self.rng.normal(size=4)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["median", "geometric_median", "multi_krum"]),
    rules,
    st.integers(0, 2),
    st.integers(0, 10**6),
    st.booleans(),
    st.floats(0.1, 1e6),
)
def test_under_a_robust_rule_honest_models_stay_together_and_liars_do_not_carry_them_off(
    kind, rule, liars, seed, known, scale
):
    """Definition 2 (ii) for the honest: their divergence is at most Δ after every check.

    And neither they nor the reference get farther out than their own steps take them, four times
    over: by coordinate, or from model to model, a rule stays in the honest models' range.
    """
    rule = dataclasses.replace(
        rule, robust=RobustRule(kind, liars if known else None), condition="local"
    )
    federation = Lies(rule, 11, seed)
    honest = list(federation.models)[liars:]
    start = federation.coordinator.reference["w"].copy()
    reach = 0.0
    for _ in range(30):
        before = {n: federation.models[n]["w"].copy() for n in honest}
        federation.walk(0.3)
        reach += max(np.linalg.norm(federation.models[n]["w"] - before[n]) for n in honest)
        federation.lie(liars, scale)
        federation.check(list(federation.models))
        assert divergence(*federation.of(honest)) <= rule.delta + ROUNDING
        for model in (*federation.of(honest)[0], federation.coordinator.reference):
            assert np.linalg.norm(model["w"] - start) <= 4 * (reach + 2 * np.sqrt(rule.delta))


def test_a_robust_average_is_not_made_of_fewer_models_than_outvote_the_liars():
    """9 violates alone. With one liar assumed a median needs three models, Multi-Krum five."""
    models = at(9, *np.linspace(0, 0.5, 8))
    for kind, needed in (("median", 3), ("multi_krum", 5)):
        rule = BalancingRule(delta=1, augmentation="random", robust=RobustRule(kind, liars=1))
        balancing = begin(models, rule)
        while names := balancing.query(RNG):
            balancing = balancing.receive({n: models[n] for n in names})
        done = balancing.finish()
        assert len(done.receivers) == needed
        assert done.average["w"] <= 0.5
        assert not done.full
