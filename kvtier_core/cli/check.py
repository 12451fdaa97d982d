"""`kvtier check FILE`: the effective settings of a file, or everything that is wrong with it."""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Iterator
from typing import Any

import attrs

from kvtier_core.config.load import load_config
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.types import EnvSecret


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("check", help="show the settings of a configuration file, or all its problems")
    parser.add_argument("file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each setting and return 0, or print every problem and return 2."""
    try:
        config = load_config(options.file, Registry.discover())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [(path, value, config.origin(path)) for path, value in _settings(config)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for path, value, origin in rows:
        print(f"{path.ljust(widths[0])}  {value.ljust(widths[1])}  {origin}")
    return 0


def _settings(config: StackConfig) -> Iterator[tuple[str, str]]:
    for i, tier in enumerate(config.tiers):
        yield from _of_tier(tier, config.path_of(i))
    yield from _of_fields(config, "$", but=("tiers", "observers", "_places", "_plugins"))
    for i, observer in enumerate(config.observers):
        yield f"$.observers[{i}].type", observer.type
        yield from _of_fields(observer, f"$.observers[{i}]")


def _of_tier(tier: ArenaTierConfig | StoreTierConfig, path: str) -> Iterator[tuple[str, str]]:
    yield f"{path}.type", tier.config.type
    yield from _of_fields(tier.config, path)
    yield from _of_fields(tier, path, but=("name", "config", "source"))


def _of_fields(config: Any, path: str, but: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    for field in attrs.fields(type(config)):
        if field.init and field.name not in but:
            value = getattr(config, field.name)
            at = f"{path}.{field.alias}"
            if attrs.has(type(value)) and not isinstance(value, EnvSecret):
                if hasattr(value, "type"):  # a plugin that was chosen by its name
                    yield at, value.type
                yield from _of_fields(value, at)
            else:
                yield at, _shown(value) if field.repr else "(hidden)"


def _shown(value: Any) -> str:
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "~"}[value]
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    text = str(value)
    return text if text and text.isprintable() else repr(text)
