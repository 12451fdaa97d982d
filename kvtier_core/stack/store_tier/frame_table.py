"""The frames of a store tier, their bytes, and the calls that use them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence

from kvtier_core.errors import ContractError
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import ChunkKey

#: Seconds after which the full capacity is tried again.
_RETRY_AFTER = 60.0


class Use(enum.Enum):
    """The use that a call makes of a key."""

    WRITING = "is being written"
    READING = "is being read"
    DIRECT_READ = "is read by workers"  # any number of times: the frame stays in place
    DELETING = "is still being deleted"  # and stays in the index until the delete has completed
    QUARANTINING = "is being put in quarantine"  # in a shared store


class CapacityLimit:
    """The bytes that a tier may keep: its capacity, or less while its store reports that it is full.

    `full` lowers the limit; after a minute it is the capacity again. ``now`` is in seconds of any clock.
    """

    def __init__(self, capacity: int):
        self.rounds = 0  #: of evictions for a full store
        self._evicted = False  # since a write has succeeded
        self._capacity = capacity
        self._reset()

    def _reset(self) -> None:
        self._lowered = self._capacity
        self._until: float | None = None  # when the full capacity is tried again
        self._closed = False

    def at(self, now: float) -> int:
        """The bytes that the tier may keep now."""
        self._restore(now)
        return self._lowered

    def open(self, now: float) -> bool:
        """May anything be written? False while evictions would not free enough space, or did not."""
        self._restore(now)
        return not self._closed

    def lowered(self, now: float) -> bool:
        """Is the limit below the capacity now?"""
        return self.at(now) < self._capacity

    def full(self, held: int, missing: int, now: float, rounds: int) -> None:
        """The store is full, with ``held`` bytes of this tier; ``missing`` bytes must be deleted before a write.

        It said so to a write that began after ``rounds``. If the last one made no room, there is no other.
        """
        if rounds != self.rounds:
            return  # frames have been evicted since
        self._until = now + _RETRY_AFTER
        self._closed = self._evicted or missing >= held
        self._lowered = min(self._lowered, max(held if self._closed else held - missing, 0))
        if not self._closed:
            self.rounds, self._evicted = rounds + 1, True

    def took(self, rounds: int) -> None:
        """A write has succeeded that began after so many rounds."""
        if rounds == self.rounds:
            self._evicted = False

    def close(self, now: float) -> None:
        """Write nothing for a while, and keep the present frames."""
        self._until = now + _RETRY_AFTER
        self._closed = True

    def _restore(self, now: float) -> None:
        if self._until is not None and now >= self._until:
            self._reset()


class FrameTable:
    """The state of each key of a tier. Owner's thread only.

    *Resident* keys are in ``index``: their frames are in the store, on their way there, or being deleted; all of them
    count as used space. A key *in use* is named by exactly one call. An *invalidated* key is never found again, and is
    deleted when no call names it. *Incompatible* frames are in the store and not resident: another codec or format
    version wrote them. They count as used space, stay for engines that can read them, may be overwritten, and are
    deleted before any other frame when the tier needs room.
    """

    def __init__(self, index: CacheIndex, limit: CapacityLimit, kept_nbytes: int, clock: Callable[[], float]):
        """``kept_nbytes`` are reserved for what is stored beside the frames of chunks."""
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
        """A call names these keys until `end`. Raises ContractError if any is in use: backends rely on that."""
        for key in keys:
            if key in self.in_use:
                raise ContractError("two calls in flight would name the same key")
            self.in_use[key] = use

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """The call has returned."""
        for key in keys:
            del self.in_use[key]

    def readable(self, keys: Sequence[ChunkKey], start: int, beside: Use | None = None) -> int:
        """Length of the run of keys from ``start`` on that are resident and may be read now.

        Keys in use may not be read, unless their use is ``beside``.
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
        """These resident frames cannot be served here, as reads have found."""
        self.incompatible.update((key, self.index.resident.nbytes(key)) for key in keys)
        self.incompatible_nbytes += self.nbytes(keys)
        self.index.remove(keys)

    def replaced(self, key: ChunkKey) -> int:
        """The incompatible frame of this key, if any, was replaced. Returns its bytes."""
        nbytes = self.incompatible.pop(key, 0)
        self.incompatible_nbytes -= nbytes
        return nbytes

    def evictable(self, spared: Iterable[ChunkKey]) -> int:
        """Bytes of incompatible frames that can be freed, except those of ``spared`` keys."""
        if not self.incompatible:
            return 0
        stays = sum(self.incompatible.get(key, 0) for key in {*self.in_use, *spared})
        return self.incompatible_nbytes - stays

    def take_incompatible(self) -> list[ChunkKey]:
        """Make the incompatible frames resident that must be deleted for room, oldest first; returns their keys."""
        taken, missing = [], -self.room
        for key, nbytes in self.incompatible.items():
            if missing <= 0:
                break
            if key not in self.in_use:
                missing -= nbytes
                taken.append(key)
        for key in taken:
            self.index.admit([key], [None], self.replaced(key))
        return taken

    # -- bytes -------------------------------------------------------------------------------------

    @property
    def allowed(self) -> int:
        """The bytes that resident frames may take now."""
        return self.limit.at(self._clock()) - self._kept_nbytes - self.incompatible_nbytes

    @property
    def room(self) -> int:
        """The bytes that are free once all deletes have completed; negative if too much is resident."""
        return self.allowed - self.index.resident.used + self.leaving_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Upper bound of the bytes in the store now."""
        return self.index.resident.used - self.waiting_nbytes + self._kept_nbytes + self.incompatible_nbytes

    def fits(self, nbytes: int) -> bool:
        """May a write of this many bytes begin now without exceeding the capacity?"""
        return self.index.resident.used - self.waiting_nbytes + nbytes <= self.allowed

    def excess(self) -> list[ChunkKey]:
        """The frames to evict because resident frames take more than is allowed."""
        return self.index.select_victims(-self.room, self.index.resident.nbytes, spared=(self.in_use,))
