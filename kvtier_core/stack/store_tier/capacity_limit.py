"""How many bytes a tier may keep: its capacity, or less while its store says that it is full."""

from __future__ import annotations

#: Seconds after which the full capacity is tried again.
_RETRY_AFTER = 60.0


class CapacityLimit:
    """`full` lowers the limit; after a minute it is the capacity again. ``now`` is in seconds, of any clock."""

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

    def _restore(self, now: float) -> None:
        if self._until is not None and now >= self._until:
            self.__init__(self._capacity)
