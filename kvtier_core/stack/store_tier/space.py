"""The bytes of a store tier: what its frames may take, what they take, and what they will take soon."""

from __future__ import annotations

from collections.abc import Callable, Container

from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.incompatible import IncompatibleFrames
from kvtier_core.types import ChunkKey

#: Seconds after which the full capacity is tried again.
_RETRY_AFTER = 60.0


class CapacityLimit:
    """How many bytes a tier may keep: its capacity, or less while its store says that it is full.

    `full` lowers the limit; after a minute it is the capacity again. ``now`` is in seconds, of any clock.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._lowered = capacity
        self._until: float | None = None  # when the full capacity is tried again
        self._closed = False

    def at(self, now: float) -> int:
        """Bytes that the tier may keep now."""
        self._restore(now)
        return self._lowered

    def open(self, now: float) -> bool:
        """May anything be written? False while even evicting every frame would not free enough space."""
        self._restore(now)
        return not self._closed

    def lowered(self, now: float) -> bool:
        """Is the limit below the capacity now?"""
        return self.at(now) < self._capacity

    def full(self, held: int, missing: int, now: float) -> None:
        """The store is full, with ``held`` bytes of this tier; ``missing`` bytes must be deleted before a write."""
        self._until = now + _RETRY_AFTER
        self._closed = missing >= held
        self._lowered = min(self._lowered, max(held if self._closed else held - missing, 0))

    def close(self, now: float) -> None:
        """Write nothing for a while, and keep what there is."""
        self._until = now + _RETRY_AFTER
        self._closed = True

    def _restore(self, now: float) -> None:
        if self._until is not None and now >= self._until:
            self.__init__(self._capacity)


class Space:
    """Counts every frame in the index, also those whose write has not begun or whose delete has not completed."""

    def __init__(self, index: CacheIndex, limit: CapacityLimit, kept_nbytes: int, clock: Callable[[], float]):
        """``kept_nbytes`` are reserved for what is stored beside the frames: the state of the policy."""
        self.limit = limit
        self.incompatible = IncompatibleFrames()  #: in the store, and not in the index
        self.waiting_nbytes = 0  #: of frames in the index whose write waits for free space
        self.leaving_nbytes = 0  #: of frames in the index that are being deleted
        self._index = index
        self._kept_nbytes = kept_nbytes
        self._clock = clock

    @property
    def allowed(self) -> int:
        """Bytes that the frames in the index may take now."""
        return self.limit.at(self._clock()) - self._kept_nbytes - self.incompatible.nbytes

    @property
    def room(self) -> int:
        """Bytes that will be free when all deletes have completed; negative if the index holds too much."""
        return self.allowed - self._index.used + self.leaving_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Upper bound of the bytes in the store now."""
        return self._index.used - self.waiting_nbytes + self._kept_nbytes + self.incompatible.nbytes

    def fits(self, nbytes: int) -> bool:
        """May a write of this many bytes begin now without exceeding the capacity?"""
        return self._index.used - self.waiting_nbytes + nbytes <= self.allowed

    def excess(self, in_use: Container[ChunkKey]) -> list[ChunkKey]:
        """The frames to evict because the index holds more than is allowed."""
        return self._index.select_victims(-self.room, self._index.held.nbytes, spared=(in_use,))
