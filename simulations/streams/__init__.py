"""Streams: nodes that see a mini-batch at a time and are judged before they learn from it.

- `drift`: when the concept changes, and how.
- `source`: which batch a node sees when.
- `learning`: one step per batch, with the loss measured before it.
"""
