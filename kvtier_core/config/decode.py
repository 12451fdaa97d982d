"""Nodes to attrs classes: each field is read as it is annotated, and every problem is told at its own line."""

from __future__ import annotations

import contextlib
import difflib
import enum
import pathlib
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar, Union

import attrs

from kvtier_core.config.yaml_nodes import Node, Plain, ProblemCollector, path_of, shown
from kvtier_core.errors import ConfigError, ContractError
from kvtier_core.interfaces import ArenaConfig, BackendConfig, EvictionConfig, SerializerConfig, TokenDatabaseConfig
from kvtier_core.types import Nbytes, Seconds

T = TypeVar("T")

_FAMILIES = (ArenaConfig, BackendConfig, EvictionConfig, SerializerConfig, TokenDatabaseConfig)


@attrs.frozen
class Unavailable:
    """Why a plugin's name cannot be had, and the way out."""

    why: str
    hint: str = ""


#: From a family of configs and the name of one to its class.
Choose = Callable[[type, str], type | Unavailable]
#: From a node to a value; raises ConfigError.
Read = Callable[[Node, Choose], Any]


def reader(annotation: Any) -> Read:
    """How a value of this type is read. Raises ContractError for a type that no setting can have."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if annotation in _NUMBERS:
        return _number(annotation)
    if annotation in _FAMILIES:
        return _choice(annotation)
    if attrs.has(annotation):
        return _group(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _either(arguments, annotation)
    if origin is tuple and arguments[1:] == (...,):
        return _several(reader(arguments[0]))
    if origin is Literal:
        return _one_of({str(choice): choice for choice in arguments})
    if isinstance(annotation, enum.EnumMeta):
        return _one_of({str(choice.value): choice for choice in annotation})
    raise _impossible(annotation)


def _either(alternatives: tuple[Any, ...], annotation: Any) -> Read:
    """Something or nothing; a number or one of some words."""
    rest = sorted((each for each in alternatives if each is not types.NoneType), key=lambda each: each not in _NUMBERS)
    words = typing.get_args(rest[-1]) if typing.get_origin(rest[-1]) is Literal else ()
    if len(rest) == 1:
        read = reader(rest[0])
    elif len(rest) == 2 and rest[0] in _NUMBERS and words and all(isinstance(word, str) for word in words):
        read = _number(rest[0], words)
    else:
        raise _impossible(annotation)
    return _optional(read) if types.NoneType in alternatives else read


def _impossible(annotation: Any) -> ContractError:
    return ContractError(f"no setting can have the type {annotation}")


def _read_text(node: Node, _: Choose) -> str:
    if not isinstance(node.value, str):
        raise node.wrong(f"expected text, found {shown(node.value)}")
    return str(node.value)


def _read_path(node: Node, choose: Choose) -> pathlib.Path:
    try:
        return path_of(_read_text(node, choose))
    except ValueError as error:
        raise node.wrong(str(error)) from error


def _number(kind: type[int | float], words: Collection[str] = ()) -> Read:
    """Of this kind, or one of the words instead."""
    pattern, also, noun = _NUMBERS[kind]
    expected = " or ".join([noun, *map(repr, words)])

    def read(node: Node, _: Choose) -> Any:
        if isinstance(node.value, str) and node.value in words:
            return str(node.value)
        if type(node.value) in also or (isinstance(node.value, Plain) and re.fullmatch(pattern, node.value)):
            with contextlib.suppress(OverflowError):
                return kind(node.value)
        hint = guess(node.value, words) if isinstance(node.value, str) else ""
        raise node.wrong(f"expected {expected}, found {shown(node.value)}", hint)

    return read


def _read_bool(node: Node, _: Choose) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(node.value, bool):
        return node.value
    if isinstance(node.value, Plain) and node.value.lower() in words:
        return words[node.value.lower()]
    raise node.wrong(f"expected true or false, found {shown(node.value)}")


def _parsed(unit: type[Nbytes | Seconds]) -> Read:
    def read(node: Node, _: Choose) -> Any:
        try:
            value = unit.parse(node.text())
        except ValueError as error:
            raise node.wrong(str(error)) from error
        if value >= 1 << 62:  # what the kernel is asked for must fit into a signed word
            raise node.wrong(f"{node.text()!r} is more than any machine has")
        return value

    return read


def _optional(read: Read) -> Read:
    return lambda node, choose: None if node.value is None else read(node, choose)


def _several(read: Read) -> Read:
    def read_all(node: Node, choose: Choose) -> tuple:
        collector = ProblemCollector()
        values = []
        for item in node.items():
            with collector:
                values.append(read(item, choose))
        collector.raise_if_any()
        return tuple(values)

    return read_all


def _one_of(choices: Mapping[str, Any]) -> Read:
    def read(node: Node, _: Choose) -> Any:
        text = node.text()
        if text not in choices or isinstance(node.value, bool):
            raise node.wrong(f"{shown(node.value)} is not one of {', '.join(choices)}", guess(text, choices))
        return choices[text]

    return read


def _choice(family: type) -> Read:
    """`lru`, or `{type: lru, …}` with the settings of the one chosen."""

    def read(node: Node, choose: Choose) -> Any:
        written = node if isinstance(node.value, dict) else attrs.evolve(node, value={"type": node})
        config = chosen(written, family, choose)
        if not issubclass(config, family):
            raise node.wrong(f"'{config.type}' is no {family.__name__}")
        known = {"type": Setting(_read_text, required=True), **settings(config)}
        collector = ProblemCollector()
        values = read_keys(written, known, choose, collector)
        validate(config, written, values, collector)
        collector.raise_if_any()
        del values["type"]
        return construct(config, written, values)

    return read


def _group(cls: type) -> Read:
    """The settings of one class, in a mapping of their own."""

    def read(node: Node, choose: Choose) -> Any:
        collector = ProblemCollector()
        values = read_keys(node, settings(cls), choose, collector)
        validate(cls, node, values, collector)
        collector.raise_if_any()
        return construct(cls, node, values)

    return read


def chosen(node: Node, family: type, choose: Choose) -> type:
    """The class that the mapping's `type` names."""
    if "type" not in node.entries():
        raise node.wrong("'type' is missing")
    named = node.entries()["type"]
    config = choose(family, _read_text(named, choose))
    if isinstance(config, Unavailable):
        raise named.wrong(config.why, config.hint)
    return config


_SCALARS: dict[Any, Read] = {
    str: _read_text,
    bool: _read_bool,
    pathlib.Path: _read_path,
    Nbytes: _parsed(Nbytes),
    Seconds: _parsed(Seconds),
}
#: How a number is written in YAML, as what plain values may have it, and what it is called.
_NUMBERS: dict[Any, tuple[str, tuple[type, ...], str]] = {
    int: (r"[-+]?(0|[1-9][0-9]{0,17})", (int,), "a whole number"),
    float: (r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", (int, float), "a number"),
}


# -- classes ---------------------------------------------------------------------------------------


@attrs.frozen
class Setting:
    """What may stand under a key, and whether the key must be there."""

    read: Read
    required: bool


def settings(cls: type, but: Collection[str] = ()) -> dict[str, Setting]:
    """The keys of an attrs class, ``but`` some. Raises ContractError if one has a type that no setting can have."""
    hints = typing.get_type_hints(cls)
    return {
        field.alias: Setting(_discreet(field, reader(hints[field.name])), required=field.default is attrs.NOTHING)
        for field in attrs.fields(cls)
        if field.init and field.name not in but
    }


def _discreet(field: attrs.Attribute, read: Read) -> Read:
    """What may not be shown is not shown when it cannot be read either."""

    def read_hidden(node: Node, choose: Choose) -> Any:
        try:
            return read(node, choose)
        except ConfigError:
            raise node.wrong("cannot be read; what was written is not shown") from None

    return read if field.repr else read_hidden


def read_keys(node: Node, known: Mapping[str, Setting], choose: Choose, collector: ProblemCollector) -> dict[str, Any]:
    """The values of the keys that are written; all must be known. What is wrong goes to ``collector``."""
    values = read_known(node, known, choose, collector)
    for key, below in node.entries().items():
        if key not in known:
            hint = guess(key, known) or f"known here: {', '.join(known)}"
            collector.problems.append(below.problem(f"unknown key {key!r}", hint))
    return values


def read_known(node: Node, known: Mapping[str, Setting], choose: Choose, collector: ProblemCollector) -> dict[str, Any]:
    """The values of the known keys that are written; other keys are somebody else's."""
    entries, values = node.entries(), {}
    for key, setting in known.items():
        if key in entries:
            with collector:
                values[key] = setting.read(entries[key], choose)
        elif setting.required:
            collector.problems.append(node.problem(f"'{key}' is missing"))
    return values


def validate(cls: type, node: Node, values: Mapping[str, Any], collector: ProblemCollector) -> None:
    """Ask each validator of the class by itself: attrs would stop at the first complaint and not say whose it is."""
    fields = [field for field in attrs.fields(cls) if field.init]
    constant = [f for f in fields if f.default is not attrs.NOTHING and not isinstance(f.default, attrs.Factory)]
    defaults = {field.name: field.default for field in constant}
    given = {field.name: values[field.alias] for field in fields if field.alias in values}
    instance = types.SimpleNamespace(**{**defaults, **given})
    for field in fields:
        if field.validator is not None and field.name in given:
            with collector:
                _validate(field, instance, node.entries()[field.alias])


def construct(cls: type[T], node: Node, values: Mapping[str, Any]) -> T:
    """An instance of what `validate` found nothing wrong with."""
    try:
        return cls(**values)
    except ValueError as error:
        raise node.wrong(_words(error)) from error


def _validate(field: attrs.Attribute, instance: types.SimpleNamespace, node: Node) -> None:
    try:
        field.validator(instance, field, getattr(instance, field.name))
    except (ValueError, TypeError) as error:
        if not field.repr:
            raise node.wrong("is not allowed; what was written is not shown") from None
        raise node.wrong(_words(error)) from error
    except AttributeError:
        pass  # compares itself with a field that could not be read, which is told already


def _words(error: Exception) -> str:
    """attrs puts the field and its options behind the sentence."""
    return str(error.args[0]) if error.args else type(error).__name__


def guess(word: str, known: Collection[str]) -> str:
    """A hint for whoever wrote ``word`` and meant one of the known ones."""
    close = difflib.get_close_matches(word, sorted(known), 1)
    return f"did you mean '{close[0]}'?" if close else ""
