"""An option that a class or function does not have is refused with what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from gems_flwr.errors import OptionError

Class = TypeVar("Class", bound=type)
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


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


def refuse_keywords(
    instead: Mapping[str, str],
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Return a decorator for functions that once had other keywords.

    Parameters
    ----------
    instead : mapping from str to str
        By the old keyword, what to write now.
    """

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        @functools.wraps(function)
        def checked(*values: Arguments.args, **options: Arguments.kwargs) -> Returned:
            for name in options:
                if name in instead:
                    text = f"write {instead[name]}: {function.__name__} has no {name}="
                    raise OptionError(text)
            return function(*values, **options)

        return checked

    return decorate
