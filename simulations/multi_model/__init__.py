"""Several models on the same nodes: their data, their capacities, and runs of them.

- `config`: the section ``multi_model`` of a run's config.
- `skew`: the slides' division of one task's data.
- `experiment`: data, models and evaluation of a run with several tasks.
"""

from simulations.multi_model.config import MultiModelConfig
from simulations.multi_model.skew import Skew

__all__ = ["MultiModelConfig", "Skew"]
