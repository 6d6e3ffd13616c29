"""Means of models, how far models are apart, and when averaging them pays.

A model is a mapping from names to numpy arrays; nothing here knows about Flower.

- `means`: weighted means of models and of metrics.
- `robust_means`, `krum`: medians, trimmed means and choices that a few bad models cannot move far.
- `robust_rules`: which of these means replaces some models, and how many liars it bears.
- `distances`: squared distances between models.
- `synchronisation`: an averaging of models that live on the nodes.
- `balancing`: the coordinator of dynamic averaging as a pure state machine.
- `threshold`: thresholds of dynamic averaging that move.
- `steps`: a step of the global model from some clients' updates, and old ones of the others.
"""
