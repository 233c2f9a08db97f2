"""What the fields of a dataclass mean, read from the docstring below each of them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, in the order of its fields.

    Raises:
        LookupError: a field has no docstring.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = inspect.cleandoc(str(below.value.value))
    names = [field.name for field in dataclasses.fields(kind)]
    missing = [name for name in names if name not in found]
    if missing:
        raise LookupError(f"{kind.__name__}.{missing[0]} has no docstring below it")
    return {name: " ".join(found[name].split()) for name in names}
