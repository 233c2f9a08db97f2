"""The key that a run and its servers elsewhere share."""

import os
import re
import shlex
import stat
from pathlib import Path

from qurl_megatron.config.schema import ConfigError

VARIABLE = "QURL_SERVERS_KEY"
HOW_TO_MAKE_ONE = "make one with: (umask 077; openssl rand -hex 32 > qurl.key)"


def read_key(key_file: str, field: str) -> str:
    """Return the key.

    Args:
        key_file: the file that holds it; empty: the variable QURL_SERVERS_KEY holds it.
        field: the field that names the file, for messages.

    Raises:
        ConfigError: there is no key, others can read its file, or it has another form.
    """
    if key_file:
        path = Path(key_file)
        if not path.is_file():
            raise ConfigError(f"{field}={key_file}: no such file; {HOW_TO_MAKE_ONE}")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{field}={key_file}: others can read it; chmod 600 {shlex.quote(key_file)}"
            )
        key, source = path.read_text(errors="replace").strip(), f"{field}={key_file}"
    else:
        key, source = os.environ.get(VARIABLE, ""), VARIABLE
        if not key:
            raise ConfigError(
                f"{field}: missing; servers elsewhere need a key, in a file or in {VARIABLE}; "
                f"{HOW_TO_MAKE_ONE}"
            )
    # SGLang would take a key that begins with a dash for an option.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.~+/=-]{15,511}", key):
        raise ConfigError(
            f"{source}: a key has 16 to 512 letters, digits and _.~+/=-, and begins with a letter "
            f"or digit; {HOW_TO_MAKE_ONE}"
        )
    return key
