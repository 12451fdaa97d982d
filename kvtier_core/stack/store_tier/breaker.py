"""A circuit breaker: a store that fails several times in a row is not called for a while, then tried once."""

from __future__ import annotations

#: Failures in a row that open the breaker.
_FAILURES = 3
#: Seconds for which it is open: the first time, and at most after doubling at each failed probe.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


class Breaker:
    """Closed: all calls are allowed. Open: none is. Half-open: one probe is, and its outcome closes or reopens it.

    Each call that begins succeeds, fails, or is given up.

    ``now`` is in seconds, of any clock.
    """

    def __init__(self) -> None:
        self.pause = _FIRST_PAUSE  #: seconds for which the breaker is open now, or will be next time
        self._failures = 0
        self._until: float | None = None
        self._probing = False

    @property
    def open(self) -> bool:
        """Is it open, or half-open?"""
        return self._until is not None

    def allows(self, now: float) -> bool:
        """May a call begin now?"""
        if self._until is None:
            return True
        return now >= self._until and not self._probing

    def begin(self, now: float) -> None:
        """A call begins."""
        self._probing = self._until is not None and now >= self._until

    def give_up(self) -> None:
        """A call that began has no outcome: if it was the probe, another call may be one."""
        self._probing = False

    def succeed(self) -> bool:
        """A call succeeded. True if this closes the breaker."""
        was_open = self.open
        self.__init__()
        return was_open

    def fail(self, now: float) -> bool:
        """A call failed. True if this opens the breaker."""
        self._failures += 1
        if self._until is not None:
            if not self._probing:
                return False  # the call began before the breaker opened
            self.pause = min(self.pause * 2, _LONGEST_PAUSE)
        elif self._failures < _FAILURES:
            return False
        self._until = now + self.pause
        self._probing = False
        return True
