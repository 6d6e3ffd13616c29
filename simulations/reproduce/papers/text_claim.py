"""A sentence of a paper about a picture, as a condition on findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulations.reproduce.papers.findings import Findings


@dataclass(frozen=True)
class TextClaim:
    """A sentence of a paper, and whether findings bear it out.

    Parameters
    ----------
    says : str
        The sentence, shortened, and made exact where the paper's words are not.
    holds : callable
        Gets the findings; None if what it takes was not measured.
    """

    says: str
    holds: Callable[[Findings], bool | None]
