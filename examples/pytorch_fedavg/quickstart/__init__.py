"""An ordinary Flower app: handwritten digits with PyTorch."""
