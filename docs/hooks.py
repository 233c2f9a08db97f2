"""What mkdocs adds to pages from the code: recipes, fields, metrics, commands, names of others."""

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from mkdocs.structure.pages import Page
from typer.core import TyperGroup, TyperOption

# The pages are those of this checkout, also when another one is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from qurl_megatron import (
    cli,  # noqa: E402
    recipes,  # noqa: E402
)
from qurl_megatron.config import extensions  # noqa: E402
from qurl_megatron.config.meanings import (  # noqa: E402
    field_docs,
    field_meanings,
    first_line,
)
from qurl_megatron.config.other_names import OTHER_NAMES  # noqa: E402
from qurl_megatron.config.schema import Config  # noqa: E402
from qurl_megatron.config.text import leaf_values  # noqa: E402
from qurl_megatron.config.values import JOINED, LARGEST  # noqa: E402
from qurl_megatron.evaluation.evaluate import EvalConfig  # noqa: E402
from qurl_megatron.report.metrics import Evaluation, RunSummary, StepMetrics  # noqa: E402


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page with what the code says of its subject below what its file says."""
    sections = {
        "coming-from.md": names_of_others,
        "recipes.md": recipe_sections,
        "configuration.md": configuration_sections,
        "metrics.md": metric_sections,
        "commands.md": command_sections,
    }.get(page.file.src_uri)
    # Docstrings name tags, such as </think>, which a browser would not show.
    shown = (re.sub(r"<(?=/?\w)", "&lt;", each) for each in (sections() if sections else ()))
    return "\n".join([markdown, *shown])


def names_of_others() -> Iterator[str]:
    """Yield a table of the names that other frameworks have for our fields."""
    fields = {*leaf_values(Config())}

    def link(found: re.Match[str]) -> str:
        name = found[0]
        is_field = name in fields and ("." in name or not found.start())
        return f"[`{name}`](configuration.md#{name})" if is_field else name

    theirs: dict[str, list[str]] = {}
    for name, ours in OTHER_NAMES.items():
        theirs.setdefault(ours, []).append(f"`{name}`")
    yield "| theirs | ours |\n|---|---|"
    for ours, names in theirs.items():
        linked = re.sub(r"[a-z_]+(?:\.[a-z_]+)*", link, ours)
        yield f"| {', '.join(names)} | {linked} |"


def recipe_sections() -> Iterator[str]:
    """Yield a section for each recipe: the docstring of its module."""
    for module in sorted(pkgutil.iter_modules(recipes.__path__), key=lambda module: module.name):
        docstring = inspect.getdoc(importlib.import_module(f"qurl_megatron.recipes.{module.name}"))
        yield f"## {module.name}\n\n{docstring}\n"


def configuration_sections() -> Iterator[str]:
    """Yield a section for each part of a configuration, with its fields."""
    parts: dict[tuple[str, str], list[str]] = {}
    meanings = field_meanings(Config())
    for path, values, section in _fields(Config()):
        part = path.rpartition(".")[0], section
        parts.setdefault(part, []).append(_entry(path, meanings[path], values))
    for (name, section), entries in parts.items():
        yield f"## {f'`{name}`' if name else 'The run'} {{ #{name or 'run'} }}\n\n{section}\n"
        yield from entries
    commands: dict[str, tuple[str, type]] = {
        "eval": ("MODEL DATA... [FIELD=VALUE]...", EvalConfig),
    }
    if elsewhere := extensions.find("elsewhere", "serve"):
        commands["serve"] = ("MODEL [FIELD=VALUE]...", elsewhere.ServeConfig)
    for command, (words, kind) in commands.items():
        yield f"## `qurl {command}` {{ #{command} }}\n\nThe fields of `qurl {command} {words}`.\n"
        meanings = field_meanings(kind())
        for path, values, _ in _fields(kind()):
            yield _entry(path, meanings[path], values, anchor=f"{command}.{path}")


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the path, the values and the section's first line of every field of a dataclass.

    The fields of dataclasses in it come in their order. Each path starts with `prefix`.
    """
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            default = json.dumps(value, default=vars)
            values = f"Type `{_type_name(hint)}`, default `{default}`."
            yield prefix + name, values, first_line(config)


def metric_sections() -> Iterator[str]:
    """Yield a section for each kind of measurement, with its fields."""
    for kind, title in (
        (StepMetrics, "Each step: `metrics.jsonl`"),
        (RunSummary, "The run: `summary.json`"),
        (Evaluation, "An evaluation"),
    ):
        yield f"## {title} {{ #{kind.__name__} }}\n\n{inspect.getdoc(kind)}\n"
        for name, meaning in field_docs(kind).items():
            yield _entry(name, meaning, anchor=f"{kind.__name__}.{name}")


def command_sections() -> Iterator[str]:
    """Yield a section for each `qurl` command, with its arguments and options."""
    group = cli.command
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        entries = [_parameter(parameter) for parameter in command.params]
        words = [word for word, is_option, _ in entries if not is_option]
        options = ["[OPTION]..."] if any(is_option for _, is_option, _ in entries) else []
        yield f"## qurl {name} {{ #{name} }}\n"
        yield f"    {' '.join(['qurl', name, *words, *options])}\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
        yield from (f"- `{word}`: {meaning}" for word, _, meaning in entries)
        yield ""


def _parameter(parameter: Any) -> tuple[str, bool, str]:
    """Return how a command's parameter is written, whether it is an option, and its meaning."""
    is_option = isinstance(parameter, TyperOption)
    value = parameter.metavar or parameter.name.upper()
    if is_option:
        value = parameter.opts[0] if parameter.is_flag else f"{parameter.opts[0]} {value}"
    meaning = parameter.help or ""
    if is_option and not parameter.is_flag and parameter.default is not None:
        meaning += f" (default {parameter.default})"
    return value, is_option, meaning


def _entry(name: str, meaning: str, values: str = "", anchor: str = "") -> str:
    """Return a field's paragraph, under a heading that can be linked to."""
    return f"#### `{name}` {{ #{anchor or name} }}\n\n{meaning} {values}".rstrip() + "\n"


def _type_name(hint: Any) -> str:
    """Return the values that a type hint accepts, as a person would write them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        if JOINED in hint.__metadata__:
            return "str or [str, ...]"
        return f"{_type_name(arguments[0])} {' and '.join(_bounds(hint.__metadata__))}".rstrip()
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments)
    if origin is list:
        return f"[{_type_name(arguments[0])}, ...]"
    if origin is dict:
        return f"{{{_type_name(arguments[0])}: {_type_name(arguments[1])}, ...}}"
    if dataclasses.is_dataclass(hint):
        parts = typing.get_type_hints(hint, include_extras=True).items()
        return f"{{{', '.join(f'{name}: {_type_name(part)}' for name, part in parts)}}}"
    return {types.NoneType: "null", Any: "any value"}.get(hint, getattr(hint, "__name__", ""))


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    """Yield the bounds in words, without upper bounds that nobody meets."""
    for bound in metadata:
        if isinstance(bound, Gt):
            yield f"> {bound.gt}"
        elif isinstance(bound, Ge):
            yield f">= {bound.ge}"
        elif isinstance(bound, Le) and bound.le < LARGEST:  # type: ignore[operator]
            yield f"<= {bound.le}"
        elif isinstance(bound, Lt):
            yield f"< {bound.lt}"
