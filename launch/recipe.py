"""What a command's RECIPE names: a recipe of the package, or a file of the user's own.

    grpo             the recipe of the package, whatever files there are
    FILE.yaml, .yml  fields and values; `recipe: grpo` says what the others begin with
    FILE.py:NAME     a function that takes nothing and returns a Config

A file is read once, when the command begins. A job gets its fields as words, and so does each run
of a sweep: later changes of the file do not reach them.
"""

import dataclasses
import difflib
import hashlib
import importlib
import json
import pkgutil
import re
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from qurl_megatron.config import yaml_text
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import (
    field_meanings,
    first_line,
    from_tree,
    leaf_values,
    no_such_field,
    overrides_between,
    with_overrides,
)
from qurl_megatron.data.rewards import why

RECIPES = "qurl_megatron.recipes"
BASIS = "grpo"  # what a file's words change if it begins with no recipe of the package
LARGEST_BYTES = 1_000_000
OWN_RECIPE = "a file of your own is FILE.yaml or FILE.py:NAME"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe of the package or a file, as read."""

    config: Config

    package: str
    """The recipe of the package that it is, or begins with. Empty: none."""

    file: dict[str, str]
    """`Config.recipe_file`."""

    def as_words(self) -> tuple[str, list[str]]:
        """Return a recipe of the package and the `field=value` words that turn it into this one."""
        if not self.file:
            return self.package, []
        package = self.package or BASIS
        words = overrides_between(load_recipe(package).config, self.config)
        return package, [*words, f"recipe_file={json.dumps(self.file)}"]


def load_recipe(recipe: str) -> Recipe:
    """Return the recipe of this name or from this file.

    Raises:
        ConfigError: there is none, or a field of the file is wrong.
    """
    if recipe in recipe_names():
        module = importlib.import_module(f"{RECIPES}.{recipe}")
        return Recipe(module.recipe(), recipe, {})
    if recipe.endswith(".py"):
        names = re.findall(r"^def (\w+)\(\)", _content(Path(recipe)).decode(), re.MULTILINE)
        raise ConfigError(
            f"{recipe}: which function? give {recipe}:{' or :'.join(names) or 'NAME'}, a function "
            "that takes nothing and returns a Config"
        )
    if not is_own(recipe):
        names = recipe_names()
        close = difflib.get_close_matches(recipe, names, n=1)
        known = f"there are {', '.join(names)}; {OWN_RECIPE}"
        hint = f"did you mean {close[0]}?" if close else known
        raise ConfigError(f"{recipe}: no such recipe; {hint}")
    place, _, function = recipe.rpartition(":")
    return _of_python(Path(place), function) if place.endswith(".py") else _of_yaml(Path(recipe))


def is_own(recipe: str) -> bool:
    """Return whether a recipe is a file."""
    return recipe.endswith((".yaml", ".yml")) or recipe.rpartition(":")[0].endswith(".py")


def recipe_names() -> list[str]:
    """Return the names of all recipes of the package, sorted."""
    recipes = importlib.import_module(RECIPES)
    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def recipe_meanings() -> dict[str, str]:
    """Return the first line of the docstring of each recipe of the package, by name."""
    modules = {name: importlib.import_module(f"{RECIPES}.{name}") for name in recipe_names()}
    return {name: first_line(module) for name, module in modules.items()}


def default_name(recipe: str) -> str:
    """Return the name of a run that the user gave none: recipe and time."""
    return f"{name_prefix(recipe)}-{time.strftime('%Y%m%d-%H%M%S')}"


def name_prefix(recipe: str) -> str:
    """Return what the names of a recipe's runs begin with, if the user gives none."""
    file = Path(recipe.rpartition(":")[0] or recipe)
    return re.sub(r"[^\w.+-]+", "_", file.stem).lstrip(".+-") or "run"


def run_function(function: str, *given: Any) -> Any:
    """Call FILE.py:NAME or MODULE:NAME and return its result.

    A file may import its neighbours. They do not shadow modules that are imported later.

    Raises:
        ConfigError: it cannot be imported, or fails.
    """
    place, _, name = function.rpartition(":")
    found = [*sys.path]
    try:
        if place.endswith(".py"):
            sys.path.insert(0, str(Path(place).absolute().parent))
            names = runpy.run_path(place)
        else:
            names = vars(importlib.import_module(place))
        if name not in names:
            raise ImportError(f"it has no function {name}")
        return names[name](*given)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {frame.lineno}" for frame in frames if frame.filename == place]
        raise ConfigError(f"{function}{lines[-1] if lines else ''}: {why(error)}") from None
    finally:
        sys.path[:] = found


def _of_yaml(path: Path) -> Recipe:
    content = _content(path)
    config, package = Config(), ""
    leaves = {"recipe": "", **leaf_values(config), "data": []}  # data may be a list
    words = yaml_text.words(content, leaves, path)
    # The recipe first, wherever it stands: all other words change it.
    for line, word in sorted(words, key=lambda each: not each[1].startswith("recipe=")):
        field, _, value = word.partition("=")
        try:
            if field != "recipe":
                config = with_overrides(config, [word])
            elif is_own(value):
                raise ConfigError(f"recipe: {value}: must be a recipe of the package")
            elif value == "null":
                raise ConfigError("recipe: is empty; name one, such as grpo, or leave it out")
            else:
                config, package = load_recipe(value).config, value
        except ConfigError as error:
            raise ConfigError(f"{path}, line {line}: {error}") from None
    return Recipe(config, package, _file(path, content))


def _of_python(path: Path, function: str) -> Recipe:
    recipe = f"{path}:{function}"
    content = _content(path)
    config = run_function(recipe)
    if not isinstance(config, Config):
        raise ConfigError(f"{recipe}: returned {type(config).__name__}; expected a Config")
    try:
        for field in leaf_values(config).keys() - field_meanings(config).keys():
            raise ConfigError(no_such_field(field, Config()))  # Python sets any attribute
        config = from_tree(Config, tree := dataclasses.asdict(config), extra="forbid")
        json.dumps(tree)  # what a job gets as words
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{recipe}: {error}") from None
    return Recipe(config, "", _file(path, content) | {"function": function})


def _content(path: Path) -> bytes:
    if not path.is_file():
        what = "not a file" if path.exists() else "no such file"
        raise ConfigError(f"{path}: {what}; {OWN_RECIPE}")
    if path.stat().st_size > LARGEST_BYTES:
        raise ConfigError(f"{path}: larger than a megabyte, and so no recipe")
    return path.read_bytes()


def _file(path: Path, content: bytes) -> dict[str, str]:
    return {"path": str(path.absolute()), "sha256": hashlib.sha256(content).hexdigest()}
