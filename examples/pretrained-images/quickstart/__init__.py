"""A Flower app: a frozen EfficientNet-Lite0 with a new output layer, on images."""
