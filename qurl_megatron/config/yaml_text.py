"""YAML of configurations: read as its writer meant it, or refused.

Numbers are decimal, as in YAML 1.2: without quotes 010 is ten and 1e-6 is a number, while 1:30 and
a date are texts. Aliases are refused, because nine lines of them can be a billion values, and so
are tags and a key that is given twice.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from qurl_megatron.config.older import path_now
from qurl_megatron.config.schema import ConfigError, StageConfig

_INT, _FLOAT, _DATE, _NULL = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp", "null")
)
_HINTS = {
    " alias": "a text that begins with * needs quotes",
    "character '\\t'": "YAML is indented with spaces",
    "expected ':'": "a field and its value are `steps: 100`",
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
_Dumper.add_representer(StageConfig, lambda dumper, stage: dumper.represent_dict(vars(stage)))


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


def leaves(content: bytes, file: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield each field that a YAML file gives: its dotted path, its value, its place in messages.

    A field of a section is below the section's name, or is named by its dotted path. A dict, or a
    key of one, has the values that YAML has read. Others are texts or lists of texts, whose type
    is that of the field, or None.

    Args:
        content: what the file holds.
        file: the file's name in messages.
        fields: the known fields by dotted path; the values of dicts are dicts.

    Raises:
        ConfigError: the file is not a mapping, or gives a field twice.
    """
    try:
        root = _checked(yaml.compose, content, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else "a text" if root else "empty"
        raise ConfigError(f"{file}: is {what}; give lines such as `recipe: grpo` and `steps: 100`")
    lines: dict[str, int] = {}
    for path, line, node in _nodes(root, "", fields):
        place, section = f"{file}, line {line}: ", path.rpartition(".")[0]
        # A whole dict and one of its keys exclude each other.
        if earlier := lines.get(path) or lines.get(section) or lines.get(f"{path}."):
            raise ConfigError(f"{place}{path} is given twice, also in line {earlier}")
        lines |= {path: line, f"{section}.": line}
        if isinstance(fields.get(path), dict) or section in fields:
            yield path, _checked(_Loader("").construct_document, node), place
        else:
            yield path, _plain(node), place


def _nodes(
    section: yaml.MappingNode, prefix: str, fields: Mapping[str, Any]
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield path, line and value of each field; an empty section has none."""
    for key, value in section.value:
        path = path_now(prefix + key.value)
        field = fields.get(path, fields.get(path.rpartition(".")[0]))
        if isinstance(value, yaml.MappingNode) and value.value and not isinstance(field, dict):
            yield from _nodes(value, f"{path}.", fields)
        elif value.tag != _NULL or not any(field.startswith(f"{path}.") for field in fields):
            yield path, key.start_mark.line + 1, value


def _plain(node: yaml.Node) -> Any:
    """Return the text of a scalar, None, a list of these, or what YAML reads of a mapping."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _checked(_Loader("").construct_document, node)
    return None if node.tag == _NULL else node.value


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
