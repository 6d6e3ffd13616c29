"""A Flower app: a frozen ResNet-18 with a new output layer, with PyTorch and torchvision."""
