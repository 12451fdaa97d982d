"""Reads a StackConfig from a YAML file, or from the same keys given inline."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

import attrs

from kvtier_core.config import decode, yaml_nodes
from kvtier_core.config.decode import KIND_OF, Setting
from kvtier_core.config.model import ArenaTierConfig, Config, Source, StackConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.scalars import Choose, Unavailable
from kvtier_core.config.yaml_nodes import Node, ProblemCollector
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import ArenaConfig, BackendConfig
from kvtier_core.work.io_pool import run

_TierPlugin = ArenaConfig | BackendConfig
_Tier = ArenaTierConfig | StoreTierConfig

#: Fields of a tier that are not keys in YAML.
_NOT_WRITTEN = ("name", "config", "source")


def load_config(source: pathlib.Path | str | Mapping, registry: Registry, label: str = "inline") -> StackConfig:
    """Read a configuration from a YAML file, or from a mapping with the same keys and plain values.

    ``label`` is the name of a mapping in problems. Raises ConfigError with every problem found.
    """
    collector = ProblemCollector()
    if isinstance(source, Mapping):
        root = yaml_nodes.from_plain(source, label, collector)
    else:
        root = yaml_nodes.from_file(source, collector)
    with collector:
        config = read_stack(root, registry)
    collector.raise_if_any()
    return config


def read_stack(root: Node, registry: Registry) -> StackConfig:
    """Read a configuration that may be a part of a document. Raises ConfigError with every problem found."""

    def choose(family: type[Config], name: str) -> type[Config] | Unavailable:
        return registry.choose(KIND_OF[family], name)

    plugins = registry.plugins()
    served = "server" in root.entries()
    known = {
        "version": Setting(decode.reader(Literal[1]), required=True),
        "tiers": Setting(lambda node, choose: _read_tiers(node, choose, plugins), required=not served),
        **decode.settings(StackConfig, but=("tiers", "_places", "_plugins")),
    }
    collector = ProblemCollector()
    values = decode.read_keys(root, known, choose, collector)
    if served and (tiers := root.entries().get("tiers")) is not None:
        collector.problems.append(tiers.problem("the server already has the tiers", "remove 'tiers' or 'server'"))
    decode.validate(StackConfig, root, values, collector)
    collector.raise_if_any()
    del values["version"]
    places = {"$" + node.path.removeprefix(root.path): node.where for node in root.walk()}
    return decode.construct(StackConfig, root, {"tiers": (), **values, "places": places, "plugins": plugins})


def _read_tiers(node: Node, choose: Choose, plugins: Mapping[type, str]) -> tuple[_Tier, ...]:
    items = node.items()
    if not items:
        raise node.wrong("a stack needs at least one tier")
    collector = ProblemCollector()
    classes = [_class_of(item, choose, collector) for item in items]
    arenas = [cls for cls in classes if cls is not None and issubclass(cls, ArenaConfig)]
    first, alone = classes[0], False
    if first is not None and not issubclass(first, ArenaConfig):
        alone = not arenas and first.staging_arena is not BackendConfig.staging_arena
        if not alone:
            collector.problems.append(_no_arena(items[0], first))
    tiers = []
    for item, cls, name in zip(items, classes, _names(classes), strict=True):
        if cls is not None:
            with collector:
                tiers.append(_read_tier(item, cls, choose, name, plugins[cls]))
    collector.raise_if_any()
    if alone and isinstance(hottest := tiers[0], StoreTierConfig):
        return (_staging(items[0], hottest), *tiers)
    return tuple(tiers)


def _no_arena(node: Node, cls: type[_TierPlugin]) -> Problem:
    why = f"the first tier must be an arena, but '{cls.type}' is not: no engine can reach its memory"
    return node.entries()["type"].problem(why, "put an arena first, such as cpu")


def _staging(node: Node, tier: StoreTierConfig) -> ArenaTierConfig:
    """The arena above a tier that provides its own. Raises ConfigError."""
    outcome = run(tier.config.staging_arena)
    if outcome.error is not None:
        raise node.wrong(f"{tier.source.plugin} cannot provide an arena: {outcome.error}") from outcome.error
    if outcome.value is None:
        raise ConfigError([_no_arena(node, type(tier.config))])
    arena, capacity = outcome.value
    source = attrs.evolve(tier.source, path=f"{tier.source.path}.staging")
    return ArenaTierConfig(arena.type, arena, capacity, source=source)


def _class_of(node: Node, choose: Choose, collector: ProblemCollector) -> type[_TierPlugin] | None:
    """The plugin's Config class; None if there is none, with the problems in ``collector``."""
    with collector:
        return cast(type[_TierPlugin], decode.chosen(node, BackendConfig, choose))  # arenas are found, too
    if isinstance(node.value, dict):
        decode.read_known(node, _own_settings(StoreTierConfig), choose, collector)
    return None


def _read_tier(node: Node, cls: type[_TierPlugin], choose: Choose, name: str, plugin: str) -> _Tier:
    shape: type[_Tier] = ArenaTierConfig if issubclass(cls, ArenaConfig) else StoreTierConfig
    its = decode.settings(cls)
    own = _own_settings(shape, but=its)
    if not issubclass(cls, ArenaConfig) and not (cls.shared is True or "shared" in node.entries()):
        own["capacity"] = attrs.evolve(own["capacity"], required=True)
    known = {"type": Setting(decode.reader(str), required=True), **own, **its}
    collector = ProblemCollector()
    values = decode.read_keys(node, known, choose, collector)
    core = {key: values[key] for key in own if key in values}
    decode.validate(cls, node, values, collector)
    decode.validate(shape, node, core, collector)
    collector.raise_if_any()
    config = decode.construct(cls, node, {key: values[key] for key in its if key in values})
    if not isinstance(config, ArenaConfig) and "capacity" not in core and not config.shared:
        raise node.wrong("'capacity' is missing; only a shared tier may omit it")
    source = Source(node.where, f"$.tiers{node.path.rpartition('.tiers')[2]}", plugin)
    return decode.construct(shape, node, {"name": name, "config": config, "source": source, **core})


def _own_settings(shape: type[_Tier], but: Iterable[str] = ()) -> dict[str, Setting]:
    """The core's own keys, except those that are fields of the plugin's Config."""
    return decode.settings(shape, but=(*_NOT_WRITTEN, *but))


def _names(classes: Sequence[type[_TierPlugin] | None]) -> list[str]:
    """The names of the tiers: `disk`, and `disk#2` for the second of that type."""
    seen: Counter[str] = Counter()
    names = []
    for cls in classes:
        name = cls.type if cls else ""
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
