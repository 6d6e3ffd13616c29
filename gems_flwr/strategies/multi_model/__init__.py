"""Several models on the same nodes, under a budget: the strategy, and its sampling rules."""

from gems_flwr.strategies.members import join_models, split_models
from gems_flwr.strategies.multi_model.multi_model import MultiModel
from gems_flwr.strategies.multi_model.question import AboutModels, Holdings, HoldingsQuestion
from gems_flwr.strategies.multi_model.sampling import (
    LOSSES,
    NORMS,
    RESIDUALS,
    RULES,
    FedVarp,
    FullParticipation,
    LossSampling,
    Measure,
    Mifa,
    NormSampling,
    ResidualSampling,
    SamplingRule,
    Scaffold,
    UniformSampling,
)

__all__ = [
    "LOSSES", "NORMS", "RESIDUALS", "RULES", "AboutModels", "FedVarp", "FullParticipation",
    "Holdings", "HoldingsQuestion", "LossSampling", "Measure", "Mifa", "MultiModel",
    "NormSampling", "ResidualSampling", "SamplingRule", "Scaffold", "UniformSampling",
    "join_models", "split_models",
]  # fmt: skip
