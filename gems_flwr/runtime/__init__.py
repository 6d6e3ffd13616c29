"""What runs are made of: grids, byte counting, checkpoints, seeds, Flower's command line."""
