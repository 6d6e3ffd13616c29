"""Server side: a point of the intersection, or a proof that there is none."""

from gems_flwr.intersect.aggregate import (
    Aggregate,
    EmptyIntersectionError,
    OnEmpty,
    Public,
    aggregate_spaces,
    largest_epsilon,
)
from gems_flwr.intersect.audit import Audit, audit_nodes
from gems_flwr.intersect.balls import intersect_balls, two_balls
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.equation2 import descend_equation2
from gems_flwr.intersect.front import intersect
from gems_flwr.intersect.mixed import intersect_convex
from gems_flwr.intersect.objective import PublicSample
from gems_flwr.intersect.options import ConeOptions
from gems_flwr.intersect.pooled import PooledMoments, pool_moments
from gems_flwr.intersect.result import Intersection, Select, Status
from gems_flwr.intersect.screen import Screened, screen_spaces
from gems_flwr.intersect.subsets import Subset, largest_subset
from gems_flwr.intersect.unions import intersect_unions

__all__ = [
    "Aggregate",
    "Audit",
    "ConeOptions",
    "EmptyIntersectionError",
    "Intersection",
    "OnEmpty",
    "PooledMoments",
    "Public",
    "PublicSample",
    "Screened",
    "Select",
    "Status",
    "Subset",
    "aggregate_spaces",
    "audit_nodes",
    "descend_equation2",
    "intersect",
    "intersect_balls",
    "intersect_convex",
    "intersect_unions",
    "largest_epsilon",
    "largest_subset",
    "pool_moments",
    "screen_spaces",
    "solve_cones",
    "two_balls",
]
