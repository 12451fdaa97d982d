"""Outcomes of lookups and loads."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvtier_core.types import Slot, StoredFrame


@attrs.frozen
class LoadLimit:
    """The cost to the engine of a request that waits for chunks below the arenas."""

    chunk_seconds: float  #: in which the engine computes one chunk
    wait: float  #: seconds that the request may still wait


@attrs.frozen
class Declined:
    """Chunks that a tier has and that are computed instead, because that is sooner done."""

    tier: str
    chunks: int
    load_seconds: float | None  #: in which they would be loaded; None: not known, and the request may not wait
    compute_seconds: float  #: in which they are computed

    def __str__(self) -> str:
        if self.load_seconds is None:
            return f"{self.tier} has {self.chunks} more chunks, and the request has waited for as long as it may"
        return (
            f"{self.tier} has {self.chunks} more chunks: {self.load_seconds:.3f} s to load them, "
            f"{self.compute_seconds:.3f} s to compute them"
        )


@attrs.frozen
class Lookup:
    """The part of a path that a stack has.

    Slots are pinned, and frames stay where they are, for the holder that asked, until `Stack.release`.
    """

    #: Of the leading chunks that can be loaded now; of a chunk that workers read from a store its frame.
    slots: Sequence[Slot | StoredFrame] = ()
    sources: Sequence[str] = ()  #: for each slot, the tier that supplied its chunk
    #: Where chunks have several parts: for each slot the number of its chunk in the path, and of the part in the chunk.
    #: Empty: slot ``i`` holds the only part of chunk ``i``.
    parts: Sequence[tuple[int, int]] = ()
    chunks: int = 0  #: so many leading chunks are restored by loading the slots
    chain: int = 0  #: so many leading chunks are held, though nobody may be able to continue behind the last of them
    exact: int = 0  #: so many of the leading slots are as an engine computed them; others came through a lossy codec
    pending: int = 0  #: chunks behind them of which some are still on their way into an arena: look again after a step
    awaited: str = ""  #: the tier that the first of these comes from, or that is asked for it
    silence: float = 0.0  #: seconds for which that tier's store has owed an answer, or has delivered nothing
    declined: Declined | None = None  #: what could be loaded behind all these, and is not worth it
    miss_reason: str = ""  #: why the first chunk behind all these is not found; empty if the whole path is


@attrs.frozen
class Whereabouts:
    """Where one chunk is now."""

    tiers: tuple[str, ...]  #: from which it can be loaded, hottest first
    miss_reason: str = ""  #: why it cannot be loaded from any
