"""What a node adds to a sum of which only the total is looked at.

An instruction that asks for a summand says in its config how numbers are to be written
(``sum-layout``: the sections, and how many nodes may add something). The reply has, beside the
node's name, one ConfigRecord ``summand`` with the packed elements of the sections' rings: as many
bytes as `Layout.size_bytes` and nothing else. Whether masks are added on the way or not, it has
the same bytes, and the total the same digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from gems_flwr.errors import BadReplyError, OptionError
from gems_flwr.secure.fixed_point import Layout, Section, Words
from gems_flwr.spaces.checks import shown
from gems_flwr.typing import Float
from gems_flwr.wire.asking import put, said
from gems_flwr.wire.keys import SUM_LAYOUT, SUMMAND, WORDS
from gems_flwr.wire.model_replies import pack_name


def put_layout(content: RecordDict, layout: Layout) -> None:
    """Say in an instruction how a summand is to be written."""
    put(content, SUM_LAYOUT, layout_to_json(layout))


def requested_layout(content: RecordDict) -> Layout | None:
    """Return how a summand is to be written, or None where none is asked for.

    Raises
    ------
    OptionError
        If it cannot be read, or a ring is too small for its nodes.
    """
    text = said(content, SUM_LAYOUT)
    return layout_from_json(text) if isinstance(text, str) else None


def layout_to_json(layout: Layout) -> str:
    """Return a layout as text."""
    sections = [
        [s.name, list(s.shape), s.bound, s.bits, int(s.of_total)]
        + ([] if s.unit is None else [s.unit])
        for s in layout.sections
    ]
    return json.dumps({"nodes": layout.nodes, "sections": sections}, separators=(",", ":"))


def layout_from_json(text: str) -> Layout:
    """Return the layout that `layout_to_json` wrote.

    Raises
    ------
    OptionError
        If it is none.
    """
    try:
        read = json.loads(text)
        sections = [
            Section(
                str(name),
                tuple(int(n) for n in shape),
                float(bound),
                int(bits),
                bool(whole),
                *(float(unit) for unit in rest[:1]),
            )
            for name, shape, bound, bits, whole, *rest in read["sections"]
        ]
        return Layout(sections, nodes=int(read["nodes"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"the layout of a summand cannot be read: {error}") from error


def pack_summand(values: Mapping[str, Float], layout: Layout, *, name: str) -> RecordDict:
    """Return the content of a reply with a summand.

    Raises
    ------
    SpaceError
        If a number is not finite or larger than the layout says, or an array has another shape.
    """
    return summand_reply(layout.pack(layout.encode(values)), name=name)


def summand_reply(words: bytes, *, name: str) -> RecordDict:
    """Return the content of a reply with packed elements, masked or not."""
    return RecordDict({SUMMAND: ConfigRecord({WORDS: words}), **pack_name(name)})


def summand_words(content: RecordDict) -> bytes | None:
    """Return the packed elements in a reply, or None where it has none."""
    record = content.get(SUMMAND)
    words = record.get(WORDS) if isinstance(record, ConfigRecord) else None
    return words if isinstance(words, bytes) else None


def unpack_summand(content: RecordDict, layout: Layout) -> Words:
    """Validate a reply with an unmasked summand; return its elements.

    Raises
    ------
    BadReplyError
        If there are not as many bytes, or a number is beyond its bound.
    """
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
