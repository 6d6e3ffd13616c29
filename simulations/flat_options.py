"""The options of GEMS as one flat list, as they stood before they nested.

A run's folder is named by a digest of its config, and a report's rows by the options that differ
from the defaults. Both are made from the flat list, so that runs made before options nested are
found, gone on with and shown beside new ones. Whoever still writes an option the old way is told
the new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BALL = {"measure": "accuracy", "radius": "sampled", "directions": 500, "floor": 0.1}
_MOMENTS = {"rank": "auto", "clusters": 1, "int8": True, "min_count": None, "sums": False}
_PRIVATE = {
    "dp_epsilon": None,
    "dp_delta": 1e-5,
    "dp_clip": 1.0,
    "dp_classes": None,
    "dp_seeded": False,
}
_SPACE = _BALL | _MOMENTS | _PRIVATE
# What an epsilon was that was not set.
_EPSILON = {"cone": 0.5, "ball": 0.4, "ellipsoid": 0.4}
_HEAD_EPSILON = {"cone": 0.5, "ball": 0.7, "ellipsoid": 0.7}
# Flat name of an option of the neurons, where it is another.
_NEURONS = {"epsilon": "epsilon_hidden", "measure": "deviation"}
# What the output layer could be told in any case; the rest was there if somebody set it.
_OUTPUT = {*_MOMENTS, "radius", "directions", "floor"}
_HEAD = ("select", "ridge", "class_weight", "on_empty", "robust")
_LAYERS: tuple[str, ...] = ("merge", "clusters", "epsilon_hidden", "deviation", "max_hidden")
_LAYERS = (*_LAYERS, "budget", "radius", "directions", "outgoing", "max_rows", "head", "output")
_SERVER_SIDE = (*_HEAD, "audit", "layer")
# Options that came later, and what they do if nobody sets them: what was done before.
_LATER = {
    "backbone": "auto",
    "head": "cone",
    "prior": "counts",
    "shrinkage": None,
    "refine": 0,
    "refine_ridge": 1e-4,
    "refine_tolerance": 1e-4,
    "refine_dtype": "int8",
    # Of merged models, and of several at once.
    "steps": 2000,
    "choose": 0,
    "statistics_share": 0.0,
    "warm_start": False,
}


def flat_strategy(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's options without nesting; those of others than GEMS as they are.

    Parameters
    ----------
    strategy : mapping
        The section ``strategy`` of a config, old or new.
    """
    flat = _as_before(strategy)
    if isinstance(flat.get("space"), Mapping):
        flat |= _flat_space(flat, _EPSILON)
    if isinstance(flat.get("neurons"), Mapping):
        flat |= {_NEURONS.get(key, key): value for key, value in _own(flat.pop("neurons")).items()}
    if isinstance(flat.get("head"), Mapping) and "space" not in flat["head"]:
        # Outgoing weights: no space, and no round for it.
        kind = str(flat["head"]["_target_"]).rpartition(".")[2].lower()
        flat["head"], flat["output"] = kind, dict(_own(flat["head"]))
    elif isinstance(flat.get("head"), Mapping):
        head = _as_before(_own(flat["head"]))
        space = _flat_space(head, _HEAD_EPSILON)
        flat["head"] = space.pop("space")
        unused = {key for key in space.keys() & _SPACE.keys() if space[key] == _SPACE[key]}
        output = {key: value for key, value in space.items() if key not in unused - _OUTPUT}
        output |= {key: head.get(key) for key in _HEAD}
        more = {key: value for key, value in head.items() if key not in (*_HEAD, "space")}
        flat["output"] = {key: value for key, value in more.items() if value} | output
    # The order in which they stood in their files, and stand in labels.
    order = _LAYERS if "merge" in flat else ("space", "epsilon", *_SPACE)
    return {key: flat[key] for key in order if key in flat} | flat


def _flat_space(options: Mapping[str, Any], usual: Mapping[str, float]) -> dict[str, Any]:
    """Return the space among some options, and its own options, as options beside it."""
    kind = str(options["space"]["_target_"]).rpartition(".")[2].lower()
    own = {key: value for key, value in _own(options["space"]).items() if _is_said(key, value)}
    epsilon, chosen = own.pop("epsilon", None), options.get("epsilon")
    if epsilon == usual.get(kind):
        epsilon = None
    flat = {"space": kind, "epsilon": epsilon if chosen is None else chosen, **_SPACE, **own}
    if chosen is not None and epsilon is not None:
        flat["space.epsilon"] = epsilon
    return flat


def _as_before(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without those that came later and do what was done before."""
    if isinstance(options.get("refine"), Mapping):
        how = {f"refine_{key}": value for key, value in _own(options["refine"]).items()}
        options = {**options, "refine": how.pop("refine_rounds"), **how}
    if "shrink" in options and options["shrink"] is None:
        # What it means if nothing else is chosen; it was said before.
        options = {**options, "shrink": 0.9}
    # The head of a network is older than that of moments, and was always said.
    later = {key: value for key, value in _LATER.items() if key != "head" or "merge" not in options}
    return {key: value for key, value in options.items() if later.get(key, ...) != value}


def _is_said(key: str, value: Any) -> bool:
    """Return whether an option of a space is older than its name, or set."""
    later = {"sketch": None, "damping": 0, "labels": "exact", "fisher_samples": None}
    return key not in later or bool(later[key] != value)


def _own(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "_target_"}


def new_form(key: str, overrides: Sequence[str]) -> str | None:
    """Return the override by which an option is set now, for a key that there is no longer.

    Parameters
    ----------
    key : str
        What does not exist, such as ``strategy.rank``.
    overrides : sequence of str
        What was given; says the strategy and the value.
    """
    given = [each for each in overrides if each.lstrip("+~").startswith((f"{key}=", f"{key}."))]
    name, _, value = given[0].lstrip("+~").partition("=") if given else (key, "", "…")
    section, _, option = name.partition(".")
    if section != "strategy":
        return None
    layerwise = any(each == "strategy=gems_layerwise" for each in overrides)
    moved = _moved_of_layers(option) if layerwise else _moved_of_space(option)
    return None if moved is None else f"strategy{moved}={value}"


def _moved_of_space(option: str) -> str | None:
    return f".space.{option}" if option in _SPACE else None


def _moved_of_layers(option: str) -> str | None:
    flat = {old: new for new, old in _NEURONS.items()}
    if option in ("radius", "directions", "outgoing", "max_rows", *flat):
        return f".neurons.{flat.get(option, option)}"
    section, _, name = option.partition(".")
    if section != "output":
        return None
    return f".head.{name}" if name in _SERVER_SIDE else f".head.space.{name or '…'}"
