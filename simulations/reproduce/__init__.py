"""Everything that can be run again: the papers' tables and figures, our own studies, the demo.

``python -m simulations.reproduce`` lists it, ``python -m simulations.reproduce NAME`` runs it.

- `catalogue`: what there is. `entry`: what an entry has, and what can be asked of it.
- `papers/`: an experiment is an entry of a spec (`gems2019`, …), its published numbers in
  ``published.yaml``, and its config in ``conf/experiment``; what was measured in full is kept in
  ``papers/measured`` and shown on ``docs/results.md``.
- `studies/`: an experiment of our own is one module with a function `run`, and a line in the
  catalogue.
"""
