"""Totals over nodes: what is asked of many and looked at only as a sum.

The server says in a layout how numbers are written: sections with shapes, bounds and bits
(`gems_flwr.secure.fixed_point`). A summand is one ConfigRecord with the packed elements of the
sections' rings, and nothing else. `PlainSums` adds what nodes send as it is; masks are another
carrier behind the same method (`gems_flwr.carriers.masked`), and the total has the same digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from gems_flwr.core.question import SumQuestion
from gems_flwr.errors import BadReplyError, OptionError, shown
from gems_flwr.secure.fixed_point import Layout, Section, Words
from gems_flwr.typing import Float

if TYPE_CHECKING:
    from gems_flwr.core.round import Round

SUMMAND, LAYOUT, WORDS = "summand", "sum-layout", "words"
_TEXT = "text"


@dataclass(frozen=True, eq=False)
class Total:
    """Sums over nodes; as a collection, the names of these."""

    values: Mapping[str, Float]  # by section, in double precision
    nodes: tuple[str, ...]  # whose sums these are, ordered by name
    # By section, how much rounding to the grid can have moved a number, at most.
    errors: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[Any, ...] = ()  # what the question reads beside each summand, by node

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    @classmethod
    def of_words(
        cls, layout: Layout, words: Words, nodes: Sequence[str], notes: Sequence[Any] = ()
    ) -> Total:
        """Return the total that the added elements of the rings stand for."""
        # Every summand is rounded to the nearest point of the grid.
        errors = {s.name: len(nodes) * s.step(layout.nodes) / 2 for s in layout.sections}
        return cls(layout.decode(words), tuple(nodes), errors, tuple(notes))


class PlainSums:
    """Adds what nodes send as it is; `MaskedSums` are the other way behind `Round.total`."""

    is_masked = False

    def total(
        self,
        round: Round,
        question: SumQuestion,
        sections: Sequence[Section],
        nodes: Sequence[str],
        at_least: int,
    ) -> Total:
        """Return the sum over the nodes that answer; see `Round.total`."""
        layout = Layout(sections, nodes=max(1, len(nodes)))

        def read(_: object, content: RecordDict) -> tuple[Words, Any]:
            words = unpack_summand(content, layout)
            if type(question).check_summand is not SumQuestion.check_summand:
                single = Total.of_words(layout, words, [""])
                question.check_summand(single.values, single.errors)
            return words, question.note(content)

        answers = round.exchange(
            dict.fromkeys(nodes, question),
            read,
            beside={LAYOUT: layout_record(layout)},
            at_least=at_least,
        )
        words = layout.add([words for words, _ in answers.values()])
        return Total.of_words(layout, words, list(answers), [note for _, note in answers.values()])


# --- on the wire ----------------------------------------------------------------------------


def layout_record(layout: Layout) -> ConfigRecord:
    """Return the record that says how a summand is to be written."""
    sections = [
        [s.name, list(s.shape), s.bound, s.bits, int(s.of_total)]
        + ([] if s.unit is None else [s.unit])
        for s in layout.sections
    ]
    text = json.dumps({"nodes": layout.nodes, "sections": sections}, separators=(",", ":"))
    return ConfigRecord({_TEXT: text})


def take_layout(content: RecordDict) -> Layout | None:
    """Take out of a message how a summand is to be written, or None where none is asked for.

    An `OptionError` if it cannot be read, or a ring is too small for its nodes.
    """
    record = content.pop(LAYOUT, None)
    text = record.get(_TEXT) if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        return None
    try:
        read = json.loads(text)
        sections = [
            Section(
                str(name), tuple(map(int, shape)), float(bound), int(bits), bool(whole),
                *map(float, unit[:1]),
            )
            for name, shape, bound, bits, whole, *unit in read["sections"]
        ]  # fmt: skip
        return Layout(sections, nodes=int(read["nodes"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"the layout of a summand cannot be read: {error}") from error


def summand_record(words: bytes) -> RecordDict:
    """Return the content of a reply with packed elements, masked or not."""
    return RecordDict({SUMMAND: ConfigRecord({WORDS: words})})


def summand_words(content: RecordDict) -> bytes | None:
    """Return the packed elements in a reply, or None where it has none."""
    record = content.get(SUMMAND)
    words = record.get(WORDS) if isinstance(record, ConfigRecord) else None
    return words if isinstance(words, bytes) else None


def unpack_summand(content: RecordDict, layout: Layout) -> Words:
    """Validate a reply with an unmasked summand; return its elements."""
    data = summand_words(content)
    if data is None or len(data) != layout.size_bytes:
        got = shown(content.get(SUMMAND)) if data is None else f"{len(data)} bytes"
        raise BadReplyError(f"'{SUMMAND}' must have {layout.size_bytes} bytes, got {got}")
    words = layout.unpack(data)
    for section, part in layout.split(words):
        most = round(section.bound / section.step(layout.nodes))
        signed = section.signed(part)
        # Of the least element of a ring there is no absolute value within it.
        if max(int(signed.max(initial=0)), -int(signed.min(initial=0))) > most:
            raise BadReplyError(f"'{section.name}' has numbers above its bound {section.bound:g}")
    return np.asarray(words)
