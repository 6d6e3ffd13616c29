"""Networks as chains of layers: what a layer sees, other neurons in it, frozen layers."""
