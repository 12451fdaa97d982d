"""Which versions of vLLM kvtier serves, and the one place that knows how they differ."""

from __future__ import annotations

import re

import vllm

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # before 0.32; there nobody asks which tier a hit came from
    CacheHitSource = None

__all__ = ["FIRST", "LAST", "CacheHitSource", "doubt"]

#: The first and the last version that were tried, as major and minor number.
FIRST, LAST = (0, 30), (0, 33)


def doubt(version: str = vllm.__version__) -> str:
    """What speaks against this version of vLLM; empty if it is one that was tried."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and FIRST <= tuple(map(int, numbers.groups())) <= LAST:
        return ""
    tried = " to ".join(".".join(map(str, each)) for each in (FIRST, LAST))
    return f"vLLM {version} was not tried with this kvtier, which serves {tried}"
