"""What all requests share: they check themselves, and travel as text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self


@dataclasses.dataclass(frozen=True)
class JsonRequest:
    """Base of the frozen dataclasses that a server sends along with a message."""

    def check(self, rules: Mapping[str, tuple[bool, str]]) -> None:
        """Raise a ValueError for the first field that breaks its rule.

        Parameters
        ----------
        rules : mapping
            From the field's name to whether it holds and what is allowed.
        """
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def to_json(self) -> str:
        """Return the request as text, without what is at its default."""
        given = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        return json.dumps(given)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the request that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        unknown = sorted(values.keys() - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"the server asks for {unknown}, which this version does not know")
        return cls(**values)
