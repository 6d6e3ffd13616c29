"""One call for any mixture of spaces: which solver, which point.

Selection rules (the papers take whatever descent meets first):

``first``      first point in all spaces on the way from the average, as in the papers
``margin``     the point deepest inside all spaces
``objective``  for cones: the smallest expected loss under the moments
"""

from __future__ import annotations

from collections.abc import Sequence

from gems_flwr.errors import OptionError
from gems_flwr.intersect.balls import intersect_balls
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.mixed import Convex, intersect_convex
from gems_flwr.intersect.result import Intersection, Select
from gems_flwr.intersect.unions import intersect_unions
from gems_flwr.spaces.ball import BallSet, BallSpace
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.space_files import Space


def intersect(
    spaces: Sequence[Space],
    select: Select | None = None,
) -> Intersection:
    """Return a model in the spaces of all nodes, or a proof that there is none.

    Parameters
    ----------
    spaces : sequence of spaces
        One per node, of one dimension.
    select : {"first", "margin", "objective"}, optional
        Which point; ``objective`` if there are only cones, else ``first``.

    Raises
    ------
    OptionError
        If there is no space, the dimensions differ, or the rule does not fit the spaces.
    """
    if not spaces:
        raise OptionError("spaces: expected at least one, got none")
    cones = [space for space in spaces if isinstance(space, ClassMomentCone)]
    only_cones = len(cones) == len(spaces)
    rule: Select = select or ("objective" if only_cones else "first")
    if rule == "objective":
        if not only_cones:
            kinds = sorted({space.kind for space in spaces})
            raise OptionError(f"select: objective expects only cones, got {kinds}")
        return solve_cones(cones)
    if rule not in ("first", "margin"):
        raise OptionError(f"select: expected first, margin or objective, got {rule!r}")
    if any(isinstance(space, BallSet) and len(space.balls) > 1 for space in spaces):
        return intersect_unions(spaces, rule)
    plain: list[Convex] = [s.balls[0] if isinstance(s, BallSet) else s for s in spaces]
    balls = [space for space in plain if isinstance(space, BallSpace)]
    if len(balls) == len(plain):
        return intersect_balls(balls, rule)
    return intersect_convex(plain, rule)
