"""Import a library without optional packages of its own, which are installed but not needed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Let imports of these packages fail in the block, as if they were not installed.

    A package that was imported before stays.
    """
    hidden = [each for each in packages if each not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an ImportError
    try:
        yield
    finally:
        for each in hidden:
            del sys.modules[each]
