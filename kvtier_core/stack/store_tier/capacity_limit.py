"""How many bytes a tier may keep: what it was granted, or less while its store says that it is full."""

from __future__ import annotations

#: Seconds after which more is tried again than the store had room for.
_REST = 60.0


class CapacityLimit:
    """Time is handed in."""

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
        """May anything be written? Not while all that is kept is less than what the store lacks."""
        self._rise(now)
        return not self._shut

    def lowered(self, now: float) -> bool:
        return self.at(now) < self._granted

    def full(self, held: int, missing: int, now: float) -> None:
        """The store has no room beside the ``held`` bytes, and would have if ``missing`` bytes were deleted."""
        self._until = now + _REST
        self._shut = missing >= held
        self._lowered = min(self._lowered, max(held if self._shut else held - missing, 0))

    def _rise(self, now: float) -> None:
        if self._until is not None and now >= self._until:
            self.__init__(self._granted)
