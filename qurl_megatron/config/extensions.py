"""The extensions: folders of `qurl_megatron/extensions/`, each of which can be deleted.

No file of the core imports one. It asks for a module by name, here alone.
"""

import importlib
from importlib.util import find_spec
from types import ModuleType

from qurl_megatron.config.schema import ConfigError

FOLDER = "qurl_megatron.extensions"
COMMANDS = {
    "agent": "agents",
    "serve": "elsewhere",
    "report": "report",
    "mismatch": "mismatch",
    "plan": "planning",
    "rehearse": "rehearsal",
}
"""The commands of `qurl` that extensions bring: each is a function of that name in `command.py`."""


def find(extension: str, module: str) -> ModuleType | None:
    """Return a module of an extension; None if the extension was deleted."""
    if not _is_there(extension):
        return None
    return importlib.import_module(f"{FOLDER}.{extension}.{module}")


def needed(extension: str, module: str, by: str) -> ModuleType:
    """Return a module of an extension, for the field or option `by`.

    Raises:
        ConfigError: the extension was deleted.
    """
    check(extension, by)
    return importlib.import_module(f"{FOLDER}.{extension}.{module}")


def check(extension: str, by: str) -> None:
    """Check that an extension is there, for the field or option `by`.

    Raises:
        ConfigError: it was deleted.
    """
    if not _is_there(extension):
        raise ConfigError(f"{by}: needs qurl_megatron/extensions/{extension}, which was deleted")


def _is_there(extension: str) -> bool:
    spec = find_spec(f"{FOLDER}.{extension}")
    return spec is not None and spec.origin is not None  # else only its __pycache__ is left
