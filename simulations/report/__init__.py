"""Tables, plots and one web page from the files that runs leave behind.

``python -m simulations.report DIR…`` reads only ``result.json``, ``rounds.jsonl`` and
``partition.json`` of each run, so a report can be made on another machine, long after the runs and
without Flower, Torch or Hydra.

- `runs`: files to values; what is unfinished or damaged is named, never fatal.
- `summary`: runs to methods; means and standard deviations over seeds, curves over rounds.
- `columns`: what tables and CSV files have of a method, and of a run.
- `plots`: the PNG files. `report`: everything together, and ``report.html``.

What the papers' comparisons and the studies use, too, knows nothing of runs: `tables` (the screen,
CSV, Markdown, HTML), `plotting` (canvas, styles, lines, names beside points), `pages`.
"""

from simulations.report.report import build_report
from simulations.report.runs import NoRunsError, read_runs

__all__ = ["NoRunsError", "build_report", "read_runs"]
