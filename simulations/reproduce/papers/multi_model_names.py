"""What the rows and columns of the multi-model reproduction are called."""

from __future__ import annotations

# The slides' Table I, best first.
RULES = ("full", "stale", "gvr", "lvr", "mifa", "scaffold", "fedvarp", "random")
AS_PUBLISHED = "3 tasks"
LARGE_STEPS = "3 tasks, rate 0.1"
WARM = "rate 0.1, every pair first"
UNIT_STEPS = "rate 0.1, steps of size 1"


def relative(quantity: str) -> str:
    """Return what an accuracy is called beside that of full participation."""
    return quantity.replace("accuracy", "accuracy relative to full participation")
