"""Run commands of `qurl` in the tree that it is started in, once for each line of input.

Each line's commands run in a fork, which shares the libraries imported here, and imports the
package as it is then.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout

import reasoning_gym  # noqa: F401
import torch  # noqa: F401
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401


def ended(words: list[str]) -> tuple[int | str | None, str, str, list[str]]:
    """Return a command's exit code and output, and the modules that are imported then."""
    from qurl_megatron import cli

    code: int | str | None = 0
    sys.argv = ["qurl", *words]
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as error:
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code or 0
    return code, output.getvalue(), error.getvalue(), list(sys.modules)


if __name__ == "__main__":
    for line in sys.stdin:
        if os.fork() == 0:
            print(json.dumps([ended(words) for words in json.loads(line)]), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
