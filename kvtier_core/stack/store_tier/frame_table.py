"""The frames of a store tier: which are there, how many bytes they take, and what calls do with them now."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtier_core.errors import ContractError
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import ChunkKey

#: Seconds after which the full capacity is tried again.
_RETRY_AFTER = 60.0


class Use(enum.Enum):
    """The use that a call makes of a key."""

    WRITING = "is being written"
    READING = "is being read"
    DIRECT_READ = "is read by workers"  # as often as they like: it stays where it is
    DELETING = "is still being deleted"  # and stays in the index until the delete has completed
    QUARANTINING = "is being put in quarantine"  # in a shared store


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


class FrameTable:
    """The state of each key of a tier. Owner's thread only.

    *Resident* keys are in ``index``: their frames are in the store, on their way there, or being deleted; all of them
    count as used space. A key *in use* is named by a call, and by no other. An *invalidated* one is never found again,
    and deleted when no call names it. *Incompatible* frames are in the store and not resident: another codec or format
    version wrote them. They count as used space, stay for an engine that can read them, may be overwritten, and are
    deleted before any other frame when the tier needs room.
    """

    def __init__(self, index: CacheIndex, limit: CapacityLimit, kept_nbytes: int, clock: Callable[[], float]):
        """``kept_nbytes`` are reserved for what is stored beside the frames: the state of the policy."""
        self.index = index
        self.limit = limit
        self.in_use: dict[ChunkKey, Use] = {}
        self.invalidated: set[ChunkKey] = set()
        self.incompatible: dict[ChunkKey, int] = {}  #: bytes of each
        self.incompatible_nbytes = 0  #: of all of them
        self.waiting_nbytes = 0  #: of resident frames whose write waits for free space
        self.leaving_nbytes = 0  #: of resident frames that are being deleted
        self._kept_nbytes = kept_nbytes
        self._clock = clock

    # -- keys --------------------------------------------------------------------------------------

    def begin(self, keys: Iterable[ChunkKey], use: Use) -> None:
        """A call names these keys until `end`. Raises ContractError if one is in use: a backend is promised that."""
        for key in keys:
            if key in self.in_use:
                raise ContractError("two calls in flight would name the same key")
            self.in_use[key] = use

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """The call has returned."""
        for key in keys:
            del self.in_use[key]

    def readable(self, keys: Sequence[ChunkKey], start: int, beside: Use | None = None) -> int:
        """How many keys from ``start`` on are resident and may be read now, before the first that may not.

        Keys in use may not, but for those of which the use is the one to be read ``beside``.
        """
        run = self.index.resident.run(keys, start)
        if not self.in_use and not self.invalidated:
            return run
        unreadable = (
            i
            for i, key in enumerate(keys[start : start + run])
            if self.in_use.get(key) not in (None, beside) or key in self.invalidated
        )
        return next(unreadable, run)

    def nbytes(self, keys: Iterable[ChunkKey]) -> int:
        """Bytes of resident frames."""
        return sum(map(self.index.resident.nbytes, keys))

    # -- incompatible frames -----------------------------------------------------------------------

    def make_incompatible(self, keys: Sequence[ChunkKey]) -> None:
        """Reads found that these resident frames cannot be served here."""
        self.incompatible.update((key, self.index.resident.nbytes(key)) for key in keys)
        self.incompatible_nbytes += self.nbytes(keys)
        self.index.remove(keys)

    def replaced(self, key: ChunkKey) -> int:
        """The incompatible frame of this key, if there was one, is gone. Returns its bytes."""
        nbytes = self.incompatible.pop(key, 0)
        self.incompatible_nbytes -= nbytes
        return nbytes

    def evictable(self, spared: Iterable[ChunkKey]) -> int:
        """Bytes of incompatible frames that can be freed, without those of ``spared``."""
        if not self.incompatible:
            return 0
        stays = sum(self.incompatible.get(key, 0) for key in {*self.in_use, *spared})
        return self.incompatible_nbytes - stays

    def take_incompatible(self) -> list[ChunkKey]:
        """Make incompatible frames resident that must be deleted for room, those found first; returns them."""
        taken = list(self._incompatible_beyond_room())
        for key in taken:
            self.index.admit([key], [None], self.replaced(key))
        return taken

    def _incompatible_beyond_room(self) -> Iterator[ChunkKey]:
        missing = -self.room
        for key, nbytes in self.incompatible.items():
            if missing <= 0:
                return
            if key not in self.in_use:
                missing -= nbytes
                yield key

    # -- bytes -------------------------------------------------------------------------------------

    @property
    def allowed(self) -> int:
        """Bytes that resident frames may take now."""
        return self.limit.at(self._clock()) - self._kept_nbytes - self.incompatible_nbytes

    @property
    def room(self) -> int:
        """Bytes that will be free when all deletes have completed; negative if too much is resident."""
        return self.allowed - self.index.resident.used + self.leaving_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Upper bound of the bytes in the store now."""
        return self.index.resident.used - self.waiting_nbytes + self._kept_nbytes + self.incompatible_nbytes

    def fits(self, nbytes: int) -> bool:
        """May a write of this many bytes begin now without exceeding the capacity?"""
        return self.index.resident.used - self.waiting_nbytes + nbytes <= self.allowed

    def excess(self) -> list[ChunkKey]:
        """The frames to evict because more is resident than is allowed."""
        return self.index.select_victims(-self.room, self.index.resident.nbytes, spared=(self.in_use,))
