"""``python -m simulations.studies STUDY [overrides]``.

Studies: differences, frontiers, honest_radii, hostile, hostile_models, layer_size, leaks,
multi_model, soak. The papers' own experiments are those of ``python -m simulations.paper``.

Overrides are those of ``python -m simulations.run``; data set, partition, nodes and seed count.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hydra.errors import HydraException
from rich.console import Console

from gems_flwr.errors import GemsError
from simulations.config import explain
from simulations.studies import (
    differences,
    frontiers,
    honest_radii,
    hostile,
    hostile_models,
    layer_size,
    leaks,
    multi_model_rates,
    soak,
)

STUDIES = {
    "differences": differences.run,
    "frontiers": frontiers.run_all,
    "honest_radii": honest_radii.run,
    "hostile": hostile.run,
    "hostile_models": hostile_models.run,
    "layer_size": layer_size.run,
    "leaks": leaks.run,
    "multi_model": multi_model_rates.run_all,
    "soak": soak.run,
}


def main() -> int:
    """Run a study; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m simulations.studies", description=__doc__)
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--output", type=Path, default=Path("runs/studies"))
    options = parser.parse_args()
    console = Console()
    try:
        STUDIES[options.study](options.overrides, options.output, console)
    except (HydraException, GemsError, OSError) as error:
        console.print(explain(error, options.overrides), style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
