"""The bytes of a store tier: what its frames may take, what they take, and what they will take soon."""

from __future__ import annotations

from collections.abc import Callable, Container

from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.incompatible import IncompatibleFrames
from kvtier_core.types import ChunkKey

#: Seconds after which the full capacity is tried again.
_REST = 60.0


class CapacityLimit:
    """How many bytes a tier may keep: its capacity, or less while its store says that it is full.

    ``now`` is in seconds, of any clock.
    """

    def __init__(self, granted: int):
        self._granted = granted
        self._lowered = granted
        self._until: float | None = None  # when it rises again
        self._shut = False

    def at(self, now: float) -> int:
        """Bytes that may be kept now."""
        self._rise(now)
        return self._lowered

    def open(self, now: float) -> bool:
        """May anything be written? Not while evicting everything would not give the store the room it lacks."""
        self._rise(now)
        return not self._shut

    def lowered(self, now: float) -> bool:
        """Is less allowed now than was granted?"""
        return self.at(now) < self._granted

    def full(self, held: int, missing: int, now: float) -> None:
        """The store has no room beside the ``held`` bytes, and would have if ``missing`` bytes were deleted."""
        self._until = now + _REST
        self._shut = missing >= held
        self._lowered = min(self._lowered, max(held if self._shut else held - missing, 0))

    def _rise(self, now: float) -> None:
        if self._until is not None and now >= self._until:
            self.__init__(self._granted)


class Space:
    """All frames in the index count, those whose write has not begun and those whose delete has not landed too."""

    def __init__(self, index: CacheIndex, limit: CapacityLimit, kept_nbytes: int, clock: Callable[[], float]):
        """``kept_nbytes`` are set aside for what is stored beside the frames."""
        self.limit = limit
        self.incompatible = IncompatibleFrames()  #: in the store, and not in the index
        self.waiting_nbytes = 0  #: of frames in the index whose write waits for room
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
        """Bytes that will be free once everything that is leaving has gone; negative if too much is held."""
        return self.allowed - self._index.used + self.leaving_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes in the store now, at most."""
        return self._index.used - self.waiting_nbytes + self._kept_nbytes + self.incompatible.nbytes

    def fits(self, nbytes: int) -> bool:
        """May a write of this many bytes begin now, beside all that is in the store?"""
        return self._index.used - self.waiting_nbytes + nbytes <= self.allowed

    def excess(self, in_use: Container[ChunkKey]) -> list[ChunkKey]:
        """The frames to evict because less is allowed than is held."""
        return self._index.select_victims(-self.room, self._index.held.nbytes, spared=(in_use,))
