"""From a YAML file, or the same keys inline, to a StackConfig."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from kvtier_core.config import decode, yaml_nodes
from kvtier_core.config.decode import Choose, Setting, Unavailable
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.registry import KINDS, Registry
from kvtier_core.config.yaml_nodes import Node, ProblemCollector
from kvtier_core.interfaces import ArenaConfig, BackendConfig

_KIND_OF = {family: word for word, kind in KINDS.items() for family in kind.families}


def load_config(source: pathlib.Path | str | Mapping, registry: Registry, label: str = "inline") -> StackConfig:
    """From a YAML file, or from plain values that somebody calls ``label``. Raises ConfigError with every problem."""

    def choose(family: type, name: str) -> type | Unavailable:
        return registry.choose(_KIND_OF[family], name)

    collector = ProblemCollector()
    root = (
        yaml_nodes.from_plain(source, label, collector)
        if isinstance(source, Mapping)
        else yaml_nodes.from_file(source, collector)
    )
    with collector:
        config = _read_stack(root, choose)
    collector.raise_if_any()
    return config


def _read_stack(root: Node, choose: Choose) -> StackConfig:
    known = {
        "version": Setting(decode.reader(Literal[1]), required=True),
        "tiers": Setting(_read_tiers, required=True),
        **decode.settings(StackConfig, but=("tiers", "_places")),
    }
    collector = ProblemCollector()
    values = decode.read_keys(root, known, choose, collector)
    decode.validate(StackConfig, root, values, collector)
    collector.raise_if_any()
    del values["version"]
    places = {node.path: node.where for node in root.walk()}
    return decode.construct(StackConfig, root, {**values, "places": places})


def _read_tiers(node: Node, choose: Choose) -> tuple[ArenaTierConfig | StoreTierConfig, ...]:
    items = node.items()
    if not items:
        raise node.wrong("a stack needs at least one tier")
    collector = ProblemCollector()
    plugins = [_plugin_of(item, choose, collector) for item in items]
    if plugins[0] is not None and not issubclass(plugins[0], ArenaConfig):
        why = f"the first tier must be an arena, and '{plugins[0].type}' is none: no engine can reach its memory"
        collector.problems.append(items[0].entries()["type"].problem(why, "put an arena first, cpu for instance"))
    tiers = []
    for item, plugin, name in zip(items, plugins, _names(plugins), strict=True):
        if plugin is not None:
            with collector:
                tiers.append(_read_tier(item, plugin, name, choose))
    collector.raise_if_any()
    return tuple(tiers)


def _plugin_of(node: Node, choose: Choose, collector: ProblemCollector) -> type | None:
    """None if nothing more can be said of this tier; then all that is wrong is in ``collector``."""
    with collector:
        return decode.chosen(node, BackendConfig, choose)
    if isinstance(node.value, dict):
        decode.read_known(node, _own_settings(StoreTierConfig), choose, collector)
    return None


def _read_tier(node: Node, plugin: type, name: str, choose: Choose) -> ArenaTierConfig | StoreTierConfig:
    shape = ArenaTierConfig if issubclass(plugin, ArenaConfig) else StoreTierConfig
    own, its = _own_settings(shape), decode.settings(plugin)
    known = {"type": Setting(decode.reader(str), required=True), **own, **its}
    collector = ProblemCollector()
    values = decode.read_keys(node, known, choose, collector)
    decode.validate(plugin, node, values, collector)
    decode.validate(shape, node, values, collector)
    collector.raise_if_any()
    config = decode.construct(plugin, node, {key: values[key] for key in its if key in values})
    core = {key: values[key] for key in own if key in values}
    return decode.construct(shape, node, {"name": name, "config": config, **core})


def _own_settings(shape: type) -> dict[str, Setting]:
    return decode.settings(shape, but=("name", "config"))


def _names(plugins: Sequence[type | None]) -> list[str]:
    """`disk`, and `disk#2` for the second of that type."""
    seen: Counter[type | None] = Counter()
    names = []
    for plugin in plugins:
        seen[plugin] += 1
        first = plugin.type if plugin else ""
        names.append(first if seen[plugin] == 1 else f"{first}#{seen[plugin]}")
    return names
