"""Flower strategies for a fixed, tiny communication budget.

All take keyword arguments and are started like Flower's own::

    strategy = FedAvg(fraction_train=0.1, min_train_nodes=5, seed=1)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)

Which there are says the list of public names in `gems_flwr`; each is imported when it is used.
"""

from __future__ import annotations

import gems_flwr

__all__ = [*gems_flwr._STRATEGIES]


def __getattr__(name: str) -> object:
    """Return a strategy by its name."""
    if name not in gems_flwr._STRATEGIES:
        raise AttributeError(f"module 'gems_flwr.strategies' has no attribute '{name}'")
    return getattr(gems_flwr, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
