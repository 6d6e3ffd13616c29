"""A Flower app: a frozen MiniLM with a new output layer, on texts."""
