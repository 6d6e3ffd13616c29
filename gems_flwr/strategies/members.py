"""Several models in the place of one: the arrays of all, under ``member/<name>/<array>``."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

from numpy.typing import NDArray

from gems_flwr.typing import Arrays

_PREFIX = "member"
# What the one model of arrays that were not joined from several is called.
ONLY_MODEL = "model"


def join_models(models: Mapping[str, Arrays]) -> dict[str, NDArray]:
    """Return the arrays of several models, by name, as those of one.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr.strategies.members import join_models, split_models
    >>> joined = join_models({"faces": {"w": np.zeros(1)}, "my words": {"w": np.ones(1)}})
    >>> split_models(joined)["my words"]
    {'w': array([1.])}
    """
    return {
        f"{_PREFIX}/{quote(model, safe='')}/{name}": array
        for model, arrays in models.items()
        for name, array in arrays.items()
    }


def split_models(arrays: Arrays) -> dict[str, dict[str, NDArray]]:
    """Return the models that `join_models` joined, by name; one model alone is named ``model``."""
    models: dict[str, dict[str, NDArray]] = {}
    for key, array in arrays.items():
        prefix, _, rest = key.partition("/")
        model, _, name = rest.partition("/")
        if prefix == _PREFIX and name:
            models.setdefault(unquote(model), {})[name] = array
        else:
            models.setdefault(ONLY_MODEL, {})[key] = array
    return models
