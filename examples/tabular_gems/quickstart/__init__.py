"""A Flower app: a network with one output for a table, with PyTorch."""
