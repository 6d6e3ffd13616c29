"""Guha 2018: Tables 1 to 5, Figures 2 and 3; two learners."""

from __future__ import annotations

from simulations.reproduce.papers import curve_figures, table_figures
from simulations.reproduce.papers.methods import (
    ENSEMBLES,
    FULL_CONE,
    FULL_HEAD,
    PEERS,
    REFERENCES,
    peers,
)
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope, options

PAPER = "GEMS 2018"
# Public samples of Section 5.2: 200 of each half.
PUBLIC = 400
DEVIATIONS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MIXINGS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# One cluster: all pairs of neurons are tried, as in 2018.
NEURONS = {"clusters": 1, "neurons.epsilon": 0.01, "neurons.outgoing": "true"}
# The paper demands a loss that it does not give; half of the labels is what tweets need to exceed.
BALL: dict[str, object] = {"/head": "ball", "head.space.epsilon": 0.5}
# Of few merged neurons no good output layer can be made: any is good enough.
ANY_BALL: dict[str, object] = {"/head": "ball", "head.space.epsilon": 0.05}


def _shallow(scope: Scope) -> list[Cell]:
    chosen = (f"dataset={scope.dataset('mnist_parity')}",)
    # The strictest demand at which the balls meet, as in the paper, where it is on the loss.
    ball = {"/space": "ball", "epsilon": "auto"}
    methods = {
        **REFERENCES,
        "GEMS ball": ("strategy=gems", *options(ball)),
        "GEMS cone": FULL_CONE,
        **peers("RegMean", "Fisher, K-FAC"),
    }
    return [
        Cell("parity", method, (*chosen, *overrides), ("accuracy", "loss"))
        for method, overrides in methods.items()
    ]


def _networks(scope: Scope, dataset: str, setting: str) -> list[Cell]:
    ball = NEURONS | BALL
    tuned = {"tune": _public(scope), "tune_rate": 0.01}
    methods = {
        **REFERENCES,
        "GEMS": ("strategy=gems_layerwise", *options(ball)),
        "GEMS, tuned": ("strategy=gems_layerwise", *options(ball | tuned)),
        "GEMS, cone head": ("strategy=gems_layerwise", *options(NEURONS | FULL_HEAD)),
        **ENSEMBLES,
        **peers(*PEERS, network=True),
    }
    return [
        Cell(
            setting,
            method,
            (f"dataset={scope.dataset(dataset)}", *overrides),
            ("accuracy", "loss", "hidden neurons")
            if method.startswith("GEMS")
            else ("accuracy", "loss")
            if method != "Majority vote"
            else ("accuracy",),
        )
        for method, overrides in methods.items()
    ]


def _public(scope: Scope) -> int:
    return scope.public(1000) // 2 if scope.stand_in else PUBLIC


def _mnist(scope: Scope) -> list[Cell]:
    return _networks(scope, "mnist_permuted", "MNIST and permuted")


def _tweets(scope: Scope) -> list[Cell]:
    return _networks(scope, "tweets_by_terms", "tweets")


def _neurons(scope: Scope) -> list[Cell]:
    """How many neurons there are for a deviation (Figure 2)."""
    return [
        Cell(
            f"ε_j = {epsilon:g}",
            method,
            (
                f"dataset={scope.dataset('mnist_permuted')}",
                "strategy=gems_layerwise",
                *options(NEURONS | more | {"neurons.epsilon": epsilon}),
            ),
            ("accuracy", "hidden neurons"),
            x=epsilon,
            group="neurons",
        )
        for epsilon in scope.pick(DEVIATIONS, DEVIATIONS[1::2])
        for method, more in {"GEMS": ANY_BALL, "GEMS, cone head": FULL_HEAD}.items()
    ]


def _mixing(scope: Scope) -> list[Cell]:
    """How much the learners' data may differ (Figure 3)."""
    methods = {
        **REFERENCES,
        "GEMS": ("strategy=gems_layerwise", *options(NEURONS | BALL)),
        "GEMS, cone head": ("strategy=gems_layerwise", *options(NEURONS | FULL_HEAD)),
    }
    return [
        Cell(
            f"γ = {mixing:g}",
            method,
            (
                f"dataset={scope.dataset('mnist_permuted')}",
                f"partition.mixing={mixing}",
                *overrides,
            ),
            ("accuracy", "loss"),
            x=mixing,
        )
        for mixing in scope.pick(MIXINGS, (0.5, 0.75, 1.0))
        for method, overrides in methods.items()
    ]


_QUICK = ("train.epochs=2", "train.output_epochs=2")

REPRODUCTIONS = (
    Reproduction(
        name="gems2018_shallow",
        paper=PAPER,
        where="Table 5",
        about="Parity of digits from learned features, one learner for each half of the digits.",
        cells=_shallow,
        draw=table_figures.method_panels,
        seeds=3,
        minutes=3,
        quick=("train.epochs=2",),
        scaled=(
            "The features' network is trained on public data, the paper does not say on which. ε "
            "is the largest accuracy, not the smallest loss, at which the balls meet."
        ),
    ),
    Reproduction(
        name="gems2018_mnist",
        paper=PAPER,
        where="Table 1",
        about="One learner has MNIST, the other MNIST with permuted pixels; one hidden layer.",
        cells=_mnist,
        draw=table_figures.method_panels,
        seeds=3,
        minutes=20,
        quick=_QUICK,
    ),
    Reproduction(
        name="gems2018_mnist_deep",
        paper=PAPER,
        where="Table 2",
        about="As Table 1, with two hidden layers.",
        cells=_mnist,
        draw=table_figures.method_panels,
        seeds=3,
        minutes=25,
        quick=_QUICK,
    ),
    Reproduction(
        name="gems2018_tweets",
        paper=PAPER,
        where="Table 3",
        about="Sentiment of tweets, divided by the terms that they contain; one hidden layer.",
        cells=_tweets,
        draw=table_figures.method_panels,
        seeds=3,
        minutes=8,
        quick=_QUICK,
        scaled="16,363 other tweets than the paper's 121,578.",
    ),
    Reproduction(
        name="gems2018_tweets_deep",
        paper=PAPER,
        where="Table 4",
        about="As Table 3, with two hidden layers.",
        cells=_tweets,
        draw=table_figures.method_panels,
        seeds=3,
        minutes=10,
        quick=_QUICK,
        scaled="16,363 other tweets than the paper's 121,578.",
    ),
    Reproduction(
        name="gems2018_neurons",
        paper=PAPER,
        where="Figure 2",
        about="How many hidden neurons the merged network has for a deviation ε_j.",
        cells=_neurons,
        draw=curve_figures.neuron_curves,
        seeds=1,
        minutes=15,
        quick=_QUICK,
        scaled="The paper shows a picture only.",
    ),
    Reproduction(
        name="gems2018_mixing",
        paper=PAPER,
        where="Figure 3",
        about="How the loss depends on how much the learners' data differ.",
        cells=_mixing,
        draw=curve_figures.loss_curves,
        seeds=1,
        minutes=25,
        quick=_QUICK,
        scaled="The paper shows a picture only, of the better learner; ours is the mean of both.",
    ),
)
