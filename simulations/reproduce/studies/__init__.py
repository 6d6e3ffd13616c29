"""Studies of our own, a module for each with its `STUDY`."""
