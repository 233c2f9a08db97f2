"""What a command's RECIPE names: a recipe of the package, or a file of the user's own.

    grpo             the recipe of the package, whatever files there are
    FILE.yaml, .yml  fields and values; `recipe:` says what the others begin with: a recipe of the
                     package, or another file, relative to the directory of this one
    FILE.py:NAME     a function that takes nothing and returns a Config
    -                YAML on stdin

More YAML files may follow. A file is read once, when the command begins. A job, or a run of a
sweep, gets its fields as a file of its own (`Recipe.as_file`): later changes do not reach it.
"""

import dataclasses
import difflib
import hashlib
import importlib
import json
import os
import pkgutil
import re
import runpy
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qurl_megatron.config import yaml_text
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import (
    Given,
    field_of,
    from_tree,
    leaf_values,
    no_such_field,
    of_file,
    of_word,
    with_overrides,
)
from qurl_megatron.data.rewards import why

RECIPES = "qurl_megatron.recipes"
BASIS = "grpo"  # what a file's fields are compared with if it begins with no recipe of the package
LARGEST_BYTES = 1_000_000
USER_RECIPE = "a file of your own is FILE.yaml or FILE.py:NAME"
STDIN = "-"


@dataclasses.dataclass
class File(Config):
    """What a YAML file may have."""

    recipe: str = ""
    """Recipe that the other fields change. Empty: the defaults."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe as read, and what its user has changed."""

    name: str
    """What it was read from."""

    package: str
    """The recipe of the package that it is, or begins with. Empty: none."""

    config: Config

    given: frozenset[str] = frozenset()
    """The fields of words and of stdin, and in which files differ from the package's recipe."""

    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`Config.recipe_file`: SHA-256 of the files that it was read from, by path."""

    def as_file(self) -> str:
        """Return this recipe as a YAML file, which needs none of the files that it is from."""
        values = leaf_values(self.config)
        fields = {field: value for field, value in values.items() if field in self.given}
        fields |= {"recipe_file": dict(self.files)} if self.files else {}
        return yaml_text.dump({"recipe": self.package or BASIS} | fields)


def load_recipe(recipe: str | Recipe, words: Iterable[str | Given] = ()) -> Recipe:
    """Return a recipe with what follows it on a command line: `field=value` words and YAML files.

    Each changes what is before it.

    Raises:
        ConfigError: there is none, or a field is wrong; the message says in which file and line.
    """
    loaded = _read(recipe) if isinstance(recipe, str) else recipe
    fields = leaf_values(loaded.config)
    changes: list[Given] = []
    given, files = set(loaded.given), dict(loaded.files)
    for word in words:
        if isinstance(word, str) and "=" not in word and is_file(word):
            more, read = _fields(word)
            for each in more:
                if each.path == "recipe":
                    raise ConfigError(f"{each.place}recipe: only the first file may have one")
            changes += more
            files |= read
        else:
            each = of_word(word, loaded.config) if isinstance(word, str) else word
            changes.append(each)
            given.add(field_of(each.path, fields))
    config = with_overrides(loaded.config, changes)
    before = leaf_values(_of_package(loaded.package or BASIS))
    differ = {field for field, value in leaf_values(config).items() if value != before[field]}
    if config.epochs and not loaded.package:  # a function's steps, which it cannot leave out
        differ -= {"steps"}
    given |= differ
    return Recipe(loaded.name, loaded.package, config, frozenset(given), files)


def is_file(recipe: str) -> bool:
    """Return whether a recipe is a file."""
    return (
        recipe == STDIN
        or recipe.endswith((".yaml", ".yml"))
        or recipe.rpartition(":")[0].endswith(".py")
    )


def recipe_names() -> list[str]:
    """Return the names of all recipes of the package, sorted."""
    recipes = importlib.import_module(RECIPES)
    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def recipe_meanings() -> dict[str, str]:
    """Return the first line of the docstring of each recipe of the package, by name."""
    from qurl_megatron.config.meanings import first_line

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


def _read(recipe: str, place: str = "", inside: tuple[Path, ...] = ()) -> Recipe:
    """Return a recipe by its name, whose `given` lacks the differences.

    Args:
        recipe: the name.
        place: where a file names it, in messages.
        inside: the files that begin with it.
    """
    if recipe in recipe_names():
        return Recipe(recipe, recipe, _of_package(recipe))
    if recipe.endswith(".py"):
        names = re.findall(r"^def (\w+)\(\)", _content(recipe, place).decode(), re.MULTILINE)
        raise ConfigError(
            f"{place}{recipe}: which function? give {recipe}:{' or :'.join(names) or 'NAME'}, a "
            "function that takes nothing and returns a Config"
        )
    if not is_file(recipe):
        names = recipe_names()
        close = difflib.get_close_matches(recipe, names, n=1)
        known = f"there are {', '.join(names)}; {USER_RECIPE}"
        hint = f"did you mean {close[0]}?" if close else known
        raise ConfigError(f"{place}{recipe}: no such recipe; {hint}")
    file, _, function = recipe.rpartition(":")
    if file.endswith(".py"):
        return _of_python(recipe, file, _content(file, place))
    if Path(recipe).resolve() in inside:
        raise ConfigError(f"{place}recipe: {recipe} would begin with itself")
    given, files = _fields(recipe, place)
    base = Recipe(recipe, "", Config())
    for each in given:
        if each.path == "recipe":
            if not isinstance(name := each.value, str) or not name:
                raise ConfigError(f"{each.place}recipe: name one, such as grpo, or leave it out")
            if is_file(name):  # relative to this file
                name = os.path.join(os.path.dirname(recipe), os.path.expanduser(name))
            base = _read(name, each.place, (*inside, Path(recipe).resolve()))
    given = [each for each in given if each.path != "recipe"]
    config = with_overrides(base.config, given)
    fields = leaf_values(config)
    named = frozenset(field_of(each.path, fields) for each in given if recipe == STDIN)
    return Recipe(recipe, base.package, config, named, {**base.files, **files})


def _of_package(name: str) -> Config:
    config: Config = importlib.import_module(f"{RECIPES}.{name}").recipe()
    return config


def _fields(file: str, place: str = "") -> tuple[list[Given], dict[str, str]]:
    """Return what a YAML file gives, and its record."""
    if file.rpartition(":")[0].endswith(".py"):
        raise ConfigError(f"{file}: only the first recipe may be a function")
    content = _content(file, place)
    if file == STDIN:
        return of_file(content, "stdin", File()), {}
    return of_file(content, file, File()), _record(file, content)


def _of_python(recipe: str, file: str, content: bytes) -> Recipe:
    config = run_function(recipe)
    if not isinstance(config, Config):
        raise ConfigError(f"{recipe}: returned {type(config).__name__}; expected a Config")
    try:
        config = of_code(config)
    except ConfigError as error:
        raise ConfigError(f"{recipe}: {error}") from None
    return Recipe(recipe, "", config, files=_record(recipe, content))


def of_code(config: Config) -> Config:
    """Return a configuration that code has made, with its values converted to their fields' types.

    Raises:
        ConfigError: it has an attribute that is no field, or a value that its field or a file does
            not accept.
    """
    from qurl_megatron.config.meanings import field_meanings

    for field in leaf_values(config).keys() - field_meanings(config).keys():
        raise ConfigError(no_such_field(field, Config()))  # Python sets any attribute
    converted = from_tree(Config, tree := dataclasses.asdict(config), extra="forbid")
    try:
        json.dumps(tree)  # else a job's file could not have it
    except TypeError as error:
        raise ConfigError(str(error)) from None
    return converted


def _content(file: str, place: str) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read()
    path = Path(file)
    if not path.is_file():
        what = "not a file" if path.exists() else "no such file"
        raise ConfigError(f"{place}{path}: {what}; {USER_RECIPE}")
    if path.stat().st_size > LARGEST_BYTES:
        raise ConfigError(f"{place}{path}: larger than a megabyte, and so no recipe")
    return path.read_bytes()


def _record(recipe: str, content: bytes) -> dict[str, str]:
    return {str(Path(recipe).absolute()): hashlib.sha256(content).hexdigest()}
