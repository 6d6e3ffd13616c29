"""Which options of `Gems` and `LayerwiseGems` go together, and where old ones went.

What travels to the nodes checks itself; see `gems_flwr.wire.requests`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_args

from gems_flwr.errors import OptionError
from gems_flwr.intersect.aggregate import OnEmpty
from gems_flwr.intersect.result import Select
from gems_flwr.server.backbone_sending import BackboneMode
from gems_flwr.server.refine_options import as_refine
from gems_flwr.wire.space_requests import Ball, Centered, Cone, SpaceRequest


class SpaceStrategy(Protocol):
    """What the server does with spaces; see `gems_flwr.strategies.gems.Gems`."""

    epsilon: Any
    select: Any
    on_empty: Any
    retrains: int
    initialise: Any
    robust: Any
    audit: bool
    backbone: Any
    refine: Any
    max_examples: Any
    secure: Any


# What once was an option of the strategy itself, and where it is now.
SPACE_OPTIONS = {
    **dict.fromkeys(("measure", "radius", "directions"), "space=Ball({}=…)"),
    "floor": "space=Ellipsoid({}=…)",
    **dict.fromkeys(("rank", "clusters", "int8", "min_count", "sums"), "space=Cone({}=…)"),
    **dict.fromkeys(
        ("dp_epsilon", "dp_delta", "dp_clip", "dp_classes", "dp_seeded"), "space=Cone({}=…)"
    ),
}
NEURON_OPTIONS = {
    "epsilon_hidden": "neurons=Neurons(epsilon=…)",
    "deviation": "neurons=Neurons(measure=…)",
    **dict.fromkeys(("radius", "directions", "outgoing", "max_rows"), "neurons=Neurons({}=…)"),
    "output": "head=Cone(…), or head=Gems(space=Cone(…), ridge=…) for what the server does",
}


def moved_options(moved: Mapping[str, str]) -> Callable[[type, str], str]:
    """Return the hint at where an option went that once was the strategy's own."""

    def hint(strategy: type, name: str) -> str:
        text = f"{strategy.__name__} has no {name}"
        return f"{text}; write {moved[name].format(name)}" if name in moved else text

    return hint


def check_gems_options(options: SpaceStrategy, space: SpaceRequest) -> None:
    """Refuse options that are out of range or contradict each other.

    Parameters
    ----------
    options : SpaceStrategy
        The strategy.
    space : SpaceRequest
        What it asks for.

    Raises
    ------
    OptionError
        Names the option, and what it may be or needs.
    """
    _check_epsilon(options.epsilon, space)
    if options.on_empty not in get_args(OnEmpty):
        raise OptionError(
            f"on_empty must be one of {list(get_args(OnEmpty))}, got '{options.on_empty}'"
        )
    if options.select is not None and options.select not in get_args(Select):
        raise OptionError(f"select must be one of {list(get_args(Select))}, got '{options.select}'")
    if options.on_empty == "retrain" and (
        not isinstance(space, Ball) or options.initialise is None
    ):
        raise OptionError("on_empty='retrain' needs space=Ball() and initialise")
    if options.on_empty == "relax" and not isinstance(space, Cone | Centered):
        raise OptionError("on_empty='relax' needs a Cone, a Ball or an Ellipsoid")
    if options.on_empty == "subset" and (isinstance(space, Cone) or options.epsilon == "auto"):
        raise OptionError(
            "on_empty='subset' needs balls or ellipsoids with an epsilon of yours; "
            "for cones there is robust=True"
        )
    if options.backbone not in get_args(BackboneMode):
        raise OptionError(
            f"backbone must be one of {list(get_args(BackboneMode))}, got {options.backbone!r}"
        )
    if options.retrains < 0:
        raise OptionError(f"retrains must be at least 0, got {options.retrains}")
    if options.robust or options.audit:
        _check_screening(options, space)
    _check_refinement(options, space)
    if options.secure is not None and not space.is_summed:
        raise OptionError(
            "secure sums need space=Cone(sums=True), or with sketch=… for fewer bytes: moments of "
            "which nobody needs more than the total"
        )
    if (space.is_sketched or options.secure is not None) and options.max_examples is not None:
        raise OptionError(
            "max_examples looks at single nodes, of which sums with sketch=… or secure show nothing"
        )


def _check_epsilon(epsilon: object, space: SpaceRequest) -> None:
    if isinstance(epsilon, int | float):
        raise OptionError(
            "an epsilon for all nodes is the space's: "
            f"space={type(space).__name__}(epsilon={epsilon})"
        )
    if isinstance(epsilon, str) and epsilon != "auto":
        raise OptionError(
            f"epsilon must be 'auto' or a mapping from node to number, got '{epsilon}'"
        )
    if epsilon == "auto" and not isinstance(space, Centered):
        raise OptionError("epsilon='auto' needs balls or ellipsoids, whose radii depend on it")


def _check_refinement(options: SpaceStrategy, space: SpaceRequest) -> None:
    if not as_refine(options.refine).rounds:
        return
    if not isinstance(space, Cone):
        raise OptionError("refine needs cones: their moments are what steps are made of")
    if space.private is not None:
        raise OptionError(
            "refine goes without dp_epsilon: gradients would leave the nodes without noise"
        )


def _check_screening(options: SpaceStrategy, space: SpaceRequest) -> None:
    if options.on_empty == "retrain" or options.epsilon == "auto":
        raise OptionError("robust and audit go with neither on_empty='retrain' nor epsilon='auto'")
    if options.audit and not isinstance(space, Cone):
        raise OptionError(
            "audit needs cones: where models are averaged, the others gain from any node that "
            "is left out, honest or not"
        )
    if options.robust and options.on_empty == "relax":
        raise OptionError("robust changes radii, which on_empty='relax' chooses itself")
    if options.robust and not isinstance(space, Cone | Centered):
        raise OptionError("robust needs a Cone, a Ball or an Ellipsoid")
    if space.is_summed:
        raise OptionError("robust and audit look at single nodes, of which sums=True shows nothing")
