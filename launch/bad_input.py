"""How a command ends on wrong input, and when a server fails.

It imports nothing of the package before there is an error, so that commands start fast.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn an error in the user's input into one line on stderr and exit code 2.

    A server that fails, or samples wrongly, ends the command with its message and code 1.
    """
    try:
        yield
    except Exception as error:
        code, text = 2, str(error)
        if isinstance(error, OSError):
            text = f"{error.strerror}: {error.filename}" if error.filename else text
        else:
            from qurl_megatron.algorithm.proof import WrongRollouts
            from qurl_megatron.config.schema import ConfigError
            from qurl_megatron.data.entries import DataError
            from qurl_megatron.model.architecture import ArchitectureError
            from qurl_megatron.model.repository import HubError
            from qurl_megatron.quantization.quantize import NonFiniteWeight
            from qurl_megatron.rollout.server import ServerFailed

            # The errors whose text is the line that a user sees.
            of_input = (ArchitectureError, ConfigError, DataError, HubError, NonFiniteWeight)
            if not isinstance(error, (*of_input, ServerFailed, WrongRollouts)):
                raise
            code = 2 if isinstance(error, of_input) else 1
        if code == 2 and not text.isprintable():  # what it quotes is the user's
            text = ascii(text)[1:-1]
        print(f"qurl: {text}", file=sys.stderr)
        sys.exit(code)
