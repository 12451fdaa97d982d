"""Translates tiers into the hit sources of vLLM's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtier_core.interfaces import Medium
from kvtier_core.vllm.versions import CacheHitSource


def as_vllm_says(tokens: Mapping[str, int], media: Mapping[str, Medium]) -> dict[CacheHitSource, int]:
    """Tokens by vLLM's kind of source, from tokens by tier. ``media`` says for each tier what it stores on."""
    by_medium = {Medium.HOST: CacheHitSource.HOST, Medium.DISK: CacheHitSource.DISK}
    counts: Counter[CacheHitSource] = Counter()
    for tier, count in tokens.items():
        counts[by_medium.get(media.get(tier), CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
    return dict(counts)
