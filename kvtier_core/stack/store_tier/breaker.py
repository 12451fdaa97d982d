"""A circuit breaker: who fails again and again is left alone for a while, then tried once."""

from __future__ import annotations

_FAILURES = 3
_FIRST_REST = 1.0
_LONGEST_REST = 60.0


class Breaker:
    """Closed (calls go through), open (none does), half open (one does, and decides). Time is handed in."""

    def __init__(self) -> None:
        self.rest = _FIRST_REST  #: seconds of the current or next pause
        self._failures = 0
        self._until: float | None = None
        self._probing = False

    def allows(self, now: float) -> bool:
        if self._until is None:
            return True
        return now >= self._until and not self._probing

    def begin(self, now: float) -> None:
        """A call goes out."""
        self._probing = self._until is not None and now >= self._until

    def succeed(self) -> bool:
        """True if this ends a rest."""
        rested = self._until is not None
        self.__init__()
        return rested

    def fail(self, now: float) -> bool:
        """True if this begins a rest."""
        self._failures += 1
        if self._until is not None:
            if not self._probing:
                return False  # a straggler from before the rest
            self.rest = min(self.rest * 2, _LONGEST_REST)
        elif self._failures < _FAILURES:
            return False
        self._until = now + self.rest
        self._probing = False
        return True
