"""Which options of `Gems` go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from gems_flwr.intersect import OnEmpty, Select

if TYPE_CHECKING:
    from gems_flwr.strategies.gems import Gems

Kind = Literal["ball", "ellipsoid", "cone"]


def check_gems_options(options: Gems) -> None:
    """Refuse options that are out of range or contradict each other.

    Those that travel to the nodes check themselves; see `gems_flwr.construct.SpaceRequest`.

    Raises
    ------
    ValueError
        Names the option, and what it may be or needs.
    """
    if options.space not in get_args(Kind):
        raise ValueError(f"space must be one of {list(get_args(Kind))}, got '{options.space}'")
    if isinstance(options.epsilon, str) and options.epsilon != "auto":
        raise ValueError(f"epsilon must be a number or 'auto', got '{options.epsilon}'")
    if options.on_empty not in get_args(OnEmpty):
        raise ValueError(
            f"on_empty must be one of {list(get_args(OnEmpty))}, got '{options.on_empty}'"
        )
    if options.select is not None and options.select not in get_args(Select):
        raise ValueError(f"select must be one of {list(get_args(Select))}, got '{options.select}'")
    if options.space == "cone" and options.epsilon == "auto":
        raise ValueError("epsilon='auto' needs balls or ellipsoids, whose radii depend on it")
    if options.on_empty == "retrain" and (options.space != "ball" or options.initialise is None):
        raise ValueError("on_empty='retrain' needs space='ball' and initialise")
    if options.on_empty == "subset" and (options.space == "cone" or options.epsilon == "auto"):
        raise ValueError(
            "on_empty='subset' needs balls or ellipsoids with an epsilon of yours; "
            "for cones there is robust=True"
        )
    if (options.robust or options.audit) and (
        options.on_empty == "retrain" or options.epsilon == "auto"
    ):
        raise ValueError("robust and audit go with neither on_empty='retrain' nor epsilon='auto'")
    if options.audit and options.space != "cone":
        raise ValueError(
            "audit needs cones: where models are averaged, the others gain from any node that "
            "is left out, honest or not"
        )
    if options.robust and options.on_empty == "relax":
        raise ValueError("robust changes radii, which on_empty='relax' chooses itself")
    if (options.robust or options.audit) and options.sums:
        raise ValueError("robust and audit look at single nodes, of which sums=True shows nothing")
    if options.retrains < 0:
        raise ValueError(f"retrains must be at least 0, got {options.retrains}")
