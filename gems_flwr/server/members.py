"""Several models in the place of one: the arrays of all, under ``member/<name>/<array>``.

Strategies that keep every node's model, or train several models at once, have arrays like these in
their results and checkpoints; `split_members` takes them apart again.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

from numpy.typing import NDArray

from gems_flwr.typing import Arrays

_PREFIX = "member"
# What the one model of arrays that were not joined from several is called.
ONLY_MODEL = "model"


def join_members(members: Mapping[str, Arrays]) -> dict[str, NDArray]:
    """Return the arrays of several models as those of one."""
    return {
        f"{_PREFIX}/{quote(node, safe='')}/{name}": array
        for node, arrays in members.items()
        for name, array in arrays.items()
    }


def split_members(arrays: Arrays) -> dict[str, dict[str, NDArray]]:
    """Return the models that `join_members` joined, by node; one model alone is named ''."""
    members: dict[str, dict[str, NDArray]] = {}
    for key, array in arrays.items():
        prefix, _, rest = key.partition("/")
        node, _, name = rest.partition("/")
        if prefix == _PREFIX and name:
            members.setdefault(unquote(node), {})[name] = array
        else:
            members.setdefault("", {})[key] = array
    return members


def join_models(models: Mapping[str, Arrays]) -> dict[str, NDArray]:
    """Return the arrays of several models, by name, as those that `MultiModel` starts from.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import join_models
    >>> list(join_models({"faces": {"w": np.zeros(2)}, "my words": {"w": np.zeros(3)}}))
    ['member/faces/w', 'member/my%20words/w']
    """
    return join_members(models)


def split_models(arrays: Arrays) -> dict[str, dict[str, NDArray]]:
    """Return the models that `join_models` joined, by name; one model alone is named ``model``.

    Examples
    --------
    >>> import numpy as np
    >>> from gems_flwr import join_models, split_models
    >>> split_models(join_models({"faces": {"w": np.ones(2)}}))
    {'faces': {'w': array([1., 1.])}}
    >>> split_models({"w": np.ones(2)})
    {'model': {'w': array([1., 1.])}}
    """
    members = split_members(arrays)
    return {ONLY_MODEL: members[""]} if set(members) == {""} else members
