"""Import what is needed when it is needed, and without what is not."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pkgutil import resolve_name
from typing import Any


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Let imports of these packages fail in the block, as if they were not installed.

    For a library that imports packages it does not need here. One that was imported before stays.
    """
    hidden = [each for each in packages if each not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an ImportError
    try:
        yield
    finally:
        for each in hidden:
            del sys.modules[each]


def late(place: str) -> Callable[..., Any]:
    """Return a function that calls `place`, MODULE:NAME, and imports it at the first call."""
    function = cache(resolve_name)

    def call(*given: Any, **named: Any) -> Any:
        return function(place)(*given, **named)

    call.__name__ = place.rpartition(":")[2]
    return call
