"""The methods that stand in several tables, as overrides: names are those of the tables."""

from __future__ import annotations

from collections.abc import Mapping

from simulations.reproduce.papers.spec import Scope, options

# The released code fine-tunes GEMS and the average at this rate, everything else at 0.001.
RELEASED_RATE = 0.01

# The papers' pooled models are trained like a node's, not solved.
POOLED = ("strategy=global", "strategy.converged=false")
REFERENCES: Mapping[str, tuple[str, ...]] = {
    "Global": POOLED,
    "Local": ("strategy=local",),
    # The papers' average knows no sample counts.
    "Averaged": ("strategy=one_shot_average", "strategy.weighted=false"),
}
# What the findings in papers/measured were measured with, whatever the counts of a class allow.
FULL_CONE = ("strategy=gems", "strategy.space.rank=full")
FULL_HEAD: dict[str, object] = {"head.space.rank": "full"}
PEERS = ("RegMean", "Fisher, diagonal", "Fisher, K-FAC", "Neuron matching")
ENSEMBLES: Mapping[str, tuple[str, ...]] = {
    "Majority vote": ("strategy=ensemble",),
    "Softmax mean": ("strategy=ensemble", "strategy.vote=softmax_mean"),
}


def peers(*names: str, network: bool = False) -> dict[str, tuple[str, ...]]:
    """Return one-shot merging methods of others.

    K-FAC's damping is the best of 1, 0.1, … 0.0001 on MNIST's public sample (docs/gems.md), for a
    linear model the strategy's default.
    """
    known: Mapping[str, Mapping[str, object]] = {
        "RegMean": {"method": "regmean"},
        "Fisher, diagonal": {"method": "fisher"},
        "Fisher, K-FAC": {"method": "kfac"} | ({"damping": 0.1} if network else {}),
        "Neuron matching": {"method": "matching"},
    }
    return {name: ("strategy=merge", *options(known[name])) for name in names}


def heads() -> dict[str, tuple[str, ...]]:
    """Return closed-form classifiers of others, from the message of the cones or from means alone.

    FedCOF sends means of groups where a class is on few nodes: here all of it is on one.
    """
    means = {"/space": "means", "space.groups": 8, "head": "lda"}
    return {
        "Ridge (AFL, Fed3R)": (*FULL_CONE, "strategy.head=ridge"),
        "LDA (FedCGS, GH-OFL)": (*FULL_CONE, "strategy.head=lda"),
        "Nearest mean (FedNCM)": (*FULL_CONE, "strategy.head=nearest_mean"),
        "LDA from means (FedCOF)": ("strategy=gems", *options(means)),
    }


def convex_gems(scope: Scope, epsilon: float) -> dict[str, tuple[str, ...]]:
    """Return GEMS for a linear model: the paper's spaces, and ours."""
    tuned = {"tune": scope.public(1000), "tune_rate": RELEASED_RATE}
    # The released code's Fisher diagonal, and its damping, which is the default.
    fisher = {"space.labels": "sampled", "space.fisher_samples": 200}
    ellipsoid = {"/space": "ellipsoid", "space.epsilon": epsilon} | fisher
    return {
        "GEMS ellipsoid": ("strategy=gems", *options(ellipsoid)),
        "GEMS ellipsoid, tuned": ("strategy=gems", *options(ellipsoid | tuned)),
        "GEMS ball": ("strategy=gems", *options({"/space": "ball", "space.epsilon": epsilon})),
        "GEMS cone": FULL_CONE,
        "GEMS cone, rank 20": ("strategy=gems", "strategy.space.rank=20"),
        "GEMS cone, tuned": (*FULL_CONE, f"strategy.tune={scope.public(1000)}"),
    }


def neural_gems(
    scope: Scope, *, hidden: float, clusters: int, output: float
) -> dict[str, tuple[str, ...]]:
    """Return GEMS layer by layer: the paper's output layer, and ours."""
    merging = {"neurons.epsilon": hidden, "clusters": clusters}
    ball = merging | {"/head": "ball", "head.space.epsilon": output}
    tuned = {"tune": scope.public(1000), "tune_rate": RELEASED_RATE}
    return {
        "GEMS": ("strategy=gems_layerwise", *options(ball)),
        "GEMS, tuned": ("strategy=gems_layerwise", *options(ball | tuned)),
        "GEMS, cone head": ("strategy=gems_layerwise", *options(merging | FULL_HEAD)),
    }
