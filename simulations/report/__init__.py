"""Tables, plots and one web page from the files that runs leave behind.

``python -m simulations.report DIR…`` reads only ``result.json``, ``rounds.jsonl`` and
``partition.json`` of each run, so a report can be made on another machine, long after the runs and
without Flower, Torch or Hydra.

- `runs`: files to values; what is unfinished or damaged is named, never fatal.
- `summary`: runs to methods; means and standard deviations over seeds.
- `curves`: accuracy against rounds and against the bytes sent so far.
- `table`, `plots`, `page`: the terminal and CSV, the PNG files, ``report.html``.
"""
