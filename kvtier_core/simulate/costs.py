"""What a prompt waits for: reads from the tiers, one after the other, and the prefill of the rest."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvtier_core.types import Seconds


@attrs.frozen
class Speed:
    """Of reading from a tier."""

    gigabytes: float  #: 10^9 bytes a second
    latency: Seconds = Seconds(0)  #: of a prompt's first byte

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / (self.gigabytes * 1e9) if nbytes else 0.0


@attrs.frozen
class Costs:
    """Nothing overlaps, and a token costs the same at every depth: a comparison of caches, not a forecast."""

    speeds: Mapping[str, Speed]  #: of each tier, by its name
    prefill: float  #: tokens a second
    chunk_nbytes: int

    def seconds(self, tokens: int, chunks: Mapping[str, int]) -> float:
        """For a prompt of which ``tokens`` are computed, and so many chunks come from each tier."""
        reads = (self.speeds[tier].seconds(count * self.chunk_nbytes) for tier, count in chunks.items())
        return tokens / self.prefill + sum(reads)
