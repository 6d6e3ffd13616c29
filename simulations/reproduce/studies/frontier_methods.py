"""The methods of the frontier: what they are called, whom they belong to, how to run them.

A row is run where its options exist and fit the data: a lift for images has nothing to do with
feature vectors. Learning rates and the like stand in `frontier_tuning`, which fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOWER = "FedAvg and its family"
PEERS = "models merged once"
HEADS = "heads from moments"
CONES = "cones"
REFINED = "refined cones"
LIFTED = "cones on a seeded lift"
LAYERS = "layer by layer"
FAMILIES = (CONES, REFINED, LIFTED, LAYERS, HEADS, PEERS, FLOWER)
# What ours are compared with by factors: many rounds, tuned.
RIVALS = (FLOWER, PEERS)

_SCAFFOLD = (
    "strategy=multi_model",
    "strategy.sampling=scaffold",
    "multi_model.tasks=[{dataset: null, model: null, share: 1.0}]",
    "multi_model.capacities=[1.0]",
    "strategy.budget=${nodes}",
)
_RANK_20 = ("strategy=gems", "strategy.space.rank=20")
FILTERS, FOURIER = ("model=random_filters",), ("model=random_fourier",)


@dataclass(frozen=True)
class FrontierMethod:
    """A row of the table and a curve of the picture.

    Parameters
    ----------
    name : str
        What it is called.
    family : str
        One of `FAMILIES`.
    overrides : tuple of str
        How it differs from the run's common options.
    tuned : str
        Which of the grids of `frontier_tuning` its further options come from; none if empty.
    """

    name: str
    family: str
    overrides: tuple[str, ...]
    tuned: str = ""


METHODS = (
    FrontierMethod("FedAvg", FLOWER, ("strategy=fedavg",), "fedavg"),
    FrontierMethod("FedAvgM", FLOWER, ("strategy=fedavgm",), "fedavgm"),
    FrontierMethod("FedAdam", FLOWER, ("strategy=fedadam",), "fedadam"),
    FrontierMethod("FedProx", FLOWER, ("strategy=fedprox",), "fedprox"),
    FrontierMethod("SCAFFOLD", FLOWER, _SCAFFOLD, "SCAFFOLD"),
    FrontierMethod("FedAvg, filters", FLOWER, ("strategy=fedavg", *FILTERS), "fedavg"),
    FrontierMethod("average", PEERS, ("strategy=one_shot_average",)),
    FrontierMethod("Fisher", PEERS, ("strategy=merge", "strategy.method=fisher")),
    FrontierMethod("RegMean", PEERS, ("strategy=merge", "strategy.method=regmean")),
    FrontierMethod("K-FAC", PEERS, ("strategy=merge", "strategy.method=kfac")),
    FrontierMethod("ridge", HEADS, (*_RANK_20, "strategy.head=ridge")),
    FrontierMethod("LDA", HEADS, (*_RANK_20, "strategy.head=lda")),
    FrontierMethod("nearest mean", HEADS, (*_RANK_20, "strategy.head=nearest_mean")),
    FrontierMethod("rank 20", CONES, _RANK_20),
    FrontierMethod("rank by samples", CONES, ("strategy=gems",)),
    FrontierMethod("full moments", CONES, ("strategy=gems", "strategy.space.rank=full")),
    FrontierMethod("rank 20, 8 clusters", CONES, (*_RANK_20, "strategy.space.clusters=8")),
    FrontierMethod("rank 20, 5 rounds more", REFINED, (*_RANK_20, "strategy.refine=5")),
    FrontierMethod("filters", LIFTED, (*_RANK_20, *FILTERS)),
    FrontierMethod("filters, refined", LIFTED, (*_RANK_20, *FILTERS, "strategy.refine=5")),
    FrontierMethod("Fourier", LIFTED, (*_RANK_20, *FOURIER)),
    FrontierMethod("Fourier, refined", LIFTED, (*_RANK_20, *FOURIER, "strategy.refine=5")),
    FrontierMethod("two layers", LAYERS, ("strategy=gems_layerwise", "model=mlp")),
)

# Level lines: all raw data in one place, solved to the end.
CEILINGS = {
    "pooled optimum": ("strategy=global",),
    "pooled optimum, filters": ("strategy=global", *FILTERS),
}
