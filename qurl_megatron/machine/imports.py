"""Imports without packages that are installed, but that nothing here uses."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Let imports of packages fail in this block, as if they were not installed.

    A package that was imported before stays.
    """
    hidden = [each for each in packages if each not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an ImportError
    try:
        yield
    finally:
        for each in hidden:
            del sys.modules[each]
