"""The descriptions of settings in the sources: the ``#:`` comments of a Config's fields, for people who write YAML."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping

_MARK = "#:"


def comments_of(cls: type) -> Mapping[str, str]:
    """The comment of each field of a class and its bases, by name; those without one are left out."""
    comments: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):  # built in, or without sources
            continue
        comments |= _comments_in(source)
    return comments


def first_paragraph(cls: type) -> str:
    """The first paragraph of a class's own docstring, on one line."""
    return " ".join((inspect.cleandoc(vars(cls).get("__doc__") or "")).partition("\n\n")[0].split())


def _comments_in(source: str) -> Mapping[str, str]:
    lines = source.splitlines()
    (body,) = (node.body for node in ast.parse(source).body)
    fields = {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}
    found = {name: " ".join([*_above(lines, node.lineno - 1), *_behind(lines[node.end_lineno - 1])])
             for name, node in fields.items()}  # fmt: skip
    return {name: comment for name, comment in found.items() if comment}


def _above(lines: list[str], line: int) -> list[str]:
    """The comment that ends right above this line."""
    first = line
    while first and lines[first - 1].lstrip().startswith(_MARK):
        first -= 1
    return [each.lstrip().removeprefix(_MARK).strip() for each in lines[first:line]]


def _behind(line: str) -> list[str]:
    _, mark, comment = line.partition(f"  {_MARK}")
    return [comment.strip()] if mark else []
