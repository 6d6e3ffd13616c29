"""Every reproduction there is."""

from __future__ import annotations

from simulations.paper import dynamic, gems2018, gems2019, slides
from simulations.paper.spec import Reproduction

CATALOGUE: dict[str, Reproduction] = {
    each.name: each
    for module in (gems2019, gems2018, dynamic, slides)
    for each in module.REPRODUCTIONS
}
