"""An option that a class does not have is refused with what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from gems_flwr.errors import OptionError

Class = TypeVar("Class", bound=type)


def with_hints(hint: Callable[[type, str], str]) -> Callable[[Class], Class]:
    """Return a decorator for classes whose users may take an option for one that it is not.

    Parameters
    ----------
    hint : callable
        Gets the class and the name of an option that it does not have; returns the message.
    """

    def decorate(cls: Class) -> Class:
        build = cls.__init__  # type: ignore[misc]
        known = inspect.signature(build).parameters

        # With its own signature, so that help, editors and config checks see the options.
        @functools.wraps(build)
        def checked(self: Any, *values: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    raise OptionError(hint(type(self), name))
            build(self, *values, **options)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate
