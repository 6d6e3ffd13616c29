"""Federated learning on Flower with a fixed, tiny communication budget."""

__version__ = "0.1.0"
