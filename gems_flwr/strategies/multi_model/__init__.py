"""Several models on the same nodes: the strategy, and its sampling rules."""
