"""Nodes: values and the places where they were written, in a YAML file or inline as plain values.

YAML's own rules for types are not used. A scalar is its text, and the type of the setting decides how it is read: so
`off` can be a word, and `1:30` is never ninety.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import yaml

from kvtier_core.errors import ConfigError, Problem

#: Levels of nesting: more than any configuration needs, and far fewer than Python's recursion limit.
_DEEPEST = 16

_VARIABLE = re.compile(r"\$[A-Za-z_{]")


class ProblemCollector:
    """`with collector:` collects the problems of a ConfigError instead of raising it, to report all together."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.problems += error.problems
        return True

    def raise_if_any(self) -> None:
        """Raise a ConfigError with all problems, sorted by line, if there are any."""
        if self.problems:
            raise ConfigError(sorted(self.problems, key=lambda problem: _line(problem.where)))


def _line(where: str) -> int:
    line = where.rpartition(":")[2]
    return int(line) if line.isdecimal() else 0


class Plain(str):
    """A YAML scalar without quotes, as written."""


@attrs.frozen
class Node:
    """A value and the place where it was written; in a mapping, the line of its key."""

    where: str  #: file and line
    path: str  #: ``$.tiers[2].type``
    value: bool | int | float | str | list[Node] | dict[str, Node] | None

    def problem(self, why: str, hint: str = "") -> Problem:
        """A problem at this node."""
        return Problem(self.where, self.path, why, hint)

    def wrong(self, why: str, hint: str = "") -> ConfigError:
        """An error with one problem at this node."""
        return ConfigError([self.problem(why, hint)])

    def walk(self) -> Iterator[Node]:
        """This node and all nodes below it."""
        yield self
        below = list(self.value.values()) if isinstance(self.value, dict) else self.value
        for child in below if isinstance(below, list) else ():
            yield from child.walk()

    def entries(self) -> dict[str, Node]:
        """The keys and values of a mapping. Raises ConfigError for anything else."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"expected a mapping, found {shown(self.value)}")
        return self.value

    def items(self) -> list[Node]:
        """The items of a list. Raises ConfigError for anything else."""
        if not isinstance(self.value, list):
            raise self.wrong(f"expected a list, found {shown(self.value)}")
        return self.value

    def text(self) -> str:
        """A single value as text, whatever its type. Raises ConfigError for a list, a mapping or nothing."""
        if isinstance(self.value, list | dict | None):
            raise self.wrong(f"expected a single value, found {shown(self.value)}")
        return str(self.value)


def path_of(text: str) -> pathlib.Path:
    """The path; a leading ``~`` is the home directory. Raises ValueError if it would be taken for another path."""
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not a path")
    if _VARIABLE.search(text):
        raise ValueError(f"{text!r} names an environment variable, which is not expanded; write the path itself")
    try:
        path = pathlib.Path(text).expanduser()
        os.fsencode(path)
    except (RuntimeError, UnicodeEncodeError) as error:
        raise ValueError(f"{text!r} is not a path: {error}") from error
    if text.startswith("~") and not os.path.isabs(os.environ.get("HOME", "/")):
        raise ValueError(f"{text!r} is not a path: HOME is {os.environ['HOME']!r}")
    return path


def from_file(path: pathlib.Path | str, collector: ProblemCollector) -> Node:
    """Read a YAML file. Problems of single keys go to ``collector``; raises ConfigError for others."""
    name = str(path)
    try:
        text = path_of(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem(name, "$", f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:  # not UTF-8, or no path
        raise ConfigError([Problem(name, "$", f"cannot be read: {error}")]) from error
    return from_yaml(text, name, collector)


def from_yaml(text: str, name: str, collector: ProblemCollector) -> Node:
    """Read YAML; ``name`` is the file in problems. Otherwise as `from_file`."""
    try:
        composed = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark or error.context_mark).line + 1
        why = ", ".join(filter(None, (error.context, error.problem)))
        if "'\\t'" in why:
            why = "a tab starts a value or a line; indent YAML with spaces"
        raise ConfigError([Problem(f"{name}:{line}", "$", why)]) from None  # its message may show a secret
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem(f"{name}:{line}", "$", f"character {error.character:#x} is not allowed")]) from error
    except (ValueError, OverflowError) as error:  # PyYAML raises these for escapes and versions that are out of range
        raise ConfigError([Problem(name, "$", f"not YAML: {error}")]) from error
    if composed is None:
        raise ConfigError([Problem(f"{name}:1", "$", "the file is empty", "write version: 1 and tiers")])
    return _from_composed(composed, name, composed.start_mark.line + 1, "$", collector)


def from_plain(value: object, where: str, collector: ProblemCollector, path: str = "$", depth: int = 0) -> Node:
    """Make nodes of values of JSON's types; ``where`` names their source in problems. Raises ConfigError."""
    if depth > _DEEPEST:
        raise ConfigError([Problem(where, path, "nested too deeply")])
    if isinstance(value, Mapping):
        entries = {}
        for key, below in value.items():
            with collector:
                if not isinstance(key, str):
                    raise ConfigError([Problem(where, path, f"a key must be text, not {key!r}", "put it in quotes")])
                entries[key] = from_plain(below, where, collector, _below(path, key), depth + 1)
        return Node(where, path, entries)
    if isinstance(value, list | tuple):
        items = []
        for i, below in enumerate(value):
            with collector:
                items.append(from_plain(below, where, collector, f"{path}[{i}]", depth + 1))
        return Node(where, path, items)
    if isinstance(value, bool | int | float | str | None):
        return Node(where, path, value)
    raise ConfigError([Problem(where, path, f"a setting cannot be a {type(value).__name__}")])


class _Loader(yaml.BaseLoader):  # type: ignore[misc]  # PyYAML has no types
    """Resolves no types, and refuses anchors, aliases and tags, so that every value is written where it is used."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if event.anchor is not None:
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not allowed", event.start_mark)
        if event.tag is not None:
            raise yaml.composer.ComposerError(None, None, "tags are not allowed", event.start_mark)
        if self._depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, "nested too deeply", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _from_composed(composed: yaml.Node, name: str, line: int, path: str, collector: ProblemCollector) -> Node:
    where = f"{name}:{line}"
    if isinstance(composed, yaml.MappingNode):
        return Node(where, path, _entries(composed, name, path, collector))
    if isinstance(composed, yaml.SequenceNode):
        items = enumerate(composed.value)
        return Node(
            where, path, [_from_composed(v, name, v.start_mark.line + 1, f"{path}[{i}]", collector) for i, v in items]
        )
    if composed.style is not None:
        return Node(where, path, composed.value)
    return Node(where, path, None if composed.value in ("", "~", "null") else Plain(composed.value))


def _entries(composed: yaml.MappingNode, name: str, path: str, collector: ProblemCollector) -> dict[str, Node]:
    entries: dict[str, Node] = {}
    for key, value in composed.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            collector.problems.append(Problem(f"{name}:{line}", path, "a key must be text", "write a name and a colon"))
            continue
        node = _from_composed(value, name, line, _below(path, key.value), collector)
        if key.value == "<<":
            collector.problems.append(node.problem("merge keys are not allowed", "write the settings out"))
        elif key.value in entries:
            collector.problems.append(node.problem(f"written twice, first at {entries[key.value].where}"))
        else:
            entries[key.value] = node
    return entries


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(r"[\w-]+", key, re.ASCII) else f"{path}[{json.dumps(key)}]"


def shown(value: object) -> str:
    """A value in an error message."""
    if isinstance(value, bool):
        return str(value).lower()
    names = {type(None): "nothing", list: "a list", dict: "a mapping"}
    return names.get(type(value)) or (repr(str(value)) if isinstance(value, str) else str(value))
