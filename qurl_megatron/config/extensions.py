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
BUILT_ON = {
    "planning": "colocated",  # it plans layouts whose servers are colocated
    "rehearsal": "planning",  # it plays the subjects of a plan, and prints what the plan says
}
"""Extensions that import another, which must be there too."""


def find(extension: str, module: str) -> ModuleType | None:
    """Return a module of an extension; None if it was deleted, or one that it is built on."""
    if not is_there(extension):
        return None
    return importlib.import_module(f"{FOLDER}.{extension}.{module}")


def is_there(extension: str) -> bool:
    """Return whether neither an extension nor one that it is built on was deleted."""
    return not _missing(extension)


def needed(extension: str, module: str, by: str) -> ModuleType:
    """Return a module of an extension, for the field or option `by`.

    Raises:
        ConfigError: the extension was deleted, or one that it is built on.
    """
    check(extension, by)
    return importlib.import_module(f"{FOLDER}.{extension}.{module}")


def check(extension: str, by: str) -> None:
    """Check that an extension is there, for the field or option `by`.

    Raises:
        ConfigError: it was deleted, or one that it is built on.
    """
    if missing := _missing(extension):
        raise ConfigError(f"{by}: needs qurl_megatron/extensions/{missing}, which was deleted")


def _missing(extension: str) -> str:
    """Return the first folder that an extension lacks: its own, or one that it is built on."""
    spec = find_spec(f"{FOLDER}.{extension}")
    if spec is None or spec.origin is None:  # only its __pycache__ is left
        return extension
    return _missing(BUILT_ON[extension]) if extension in BUILT_ON else ""
