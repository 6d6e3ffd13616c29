"""The error of a construction that cannot succeed."""

from __future__ import annotations


class NotGoodEnoughError(ValueError):
    """Not even the centre is good enough, so there is no space around it.

    Parameters
    ----------
    asked : float
        The accuracy (at least) or loss (at most) that was asked for.
    reached : float
        What the centre reaches on the same data.
    what : {"accuracy", "loss"}
        Which of the two.
    """

    def __init__(self, asked: float, reached: float, what: str) -> None:
        relation = "at least" if what == "accuracy" else "at most"
        super().__init__(
            f"epsilon: the centre must reach {what} {relation} {asked:g}, it reaches {reached:g}; "
            "relax epsilon or train longer"
        )
        self.asked, self.reached, self.what = asked, reached, what
