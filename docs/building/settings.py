"""Writes the tables of all settings, from the classes that they are read into: `make docs` puts them into a page.

python docs/building/settings.py > build/docs/settings.md
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union

import attrs

from kvtier_core.config.decode import KIND_OF
from kvtier_core.config.model import (
    ArenaTierConfig,
    IdentityConfig,
    ProgramConfig,
    StackConfig,
    StoreTierConfig,
)
from kvtier_core.config.registry import Registry
from kvtier_core.types import EnvSecret, Nbytes, Seconds
from kvtier_doctor.schema import comments_of, first_paragraph

#: What is written in YAML for a type.
_WORDS: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "a whole number",
    float: "a number",
    Nbytes: "a size: `8GiB`",
    Seconds: "a time: `500ms`",
    EnvSecret: "`env:NAME`",
    Path: "a path",
    types.NoneType: "`~`",
}
#: What YAML has for a value of Python's.
_VALUES = {"None": "~", "True": "true", "False": "false"}
#: What the core's classes keep beside what is written.
_INNER = ("config", "source", "tiers", "_places", "_plugins")


def pages(registry: Registry) -> Iterator[str]:
    """The lines of the page: the whole file, every tier, and then each plugin by its kind."""
    yield from _section("The file", StackConfig)
    yield from _section("`identity`", IdentityConfig)
    yield from _section("`programs`", ProgramConfig)
    yield from _section("Every arena", ArenaTierConfig)
    yield from _section("Every store tier", StoreTierConfig)
    for offer in registry.offers():
        yield from _section(f"{offer.kind} `{offer.name}`", offer.config)


def _section(title: str, cls: type) -> Iterator[str]:
    yield from (f"## {title}", "", _plain(first_paragraph(cls)), "")
    rows = list(_rows(cls))
    if rows:
        yield from ("| key | what is written | default | |", "|---|---|---|---|", *rows, "")


def _rows(cls: type) -> Iterator[str]:
    hints, comments = typing.get_type_hints(cls), comments_of(cls)
    inner = (*_INNER, "name") if cls in (ArenaTierConfig, StoreTierConfig) else _INNER
    for field in attrs.fields(cls):
        if field.init and field.name not in inner:
            cells = (
                f"`{field.alias}`",
                written(hints[field.name]),
                _default(field),
                _plain(comments.get(field.name, "")),
            )
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def written(annotation: Any) -> str:
    """What a user writes for a field with this annotation, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in KIND_OF:
        return f"{KIND_OF[annotation]}, by its name or as `{{type: NAME, …}}`"
    if attrs.has(annotation) and annotation not in _WORDS:
        return "a mapping, below"
    if origin in (Union, types.UnionType):
        return " or ".join(written(each) for each in arguments)
    if origin is tuple:
        return f"a list; each: {written(arguments[0])}"
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    return _WORDS.get(annotation, "text")


def _plain(text: str) -> str:
    """Code as Markdown has it."""
    return text.replace("``", "`")


def _default(field: attrs.Attribute) -> str:
    if field.default is attrs.NOTHING:
        return "must be written"
    value = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default
    if hasattr(value, "type"):
        return f"`{value.type}`"
    if attrs.has(type(value)) or value in ((), ""):
        return ""
    return f"`{_VALUES.get(repr(value), value)}`"


if __name__ == "__main__":
    sys.stdout.write("\n".join(pages(Registry.discover())) + "\n")
