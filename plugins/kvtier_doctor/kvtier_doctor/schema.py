"""`kvtier schema`: a JSON Schema (draft 7, which editors read) of the configuration file, from the classes for it.

It refuses nothing that `load` accepts. Only `load` refuses values that validators reject.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, Union

import attrs

from kvtier_core.cli.output import FINE, Output
from kvtier_core.config.decode import KIND_OF
from kvtier_core.config.examine import Offer
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.interfaces import ArenaConfig, BackendConfig
from kvtier_core.types import EnvSecret, Nbytes, Seconds

Schema = dict[str, Any]

#: Begins the description of a setting, above its field or after it.
_MARK = "#:"

#: YAML's own types do not count: a scalar is its text.
_TEXT: Schema = {"type": ["string", "number", "boolean"]}
_SCALARS: Mapping[Any, Schema] = {
    bool: {"enum": [True, False, "yes", "no", "on", "off"]},
    int: {"type": "integer"},
    float: {"type": "number"},
    Nbytes: {"type": "string", "pattern": rf"^\s*({Nbytes.PATTERN})\s*$"},
    Seconds: {"type": "string", "pattern": rf"^\s*({Seconds.PATTERN})\s*$"},
    EnvSecret: {"type": "string", "pattern": rf"^\s*({EnvSecret.PATTERN})\s*$"},
}
#: Words that YAML 1.1 takes for booleans, where they are choices.
_ALSO = {"on": True, "off": False, "yes": True, "no": False}
#: Comparisons of numbers, by attrs' name for them, in the words of JSON Schema.
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def add_to(commands: argparse._SubParsersAction) -> None:
    commands.add_parser(
        "schema",
        help="print a JSON Schema of the configuration file, for editors",
        description="Print a JSON Schema of the configuration file, with all plugins that are installed. An editor "
        "that reads '# yaml-language-server: $schema=kvtier.schema.json' completes and checks the file with it.",
    ).set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """The schema, with --json or without."""
    output.value = schema_of(Registry.discover())
    output.say(json.dumps(output.value, indent=1))
    return FINE


def schema_of(registry: Registry) -> Schema:
    """The schema of a file that may name every usable plugin of this registry."""
    making = _Making(registry)
    arenas, stores = making.tiers(True), making.tiers(False)
    tiers = {
        "type": "array",
        "description": comments_of(StackConfig)["tiers"],
        "minItems": 1,
        "items": [{"anyOf": arenas}],
        "additionalItems": {"anyOf": arenas + stores},
    }
    whole = making.group(StackConfig, but=("tiers", "_places", "_plugins"))
    whole["properties"] = {"version": {"const": 1}, "tiers": tiers, **whole["properties"]}
    whole["required"] = ["version"]
    whole["oneOf"] = [{"required": ["tiers"]}, {"required": ["server"]}]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "kvtier.yaml", **whole}


@attrs.frozen
class _Making:
    registry: Registry

    def tiers(self, arenas: bool) -> list[Schema]:
        """The schemas of the arenas, or of all other tiers."""
        offers = [offer for offer in self._offers("tier") if issubclass(offer.config, ArenaConfig) == arenas]
        return [self._tier(offer) for offer in offers]

    def _tier(self, offer: Offer) -> Schema:
        shape = ArenaTierConfig if issubclass(offer.config, ArenaConfig) else StoreTierConfig
        its = self._chosen(offer)
        own = self.group(shape, but=("name", "config", "source", *its["properties"]))
        its["properties"] |= own["properties"]
        its["required"] += own["required"]
        if issubclass(offer.config, BackendConfig) and offer.config.shared is not True:
            must = {"required": ["capacity"]}
            shared = {"required": ["shared"], "properties": {"shared": {"enum": [True, "yes", "on"]}}}
            its["anyOf"] = [must, shared] if "shared" in its["properties"] else [must]
        return its

    def _chosen(self, offer: Offer) -> Schema:
        """The settings of a plugin, and its name."""
        group = self.group(offer.config)
        group["properties"] = {"type": {"enum": self._names(offer)}, **group["properties"]}
        group["required"] = ["type", *group["required"]]
        return group

    def group(self, cls: type, but: Collection[str] = ()) -> Schema:
        """A mapping with the fields of a class, except those in ``but``."""
        hints, comments = typing.get_type_hints(cls), comments_of(cls)
        fields = [field for field in attrs.fields(cls) if field.init and field.name not in but]
        properties = {}
        for field in fields:
            described = {"description": comments[field.name]} if field.name in comments else {}
            properties[field.alias] = {**self._of(hints[field.name]), **_bounds(field.validator), **described}
        return {
            "type": "object",
            "description": first_paragraph(cls),
            "properties": properties,
            "required": [field.alias for field in fields if field.default is attrs.NOTHING],
            "additionalProperties": False,
        }

    def _of(self, annotation: Any) -> Schema:
        """The values that `decode.reader` reads for this annotation."""
        if annotation in _SCALARS:
            return _SCALARS[annotation]
        if annotation in KIND_OF:
            return self._choice(KIND_OF[annotation])
        if attrs.has(annotation):
            return self.group(annotation)
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self._of(each) for each in arguments]}
        if origin is tuple:
            return {"type": "array", "items": self._of(arguments[0])}
        if origin is Literal:
            return _words(arguments)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return _words([each.value for each in annotation])
        return {"type": "null"} if annotation is types.NoneType else _TEXT

    def _choice(self, kind: str) -> Schema:
        """A plugin by its name, or a mapping with its name and its settings."""
        offers = list(self._offers(kind))
        bare = [name for offer in offers if not self.group(offer.config)["required"] for name in self._names(offer)]
        return {"anyOf": [{"enum": bare}, *map(self._chosen, offers)]}

    def _offers(self, kind: str) -> Iterator[Offer]:
        return (offer for offer in self.registry.offers() if offer.kind == kind)

    def _names(self, offer: Offer) -> list[str]:
        """The names that mean this offer and no other."""
        return [name for name in offer.names if self.registry.choose(offer.kind, name) is offer.config]


def comments_of(cls: type) -> Mapping[str, str]:
    """The ``#:`` comment of each field of a class and its bases, by name; fields without one are left out."""
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
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    found = {
        node.target.id: " ".join([*_above(lines, node.lineno - 1), *_behind(lines, node.end_lineno or node.lineno)])
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name: comment for name, comment in found.items() if comment}


def _above(lines: list[str], line: int) -> list[str]:
    """The comment that ends right above this line."""
    first = line
    while first and lines[first - 1].lstrip().startswith(_MARK):
        first -= 1
    return [each.lstrip().removeprefix(_MARK).strip() for each in lines[first:line]]


def _behind(lines: list[str], line: int) -> list[str]:
    _, mark, comment = lines[line - 1].partition(f"  {_MARK}")
    return [comment.strip()] if mark else []


def _words(choices: Collection[Any]) -> Schema:
    return {"enum": [*choices, *(also for word, also in _ALSO.items() if word in choices)]}


def _bounds(validator: Any) -> Schema:
    """The bounds of a number that attrs knows."""
    each = getattr(validator, "_validators", [validator])
    return {_BOUNDS[one.compare_op]: one.bound for one in each if getattr(one, "compare_op", "") in _BOUNDS}
