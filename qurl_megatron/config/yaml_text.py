"""YAML of configurations: read as its writer meant it, or refused.

Numbers are decimal, as in YAML 1.2: without quotes 010 is ten and 1e-6 is a number, while 1:30 and
a date are texts. Aliases are refused, because nine lines of them can be a billion values, and so
are tags and a key that is given twice.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from qurl_megatron.config.schema import ConfigError

_INT, _FLOAT, _DATE, _NULL = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp", "null")
)
_HINTS = {
    " alias": "a text that begins with * needs quotes",
    "character '\\t'": "YAML is indented with spaces",
}


class _Loader(yaml.SafeLoader):
    """Reads numbers as in YAML 1.2, and refuses aliases, tags and repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            problem = f"the alias *{event.anchor} is refused"
        elif event.tag:
            problem = f"the tag {event.tag} is refused; give the value alone"
        else:
            node = super().compose_node(parent, index)
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
            return node
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


class _Dumper(yaml.SafeDumper):
    """Puts a text in quotes if `_Loader` would take it for a number."""


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [each for each in resolvers if each[0] not in (_INT, _FLOAT, _DATE)]
        for first, resolvers in _kind.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in (
        (_INT, r"[-+]?[0-9][0-9_]*$"),
        (_FLOAT, r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)([eE][-+]?[0-9]+)?$"),
        (_FLOAT, r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    ):
        _kind.add_implicit_resolver(_tag, re.compile(_pattern), [*"-+.0123456789"])


_Loader.add_constructor(_INT, lambda loader, node: int(node.value))


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be a name", problem_mark=key.start_mark)
        if key.value in lines:
            raise yaml.MarkedYAMLError(
                problem=f"{key.value} is given twice, also in line {lines[key.value]}",
                problem_mark=key.start_mark,
            )
        lines[key.value] = key.start_mark.line + 1


def parse(text: str | bytes) -> Any:
    """Return the values of a YAML text.

    Raises:
        ConfigError: it is not YAML, or has something that is refused.
    """
    return _checked(yaml.load, text, _Loader)


def dump(values: Mapping[str, Any], width: int = 80) -> str:
    """Return values as a YAML text that `parse` reads."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=width)


def words(content: bytes, leaves: Mapping[str, Any], file: Path) -> list[tuple[int, str]]:
    """Return each field of a YAML file: its line number, and a `field=value` word.

    A field of a section is below the section's name, or is named by its dotted path.

    Args:
        content: what the file holds.
        leaves: the known fields by dotted path, with example values.
        file: the file's name in messages.

    Raises:
        ConfigError: the file is not a mapping, or a field has a value of the wrong form or is
            given twice.
    """
    try:
        root = _checked(yaml.compose, content, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else "a text" if root else "empty"
        raise ConfigError(f"{file}: is {what}; give lines such as `recipe: grpo` and `steps: 100`")
    found: list[tuple[int, str]] = []
    lines: dict[str, int] = {}
    for path, line, value in _fields(root, "", leaves):
        section = path.rpartition(".")[0]
        # A whole dict and one of its keys exclude each other.
        earlier = lines.get(path) or lines.get(section) or lines.get(f"{path}.")
        if earlier:
            raise ConfigError(f"{file}, line {line}: {path} is given twice, also in line {earlier}")
        lines |= {path: line, f"{section}.": line}
        try:
            is_known = path in leaves or section in leaves
            text = _text(value, leaves.get(path), section in leaves) if is_known else ""
        except ConfigError as error:
            raise ConfigError(f"{file}, line {line}: {path}: {error}") from None
        found.append((line, f"{path}={text}"))
    return found


def _fields(
    section: yaml.MappingNode, prefix: str, leaves: Mapping[str, Any]
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield path, line and value of each field; an empty section has none."""
    for key, value in section.value:
        path = prefix + key.value
        is_section = path not in leaves and path.rpartition(".")[0] not in leaves
        if is_section and isinstance(value, yaml.MappingNode) and value.value:
            yield from _fields(value, f"{path}.", leaves)
        elif value.tag != _NULL or not any(leaf.startswith(f"{path}.") for leaf in leaves):
            yield path, key.start_mark.line + 1, value


def _text(node: yaml.Node, example: Any, is_key: bool) -> str:
    """Return the text after `=` in the word of a field whose values are like `example`.

    Raises:
        ConfigError: the field takes one value or a list, and `node` has another form.
    """
    if is_key or isinstance(example, dict):
        return json.dumps(_checked(_Loader("").construct_document, node))
    if isinstance(node, yaml.ScalarNode):
        return "null" if node.tag == _NULL else node.value
    if not isinstance(example, list):
        raise ConfigError("takes one value")
    if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
        raise ConfigError("takes a list of single values")
    if any("," in item.value for item in node.value):
        raise ConfigError("a value in a list must have no comma")
    return f"[{', '.join(item.value for item in node.value)}]"


def _checked(read: Callable[..., Any], *given: Any) -> Any:
    """Call a function of PyYAML, and return its result.

    Raises:
        ConfigError: it fails; one line says where and why.
    """
    try:
        return read(*given)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            parts = [part for part in (error.context, error.problem) if part]
            reason = f"line {error.problem_mark.line + 1}: {', '.join(parts)}"
        for sign, hint in _HINTS.items():
            reason += f"; {hint}" if sign in reason else ""
        raise ConfigError(f"not readable as YAML ({reason})") from None
