"""Reads nodes into attrs classes. Annotations decide how fields are read; each problem is reported at its own line."""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar, Union

import attrs

from kvtier_core.config.model import Config
from kvtier_core.config.scalars import NUMBERS, SCALARS, Choose, Read, Unavailable, guess, number, one_of, read_text
from kvtier_core.config.yaml_nodes import Node, ProblemCollector
from kvtier_core.errors import ConfigError, ContractError
from kvtier_core.hookspecs import TIER_KEYS
from kvtier_core.interfaces import (
    ArenaConfig,
    BackendConfig,
    EvictionConfig,
    ObserverConfig,
    SerializerConfig,
    TokenDatabaseConfig,
)

T = TypeVar("T")


@attrs.frozen
class Kind:
    """A kind of Config classes that plugins offer."""

    hook: str
    families: tuple[type[Config], ...]
    core_keys: frozenset[str] = frozenset({"type"})  #: keys in the same mapping, which no Config may have as fields


KINDS = {
    "tier": Kind("kvtier_backends", (ArenaConfig, BackendConfig), frozenset(TIER_KEYS.split())),
    "eviction policy": Kind("kvtier_eviction_policies", (EvictionConfig,)),
    "token database": Kind("kvtier_token_databases", (TokenDatabaseConfig,)),
    "serializer": Kind("kvtier_serializers", (SerializerConfig,)),
    "observer": Kind("kvtier_observers", (ObserverConfig,)),
}
#: The kind of a family of Configs.
KIND_OF = {family: kind for kind, described in KINDS.items() for family in described.families}


def reader(annotation: Any) -> Read:
    """The function that reads a value of this type. Raises ContractError for a type that no setting can have."""
    if annotation in SCALARS:
        return SCALARS[annotation]
    if annotation in NUMBERS:
        return number(annotation)
    if annotation in KIND_OF:
        return _choice(annotation)
    if attrs.has(annotation):
        return functools.partial(_read_group, annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _either(arguments, annotation)
    if origin is tuple and arguments[1:] == (...,):
        return _several(reader(arguments[0]))
    if origin is Literal:
        return one_of({str(choice): choice for choice in arguments})
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return one_of({str(choice.value): choice for choice in annotation})
    raise _impossible(annotation)


def _either(alternatives: tuple[Any, ...], annotation: Any) -> Read:
    """Read an optional type, or a number or one of several words."""
    rest = sorted((each for each in alternatives if each is not types.NoneType), key=lambda each: each not in NUMBERS)
    words = typing.get_args(rest[-1]) if typing.get_origin(rest[-1]) is Literal else ()
    if len(rest) == 1:
        read = reader(rest[0])
    elif len(rest) == 2 and rest[0] in NUMBERS and words and all(isinstance(word, str) for word in words):
        read = number(rest[0], words)
    else:
        raise _impossible(annotation)
    if types.NoneType in alternatives:
        return lambda node, choose: None if node.value is None else read(node, choose)
    return read


def _impossible(annotation: Any) -> ContractError:
    return ContractError(f"a setting cannot have type {annotation}")


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


def _choice(family: type[Config]) -> Read:
    """Read `lru`, or `{type: lru, …}` with the settings of the chosen class."""

    def read(node: Node, choose: Choose) -> Any:
        written = node if isinstance(node.value, dict) else attrs.evolve(node, value={"type": node})
        config = chosen(written, family, choose)
        if not issubclass(config, family):
            raise node.wrong(f"expected {family.__name__}, found '{config.type}'")
        return _read_group(config, written, choose, type=Setting(read_text, required=True))

    return read


def _read_group(cls: type[T], node: Node, choose: Choose, **beside: Setting) -> T:
    """Read the settings of one class from a mapping, which may have others ``beside`` them."""
    collector = ProblemCollector()
    values = read_keys(node, {**beside, **settings(cls)}, choose, collector)
    validate(cls, node, values, collector)
    collector.raise_if_any()
    return construct(cls, node, {key: value for key, value in values.items() if key not in beside})


def chosen(node: Node, family: type[Config], choose: Choose) -> type[Config]:
    """The class that `type` names in this mapping. Raises ConfigError."""
    if "type" not in node.entries():
        raise node.wrong("'type' is missing")
    named = node.entries()["type"]
    config = choose(family, read_text(named, choose))
    if isinstance(config, Unavailable):
        raise named.wrong(config.why, config.hint)
    return config


def written(value: Any) -> Any:
    """A setting in plain values from which it can be read again; for a plugin's Config, its type and all settings."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [written(each) for each in value]
    if attrs.has(type(value)) and type(value) not in SCALARS:
        chosen = {"type": value.type} if isinstance(value, Config) else {}
        fields = [field for field in attrs.fields(type(value)) if field.init]
        return chosen | {field.alias: written(getattr(value, field.name)) for field in fields}
    return value if type(value) in (bool, int, float, str, types.NoneType) else str(value)


# -- classes ---------------------------------------------------------------------------------------


@attrs.frozen
class Setting:
    """How the value of a key is read, and whether the key is required."""

    read: Read
    required: bool


def settings(cls: type, but: Collection[str] = ()) -> dict[str, Setting]:
    """The keys of an attrs class, except those in ``but``. Raises ContractError for a type that no setting can have."""
    hints = typing.get_type_hints(cls)
    return {
        field.alias: Setting(_hidden(field, _of_field(cls, field, hints)), required=field.default is attrs.NOTHING)
        for field in attrs.fields(cls)
        if field.init and field.name not in but
    }


def _of_field(cls: type, field: attrs.Attribute, hints: Mapping[str, Any]) -> Read:
    """How the values of a field are read. Raises ContractError, which names the field."""
    if field.name not in hints:
        raise ContractError(f"{cls.__name__}.{field.name} has no type; annotate it")
    try:
        return reader(hints[field.name])
    except ContractError as error:
        raise ContractError(f"{cls.__name__}.{field.name}: {error}") from error


def _hidden(field: attrs.Attribute, read: Read) -> Read:
    """A field with ``repr=False`` may be secret, so its value is not shown in problems either."""

    def read_hidden(node: Node, choose: Choose) -> Any:
        try:
            return read(node, choose)
        except ConfigError:
            raise node.wrong("cannot be read; the value is not shown") from None

    return read if field.repr else read_hidden


def read_keys(node: Node, known: Mapping[str, Setting], choose: Choose, collector: ProblemCollector) -> dict[str, Any]:
    """The values of the keys that are written. Problems, such as unknown keys, go to ``collector``."""
    values = read_known(node, known, choose, collector)
    for key, below in node.entries().items():
        if key not in known:
            hint = guess(key, known) or f"known keys: {', '.join(known)}"
            collector.problems.append(below.problem(f"unknown key {key!r}", hint))
    return values


def read_known(node: Node, known: Mapping[str, Setting], choose: Choose, collector: ProblemCollector) -> dict[str, Any]:
    """The values of the known keys that are written; other keys are ignored."""
    entries, values = node.entries(), {}
    for key, setting in known.items():
        if key in entries:
            with collector:
                values[key] = setting.read(entries[key], choose)
        elif setting.required:
            collector.problems.append(node.problem(f"'{key}' is missing"))
    return values


def validate(cls: type, node: Node, values: Mapping[str, Any], collector: ProblemCollector) -> None:
    """Call each validator of the class separately: attrs would stop at the first problem and not name the field."""
    fields = [field for field in attrs.fields(cls) if field.init]
    constant = [f for f in fields if f.default is not attrs.NOTHING and not isinstance(f.default, attrs.Factory)]  # type: ignore[arg-type]  # typed as a function
    defaults = {field.name: field.default for field in constant}
    given = {field.name: values[field.alias] for field in fields if field.alias in values}
    instance = types.SimpleNamespace(**{**defaults, **given})
    for field in fields:
        if field.name in given:
            with collector:
                _validate(field, instance, node.entries()[field.alias])


def construct(cls: type[T], node: Node, values: Mapping[str, Any]) -> T:
    """An instance with these values, in which `validate` found no problem. Raises ConfigError."""
    try:
        return cls(**values)
    except ValueError as error:
        raise node.wrong(_words(error)) from error


def _validate(field: attrs.Attribute, instance: types.SimpleNamespace, node: Node) -> None:
    try:
        if field.validator is not None:
            field.validator(instance, field, getattr(instance, field.name))
    except (ValueError, TypeError) as error:
        if not field.repr:
            raise node.wrong("is not allowed; the value is not shown") from None
        raise node.wrong(_words(error)) from error
    except AttributeError:
        pass  # it compares with a field that could not be read, which has been reported


def _words(error: Exception) -> str:
    """Only the message: attrs appends the field and its options."""
    return str(error.args[0]) if error.args else type(error).__name__
