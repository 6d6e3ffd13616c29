"""The papers' experiments, a module for each paper with its `STUDIES`."""
