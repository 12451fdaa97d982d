"""The versions of vLLM that kvtier serves, and how they differ."""

from __future__ import annotations

import re

import vllm
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
except ModuleNotFoundError:  # before 0.32, which has no sources of hits
    CacheHitSource = None

try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys as to_event_extra_keys
except ImportError:  # then its events have other fields
    to_event_extra_keys = None

#: The first and the last version that kvtier was tested with, as major and minor number.
FIRST, LAST = (0, 30), (0, 33)


def warning(version: str = vllm.__version__) -> str:
    """A warning if kvtier was not tested with this version of vLLM; empty if it was."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and FIRST <= tuple(map(int, numbers.groups())) <= LAST:
        return ""
    tested = " to ".join(".".join(map(str, each)) for each in (FIRST, LAST))
    return f"vLLM {version} was not tested with this kvtier, which serves {tested}"


def is_sharded(spec: KVCacheSpec) -> bool:
    """Do the ranks of decode context parallelism divide the tokens of a block of this kind?"""
    return getattr(spec, "dcp_sharded", True)  # every kind's, before 0.32


def replicas_of(config: KVCacheConfig) -> int:
    """How many tensor-parallel ranks have the same KV; also 1 if vLLM does not report it."""
    return getattr(config, "kv_tp_replicas", 1)  # since 0.32


def kinds_in_events(manager: KVCacheManager, config: KVCacheConfig) -> list[str | None]:
    """The kind of each group as vLLM's events name it; None where they do not."""
    unnamed = [(None, None)] * len(config.kv_cache_groups)
    return [kind for kind, _ in getattr(manager, "kv_cache_event_metadata", unnamed)]  # since 0.32


def lookahead_of(config: VllmConfig) -> int | None:
    """How many tokens after a position the KV of draft layers there depends on; None if vLLM does not report it."""
    if hasattr(config, "num_prefill_lookahead_tokens"):  # since 0.32
        return config.num_prefill_lookahead_tokens
    speculative = config.speculative_config
    if not speculative.use_eagle():
        return 0
    modules = getattr(speculative.draft_model_config.hf_config, "num_nextn_predict_layers", 1)
    return 1 if speculative.method != "mtp" or min(modules, speculative.num_speculative_tokens) == 1 else None
