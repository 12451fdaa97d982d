"""The stack in kvtier's own file, or in a file with the JSON that vLLM, LMCache or SGLang takes."""

from __future__ import annotations

from kvtier_core.config import yaml_nodes
from kvtier_core.config.load import load_config, read_stack
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.yaml_nodes import Node, ProblemCollector

#: For each class that a host loads: the key that names it, and its module.
_CLASSES = {
    "KVTier": ("type", "kvtier_vllm.offloading"),
    "KVTierL2Adapter": ("class_name", "kvtier_hosts.lmcache"),
    "KVTierHiCache": ("class_name", "kvtier_hosts.hicache"),
}


def stack_in(file: str) -> StackConfig:
    """The stack that a file, or the file that it names, describes. Raises ConfigError with every problem found."""
    collector, registry = ProblemCollector(), Registry.discover()
    root = yaml_nodes.from_file(file, collector)
    with collector:
        inner = next((stack for node in root.walk() if (stack := _of_host(node))), None)
        named = inner.value if inner is not None else None
        config = load_config(named, registry) if isinstance(named, str) else read_stack(inner or root, registry)
        if inner is not None:
            config.check_host()
    collector.raise_if_any()
    return config


def _of_host(node: Node) -> Node | None:
    """The stack in a mapping that names one of our classes, or its module; None for others. Raises ConfigError."""
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
