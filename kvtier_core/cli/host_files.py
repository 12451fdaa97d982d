"""The stack in a file of kvtier's own, or in one with the JSON that vLLM, LMCache or SGLang takes."""

from __future__ import annotations

from kvtier_core.config import yaml_nodes
from kvtier_core.config.load import load_config, read_stack
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.yaml_nodes import Node, ProblemCollector
from kvtier_core.hosts import page_stack

#: By the class that a host loads: the key that names it, and its module.
_CLASSES = {
    "KVTier": ("type", "kvtier_core.hosts.vllm_tiers"),
    "KVTierL2Adapter": ("class_name", "kvtier_core.hosts.lmcache"),
    "KVTierHiCache": ("class_name", "kvtier_core.hosts.hicache"),
}


def stack_in(file: str) -> StackConfig:
    """The stack that a file describes, or a file that is named in it. Raises ConfigError with every problem found."""
    collector, registry = ProblemCollector(), Registry.discover()
    root = yaml_nodes.from_file(file, collector)
    with collector:
        inner = next((stack for node in root.walk() if (stack := _of_host(node))), None)
        named = inner is not None and isinstance(inner.value, str)
        config = load_config(inner.value, registry) if named else read_stack(inner or root, registry)
        if inner is not None:
            page_stack.check(config)
    collector.raise_if_any()
    return config


def _of_host(node: Node) -> Node | None:
    """The stack below a mapping that names a class of ours, or its module; None of others. Raises ConfigError."""
    written = node.value if isinstance(node.value, dict) else {}
    for name, (key, module) in _CLASSES.items():
        names = {key: name, "module_path": module}
        wrong = [each for each in names if each not in written or written[each].value != names[each]]
        if len(wrong) == len(names):
            continue
        for each in wrong:
            raise written.get(each, node).wrong(f"{each!r} must be {names[each]!r}")
        if name == "KVTierL2Adapter":
            node = _needed(node, "adapter_params")
            _needed(node, "models")
        return _needed(node, "config")
    return None


def _needed(node: Node, key: str) -> Node:
    if key not in node.entries():
        raise node.wrong(f"'{key}' is missing")
    return node.entries()[key]
