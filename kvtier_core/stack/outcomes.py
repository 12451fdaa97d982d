"""Outcomes of lookups and loads."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.types import Slot, StoredFrame

#: The largest time of a limit, in seconds: no number of chunks makes it infinite, which would end a lookup half done.
_LONGEST = 1e100


@attrs.frozen
class LoadLimit:
    """The limit on a request's wait for chunks below the arenas."""

    chunk_seconds: float  #: the engine's time to compute the first chunk
    wait: float  #: seconds that the request may still wait
    growth: float = 0.0  #: seconds by which each later chunk takes longer than the one before it

    def computing(self, chunks: int) -> float:
        """The seconds that the engine takes to compute ``chunks`` chunks."""
        return chunks * (self.chunk_seconds + (chunks - 1) / 2 * self.growth)


@attrs.frozen
class Terms:
    """The terms of a lookup, besides the path and its holder. Raises ContractError for numbers out of range."""

    #: Chunks below the arenas are requested if loading them is worth it within this limit; None: all of them.
    limit: LoadLimit | None = None
    salt: bytes = b""  #: that of the requests that name the path
    skipped: int = 0  #: chunks of the prompt before the path, which the engine has
    #: Tiers whose frames must pass through an arena, even if workers can read them directly.
    not_direct: Sequence[str] = attrs.field(default=(), converter=tuple[str, ...])
    without: Sequence[str] = attrs.field(default=(), converter=tuple[str, ...])  #: store tiers that are not asked
    lasting: bool = False  #: Will the holder keep its pins for longer than requests wait?

    def __attrs_post_init__(self) -> None:
        times = attrs.astuple(self.limit) if self.limit else ()
        if not all(abs(seconds) <= _LONGEST for seconds in times):
            raise ContractError(f"expected times of at most {_LONGEST:g} s, got {self.limit}")
        if self.skipped < 0:
            raise ContractError(f"expected 0 or more skipped chunks, got {self.skipped}")


#: No limit: every chunk below is worth loading.
ANY = Terms()


@attrs.frozen
class Arriving:
    """Chunks on their way into an arena, or that a store is being asked for: look again after a step."""

    chunks: int
    tier: str = ""  #: the tier that the first one comes from, or that was asked for it
    silence: float = 0.0  #: seconds for which that tier's store has owed an answer or delivered nothing


@attrs.frozen
class Missing:
    """A chunk that is not found."""

    why: str

    def __str__(self) -> str:
        return self.why


@attrs.frozen
class TooSmall:
    """Chunks that do not fit in the hottest arena beside those found."""

    arena: str
    chunks: int
    beside: str = ""  #: what else stays there; empty: nothing

    def __str__(self) -> str:
        if self.beside:
            return f"{self.arena} is too small for {self.chunks} more of this prompt's chunks beside {self.beside}"
        return f"{self.arena} is too small for {self.chunks} more of this prompt's chunks"


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
    """The held part of a path. Slots are pinned for the holder, and frames stay in place, until `Stack.release`."""

    #: The leading chunks that can be loaded now; a `StoredFrame` for each one that workers read from a store.
    slots: Sequence[Slot | StoredFrame] = ()
    sources: Sequence[str] = ()  #: for each slot, the tier that supplied its chunk
    #: For chunks of several parts: the chunk's index in the path and the part's number, for each slot.
    #: Empty: slot ``i`` holds the only part of chunk ``i``.
    parts: Sequence[tuple[int, int]] = ()
    chunks: int = 0  #: number of leading chunks that loading the slots restores
    chain: int = 0  #: number of leading chunks that are held, even if no request can continue after the last one
    exact: int = 0  #: number of leading slots as an engine computed them; the rest passed through a lossy codec
    arriving: Arriving | None = None  #: the following chunks that are worth waiting for
    rest: Declined | TooSmall | Missing | None = None  #: why the next chunk is not found; None: the path ends here

    @property
    def pending(self) -> int:
        """Number of chunks that are on their way."""
        return self.arriving.chunks if self.arriving else 0

    @property
    def miss_reason(self) -> str:
        """Why the next chunk is not found; empty if the whole path is."""
        return "" if self.rest is None else str(self.rest)


@attrs.frozen
class Whereabouts:
    """The place of one chunk now."""

    tiers: tuple[str, ...]  #: the tiers it can be loaded from, hottest first
    miss_reason: str = ""  #: why no tier can supply it
    held: tuple[str, ...] = ()  #: the tiers that have it, also those that cannot supply it at this moment
    arrives: bool = False  #: is it on its way into an arena?
