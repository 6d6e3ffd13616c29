"""A Flower app: a convolutional network and handwritten digits, with PyTorch."""
