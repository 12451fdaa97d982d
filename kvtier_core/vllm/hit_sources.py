"""How much of a hit came from which tier, in tokens, and in vLLM's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvtier_core.interfaces import Medium
from kvtier_core.vllm.versions import CacheHitSource


def tokens_by_tier(tiers: Sequence[str], first: int, computed: int, tokens: int, chunk_tokens: int) -> Counter[str]:
    """Of ``tokens`` behind the first ``computed``: how many each tier supplied.

    ``tiers`` names that of each chunk, from chunk number ``first`` on. The counts add up to ``tokens``.
    """
    counts: Counter[str] = Counter()
    for chunk, tier in enumerate(tiers, start=first):
        begin, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        counts[tier] += min(end, computed + tokens) - max(begin, computed)
    return counts


def as_vllm_says(tokens: Mapping[str, int], media: Mapping[str, Medium]) -> dict[CacheHitSource, int]:
    """Tokens by where vLLM's metrics have them from. ``media`` are those of the tiers."""
    words = {Medium.HOST: CacheHitSource.HOST, Medium.DISK: CacheHitSource.DISK}
    counts: Counter[CacheHitSource] = Counter()
    for tier, count in tokens.items():
        counts[words.get(media[tier], CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
    return dict(counts)
