"""Outcomes of lookups and loads."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvtier_core.types import Slot, StoredFrame


@attrs.frozen
class LoadLimit:
    """What waiting for chunks below the arenas may cost a request."""

    chunk_seconds: float  #: the engine's time to compute one chunk
    wait: float  #: seconds that the request may still wait


@attrs.frozen
class Declined:
    """Chunks that a tier has, and that the engine computes because computing is faster than loading."""

    tier: str
    chunks: int
    load_seconds: float | None  #: None: unknown, and the request may not wait
    compute_seconds: float

    def __str__(self) -> str:
        if self.load_seconds is None:
            return f"{self.tier} has {self.chunks} more chunks, and the request has waited for as long as it may"
        return (
            f"{self.tier} has {self.chunks} more chunks: {self.load_seconds:.3f} s to load them, "
            f"{self.compute_seconds:.3f} s to compute them"
        )


@attrs.frozen
class Lookup:
    """The part of a path that a stack holds.

    Slots are pinned for the holder, and frames stay in place, until `Stack.release`.
    """

    #: The leading chunks that can be loaded now; a `StoredFrame` for each one that workers read from a store.
    slots: Sequence[Slot | StoredFrame] = ()
    sources: Sequence[str] = ()  #: for each slot, the tier that supplied its chunk
    #: For chunks of several parts: the chunk's index in the path and the part's number, for each slot.
    #: Empty: slot ``i`` holds the only part of chunk ``i``.
    parts: Sequence[tuple[int, int]] = ()
    chunks: int = 0  #: number of leading chunks that loading the slots restores
    chain: int = 0  #: number of leading chunks that are held, even if no request can continue behind the last one
    exact: int = 0  #: number of leading slots that are as an engine computed them; the rest passed a lossy codec
    pending: int = 0  #: chunks after those, some still on their way into an arena: look again after a step
    awaited: str = ""  #: the tier that the first pending chunk comes from, or that was asked for it
    silence: float = 0.0  #: seconds for which that tier's store has owed an answer or delivered nothing
    declined: Declined | None = None  #: further chunks that are not worth loading
    unfitting: int = 0  #: further chunks that do not fit in the hottest arena beside these, even if no one else uses it
    miss_reason: str = ""  #: why the next chunk is not found; empty if the whole path is


@attrs.frozen
class Whereabouts:
    """Where one chunk is now."""

    tiers: tuple[str, ...]  #: the tiers it can be loaded from, hottest first
    miss_reason: str = ""  #: why no tier can supply it
