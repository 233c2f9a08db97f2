"""How a command ends on wrong input. It imports little, so that `qurl --help` is fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn an error in the user's input into one line on stderr and exit code 2."""
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.data.problems import DataError
    from qurl_megatron.model.architecture import ArchitectureError
    from qurl_megatron.quantization.offline import OfflineError
    from qurl_megatron.quantization.quantize import NonFiniteWeight

    try:
        yield
    except (ArchitectureError, ConfigError, DataError, NonFiniteWeight, OfflineError) as error:
        print(f"qurl: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        print(f"qurl: {text}", file=sys.stderr)
        sys.exit(2)
