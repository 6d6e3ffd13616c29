"""What compression costs, and what dynamic averaging is worth when everybody compresses.

``python -m simulations.reproduce compressed_streams`` runs periodic and dynamic averaging and the
paper's FedAvg with models in float32, int8 and int4 on a stationary, a drifting and a label-skewed
stream, and McMahan's FedAvg by label. What is compared is in `compressed_comparison`, what is run
in `compressed_grid`. Runs are shared with those of the papers and not repeated.
``experiment=mnist_100,mnist_drift`` chooses streams; ``rounds=200`` shortens them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from simulations.report.compression_plot import draw_compression
from simulations.report.figures import save
from simulations.report.tables import print_table
from simulations.reproduce.entry import Options
from simulations.reproduce.papers.comparison import write_findings_csv
from simulations.reproduce.papers.equal_loss import LOSS
from simulations.reproduce.papers.findings import Findings
from simulations.reproduce.papers.runner import reproduce
from simulations.reproduce.papers.spec import Reproduction
from simulations.reproduce.studies.compressed_comparison import (
    compare_forms,
    families,
    label_table,
    stream_table,
)
from simulations.reproduce.studies.compressed_grid import FINAL_LOSS, chosen_cells, judged_by

NAME = "compressed_streams"


def run(
    overrides: Sequence[str], output: Path, console: Console, seeds: Sequence[int] = (0,)
) -> Path:
    """Run the study; return the path of its picture, or of its numbers if it has no stream."""
    cells = chosen_cells(overrides)
    grid = Reproduction(
        name=NAME,
        paper="Studies of our own",
        where="",
        about="",
        cells=lambda _: cells,
        draw=draw_findings,
        seeds=len(seeds),
        minutes=0,
        quick=(),
        derive=compare_forms,
    )
    found = reproduce(grid, Options(output=output.parent, jobs=1), console)
    return write_findings(found, output, console)


def write_findings(found: Findings, output: Path, console: Console) -> Path:
    """Print the tables; write CSV, JSON and picture; return the path of the last one."""
    (output / f"{NAME}.json").write_text(found.to_json())
    write_findings_csv(found, output / f"{NAME}.csv")
    for title, table in (
        ("Streams", stream_table(found)),
        ("FedAvg by label", label_table(found)),
    ):
        if table.rows:
            print_table(table, console, title=title, caption=_CAPTIONS[title])
    for reason in found.failures:
        console.print(f"failed: {reason}", style="red", markup=False, soft_wrap=True)
    if not found.of(LOSS):
        return output / f"{NAME}.json"
    picture = output / f"{NAME}.png"
    save(draw_findings(found), picture)
    console.print(f"Picture: {picture}", soft_wrap=True, highlight=False, markup=False)
    return picture


def draw_findings(found: Findings) -> Figure:
    """Draw loss against bytes on every stream."""
    streams = {setting: families(found, setting) for setting in found.settings()}
    names = {setting: judged_by(setting) for setting in streams}
    return draw_compression(
        {setting: points for setting, points in streams.items() if points},
        {
            title: "test loss of the average" if name == FINAL_LOSS else name
            for title, name in names.items()
        },
        subtitle="one seed" if len(found.seeds) == 1 else f"means over {len(found.seeds)} seeds",
    )


_CAPTIONS = {
    "Streams": "loss (label-skewed: on test data) and models per learner; loss +: beside the same "
    "protocol in float32; of periodic: bytes at equal loss, – beyond its runs; up, quiet: shares "
    "of the bytes; own loss: per learner, on its own stream.",
    "FedAvg by label": "means over all rounds of the test loss; accuracy of the last model.",
}
