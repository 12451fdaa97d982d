"""How long a prompt waits for its prefill: reads from the tiers, one after another, and computing the rest."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvtier_core.types import Seconds


@attrs.frozen
class Speed:
    """How fast a tier is read."""

    gigabytes: float  #: of KV, in 10^9 bytes per second
    latency: Seconds = Seconds(0)  #: of a prompt's first byte

    def seconds(self, nbytes: int) -> float:
        """Seconds to read this number of bytes for one prompt; 0 for none."""
        return self.latency + nbytes / (self.gigabytes * 1e9) if nbytes else 0.0


@attrs.frozen
class Costs:
    """Nothing overlaps, and every token costs the same: good for comparing caches, not for a forecast."""

    speeds: Mapping[str, Speed]  #: of each tier, by name
    prefill: float  #: tokens computed per second
    chunk_nbytes: int

    def seconds(self, tokens: int, chunks: Mapping[str, int]) -> float:
        """Seconds until the prefill of a prompt is over: ``tokens`` are computed, ``chunks`` come from each tier."""
        reads = (self.speeds[tier].seconds(count * self.chunk_nbytes) for tier, count in chunks.items())
        return tokens / self.prefill + sum(reads)
