"""The public face of a room: names that are looked up in its modules when they are first used.

Importing a room then loads neither torch nor SciPy until one of its names needs them, and modules
of two rooms may use each other's names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_face(
    room: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return a room's ``__all__``, ``__getattr__`` and ``__dir__``, from its names by module."""
    homes = {name: module for module, listed in names.items() for name in listed.split()}

    def look_up(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module '{room}' has no attribute '{name}'")
        value: object = getattr(importlib.import_module(f"{room}.{homes[name]}"), name)
        setattr(sys.modules[room], name, value)
        return value

    return sorted(homes), look_up, lambda: sorted({*vars(sys.modules[room]), *homes})
