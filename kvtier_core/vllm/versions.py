"""The versions of vLLM that kvtier serves, and how they differ."""

from __future__ import annotations

import re

import vllm

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # before 0.32, which has no sources of hits
    CacheHitSource = None

try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys
except ImportError:  # then its events have other fields
    to_event_extra_keys = None

__all__ = ["FIRST", "LAST", "CacheHitSource", "to_event_extra_keys", "warning"]

#: The first and the last version that kvtier was tested with, as major and minor number.
FIRST, LAST = (0, 30), (0, 33)


def warning(version: str = vllm.__version__) -> str:
    """A warning if kvtier was not tested with this version of vLLM; empty if it was."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and FIRST <= tuple(map(int, numbers.groups())) <= LAST:
        return ""
    tested = " to ".join(".".join(map(str, each)) for each in (FIRST, LAST))
    return f"vLLM {version} was not tested with this kvtier, which serves {tested}"
