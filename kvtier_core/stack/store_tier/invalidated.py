"""Keys whose frames nobody may find again, until they are deleted."""

from __future__ import annotations

from kvtier_core.types import ChunkKey

#: Seconds after which a delete that failed is tried again; each time twice as many, up to the last.
_FIRST_RETRY, _LAST_RETRY = 5.0, 60.0


class InvalidatedKeys(set[ChunkKey]):
    """A set that knows when to try again. Time is handed in."""

    def __init__(self) -> None:
        super().__init__()
        self._pause = _FIRST_RETRY
        self._next = 0.0

    def failed(self, now: float) -> None:
        """Some of them could not be deleted."""
        self._next = max(self._next, now + _FIRST_RETRY)

    def due(self, now: float) -> list[ChunkKey]:
        """Those to delete again now."""
        if now < self._next:
            return []
        if not self:
            self._pause = _FIRST_RETRY
            return []
        self._next, self._pause = now + self._pause, min(2 * self._pause, _LAST_RETRY)
        return sorted(self)
