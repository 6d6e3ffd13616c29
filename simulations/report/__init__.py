"""Tables, plots and one web page from the files that runs leave behind.

``python -m simulations.report DIR…`` reads only ``result.json``, ``rounds.jsonl`` and
``partition.json`` of each run, so a report can be made on another machine, long after the runs and
without Flower, Torch or Hydra.

- `runs`: files to values; what is unfinished or damaged is named, never fatal.
- `summary`: runs to methods; means and standard deviations over seeds.
- `curves`: accuracy against rounds and against the bytes sent so far.
- `columns`: what the tables and CSV files say of a method, and of a run.
- `run_tables`, `run_plots`, `run_page`: the terminal and CSV, the PNG files, ``report.html``.

What the papers' comparisons and the studies use, too, knows nothing of runs:

- `tables`: rows of text on the screen, in CSV, in Markdown and in HTML.
- `figures`, `frontiers`: canvas, colours, error bars, headings; loss against bytes.
- `pages`: one HTML file that holds everything.
"""
