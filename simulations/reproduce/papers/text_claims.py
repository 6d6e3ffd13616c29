"""What the papers' texts say of their figures, by row of `items.yaml`.

A figure prints no numbers to compare with; the sentences about it can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping

from simulations.reproduce.papers import dynamic_sentences, gems_sentences
from simulations.reproduce.papers.text_claim import TextClaim

CLAIMS_OF_TEXT: Mapping[str, tuple[TextClaim, ...]] = {
    **gems_sentences.SENTENCES,
    **dynamic_sentences.SENTENCES,
}
