"""Guha 2018: Tables 1 to 5, Figure 3; two learners.

In 2018 a neuron's ball was bounded by the network's loss, and a merged neuron kept its merged
outgoing weights, which are the output layer: no layer is trained or intersected a second time. The
library has the method of 2019 alone, so the rows "GEMS" and "Side by side" (the same without
merging a neuron) cannot be run any more: their numbers are those that were kept when it could.
"""

from __future__ import annotations

from functools import partial

from simulations.reproduce.papers.gems2019 import (
    ENSEMBLES,
    FULL_CONE,
    FULL_HEAD,
    MERGED,
    REFERENCES,
)
from simulations.reproduce.pictures import draw_curves, draw_methods
from simulations.reproduce.study import Cell, Scope, Study, options

PAPER = "GEMS 2018"
MIXINGS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SAME_START = "Averaged, same start"
ONLY_KEPT = ("GEMS", "GEMS, tuned", "Side by side")
# Deviation of a neuron (Eq. 3 of 2019) at which as many are left as the paper has.
DEVIATION = 0.02
OURS = ("strategy=gems_layerwise", *options({"neurons.epsilon": DEVIATION} | FULL_HEAD))


def _shallow(scope: Scope) -> list[Cell]:
    chosen = scope.data("parity")
    # The strictest demand at which the balls meet, as in the paper, where it is on the loss.
    ball = {"/space": "ball", "space.epsilon": "auto"}
    methods = {
        **REFERENCES,
        "GEMS ball": ("strategy=gems", *options(ball)),
        "GEMS cone": FULL_CONE,
        **MERGED,
    }
    return [
        Cell("parity", method, (*chosen, *overrides), ("accuracy", "loss"))
        for method, overrides in methods.items()
    ]


def _networks(scope: Scope, *, data: tuple[str, ...], setting: str) -> list[Cell]:
    methods = {
        **REFERENCES,
        SAME_START: (*REFERENCES["Averaged"], "own_initial_weights=false"),
        "GEMS, cone head": OURS,
        **ENSEMBLES,
        **MERGED,
    }
    chosen = scope.data(*data)
    return [
        Cell(
            setting,
            method,
            (*chosen, *overrides),
            # A vote has no loss.
            ("accuracy",) if "vote" in method else ("accuracy", "loss"),
        )
        for method, overrides in methods.items()
    ]


def _mixing(scope: Scope) -> list[Cell]:
    """How much the learners' data may differ (Figure 3)."""
    methods = {**REFERENCES, "GEMS, cone head": OURS}
    return [
        Cell(
            f"γ = {mixing:g}",
            method,
            (*scope.data("permuted"), f"partition.mixing={mixing}", *overrides),
            ("loss", "accuracy"),
            x=mixing,
        )
        for mixing in scope.pick(MIXINGS, (0.5, 0.75, 1.0))
        for method, overrides in methods.items()
    ]


def _table(name: str, where: str, about: str, minutes: float) -> Study:
    tweets = "tweets" in name
    data = ("tweets", "dataset.group_share=0.5") if tweets else ("permuted",)
    setting = "tweets" if tweets else "MNIST and permuted"
    return Study(
        name=name,
        paper=PAPER,
        where=where,
        about=about,
        experiment="gems2018",
        base=("model.hidden=[50,50]", "model.dropout=0") if name.endswith("deep") else (),
        cells=partial(_networks, data=data, setting=setting),
        draw=draw_methods,
        seeds=3,
        minutes=minutes,
        only_kept=ONLY_KEPT,
        differs="16,363 other tweets than the paper's 121,578." if tweets else "",
    )


_ONE = "One learner has MNIST, the other MNIST with permuted pixels; one hidden layer."
_TWEETS = "Sentiment of tweets, divided by the terms that they contain; one hidden layer."

STUDIES = (
    Study(
        name="gems2018_shallow",
        paper=PAPER,
        experiment="gems2018_shallow",
        where="Table 5",
        about="Parity of digits from learned features, one learner for each half of the digits.",
        cells=_shallow,
        draw=draw_methods,
        seeds=3,
        minutes=3,
        quick=("train.epochs=2",),
        differs=(
            "The features' network is trained on public data, the paper does not say on which. ε "
            "is the largest accuracy, not the smallest loss, at which the balls meet."
        ),
    ),
    _table("gems2018_mnist", "Table 1", _ONE, 4),
    _table("gems2018_mnist_deep", "Table 2", "As Table 1, two hidden layers.", 6),
    _table("gems2018_tweets", "Table 3", _TWEETS, 2),
    _table("gems2018_tweets_deep", "Table 4", "As Table 3, two hidden layers.", 3),
    Study(
        name="gems2018_mixing",
        paper=PAPER,
        experiment="gems2018",
        where="Figure 3",
        about="How the loss depends on how much the learners' data differ.",
        cells=_mixing,
        draw=partial(draw_curves, quantity="loss"),
        seeds=1,
        minutes=3,
        only_kept=ONLY_KEPT,
        differs="The paper shows a picture only, of the better learner; ours is the mean of both.",
    ),
)
