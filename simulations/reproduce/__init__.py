"""Everything that can be run again: the papers' tables and figures, our own studies, the demo.

``python -m simulations.reproduce`` lists it, ``python -m simulations.reproduce NAME`` runs it.

- `study`: the common frame; a paper's experiment or a study is a `Study`. `catalogue`: all of them.
- `runner`: from a study to `findings`; `measures`: what is read off a run.
- `comparison`: the one table, the paper's numbers beside ours (``published.yaml``), with a verdict.
- `results`: the tables of ``docs/results.md``, from what is kept of full runs in ``measured``.
"""
