"""How a command ends on wrong input.

It imports nothing of the package before there is an error, so that commands start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn an error in the user's input into one line on stderr and exit code 2."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _input_errors()):
            text = str(error)
        elif isinstance(error, OSError):
            text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        else:
            raise
        print(f"qurl: {text}", file=sys.stderr)
        sys.exit(2)


def _input_errors() -> tuple[type[Exception], ...]:
    """Return the errors whose text is the line that a user sees."""
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.data.problems import DataError
    from qurl_megatron.model.architecture import ArchitectureError
    from qurl_megatron.quantization.offline import OfflineError
    from qurl_megatron.quantization.quantize import NonFiniteWeight

    return ArchitectureError, ConfigError, DataError, NonFiniteWeight, OfflineError
