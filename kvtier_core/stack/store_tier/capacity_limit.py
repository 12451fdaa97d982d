"""How many bytes a tier may keep: its capacity, or less while its store says that it is full."""

from __future__ import annotations

#: Seconds after which the full capacity is tried again.
_REST = 60.0


class CapacityLimit:
    """Lowered by `full`, restored by time. ``now`` is in seconds, of any clock."""

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
