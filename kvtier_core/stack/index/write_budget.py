"""Bounds the bytes that a store tier writes: a drive wears, and a bucket charges for each request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from kvtier_core.types import WriteUse

_DAY = 86400.0


class WriteBudget:
    """Bytes that may be written: they accumulate at a constant rate, up to a burst.

    A chunk that n requests have named may use all but one 2^n-th of what can accumulate: so when bytes are short, they
    are left for the chunks that return most often. A process starts with none, so that no sequence of restarts writes
    more than the rate allows; until the first burst, what can accumulate is what the time since then has brought.
    """

    def __init__(self, per_day: int, burst: int, endurance: int | None, clock: Callable[[], float]):
        """``per_day`` and ``burst`` are bytes; ``clock`` returns seconds. ``endurance``: see `WriteUse`."""
        self._per_day = per_day
        self._burst = burst
        self._endurance = endurance
        self._clock = clock
        self._start = self._at = clock()
        self._left = 0.0  # at that time
        self._written = 0  # since the start

    @property
    def left(self) -> int:
        """Bytes that may be written now; negative if more were."""
        return math.floor(min(self._left + self._since(self._at), self._burst))

    def use(self) -> WriteUse:
        """The state of the budget."""
        seconds = int(self._clock() - self._start)
        return WriteUse(self.left, self._per_day, self._endurance, self._written, seconds)

    def affords(self, named: Iterable[int], nbytes: int) -> int:
        """The number of leading chunks of a path, of ``nbytes`` each, that may be written now.

        ``named`` has for each the number of requests that have named it, as far as it is remembered.
        """
        left, most = self.left, min(self._since(self._start), self._burst)
        chunks = 0
        for requests in named:
            left -= nbytes
            if left < math.ldexp(most, -max(requests, 1)):
                break
            chunks += 1
        return chunks

    def spend(self, nbytes: int) -> None:
        """These bytes are being written; negative: fewer were written than had been spent."""
        self._left, self._at = self.left - nbytes, self._clock()
        self._written += nbytes

    def _since(self, at: float) -> float:
        """Bytes that accumulate from then on, without a limit."""
        return (self._clock() - at) * self._per_day / _DAY
