"""Flower's privacy mods beside ours: the order of mods decides what their clipping and noise hit.

Mods are listed from the outside in. `LocalDpMod`, the clipping mods and `secaggplus_mod` work on
the one ArrayRecord with the model that passes them. What never passes them they cannot protect:

- around `dynamic_averaging_mod` or `good_enough_mod` they refuse by themselves, since a reply
  without a model, or with a space instead of one, is none that they know;
- inside `dynamic_averaging_mod` they work: all that the node keeps and sends is made from models
  that have passed them;
- inside `good_enough_mod` or `statistics_mod` they would be bypassed: moments, radii, scores and
  statistics are computed from the node's data and pass outside. The mods look for them and refuse.
"""

from __future__ import annotations

from typing import Any

from flwr.clientapp.typing import ClientAppCallable

from gems_flwr.errors import BypassedPrivacyError

# By name: the mods for secure aggregation are in a part of Flower that is not public.
_PRIVACY_MODS = {
    "LocalDpMod",
    "fixedclipping_mod",
    "adaptiveclipping_mod",
    "secagg_mod",
    "secaggplus_mod",
}


def refuse_bypass(
    call_next: ClientAppCallable,
    *,
    inside: str = "good_enough_mod",
    what: str = "a space",
    instead: str = "for private moments set dp_epsilon in the Gems strategy instead,",
) -> None:
    """Raise if a privacy mod sits between this mod and the handler.

    Parameters
    ----------
    call_next : callable
        What the mod would call.
    inside : str
        The mod's own name.
    what : str
        What would leave the node.
    instead : str
        What to do about it.

    Raises
    ------
    BypassedPrivacyError
        Names the mod and what to do.
    """
    for name in inner_mods(call_next):
        if name in _PRIVACY_MODS:
            raise BypassedPrivacyError(
                f"{name} is inside {inside}, where {what} would bypass it; {instead} or average "
                f"models (FedAvg, dynamic averaging) under {name}"
            )


def inner_mods(call_next: ClientAppCallable) -> list[str]:
    """Return the names of what a call will pass, as far as Flower's wrapping shows it."""
    names, seen = [], set()
    waiting: list[Any] = [call_next]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names.append(getattr(function, "__name__", type(function).__name__))
        for cell in getattr(function, "__closure__", None) or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if callable(inside):
                waiting.append(inside)
    return names
