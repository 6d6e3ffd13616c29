"""Models in a quarter of their bytes, or less: differences in a few bits, and what they leave over.

- `quantisation`: blocks of numbers as small whole numbers with a scale each.
- `difference_coding`: a model as a difference to one that the receiver has, as bytes.
- `average_coding`: an average for nodes that all have the same reference.
"""
