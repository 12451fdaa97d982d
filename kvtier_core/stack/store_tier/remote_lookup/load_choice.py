"""Whether the chunks that a store has are worth loading: they must be there sooner than the engine computes them."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvtier_core.stack.outcomes import Declined, LoadLimit
from kvtier_core.stack.store_tier.remote_lookup.speed import StoreSpeed

#: Seconds between two probes of a store that is declined.
_PROBE_EVERY = 1.0
#: Bytes of a probe: enough for all threads.
_PROBE_NBYTES = 16 << 20
#: A request waits for the answer whether a store has chunks if that takes at most this part of computing them.
_QUESTION_SHARE = 0.1


@attrs.frozen
class LoadChoice:
    """How many chunks of a run to load."""

    chunks: int  #: so many are loaded while the request waits
    declined: Declined | None = None  #: all of them, if none is


class LoadChooser:
    """Chooses for one store tier. ``clock`` returns seconds."""

    def __init__(self, tier: str, speed: StoreSpeed, clock: Callable[[], float]):
        self._tier = tier
        self._speed = speed
        self._clock = clock
        self._next_probe = float("-inf")

    def choose(self, chunks: int, nbytes: int, queued_nbytes: int, limit: LoadLimit | None) -> LoadChoice:
        """How many of ``chunks`` of ``nbytes`` each to load, behind ``queued_nbytes`` that are being loaded already.

        All, if ``limit`` is None or the store's speed is not known yet; none, if the request may not wait.
        """
        needed = self._speed.seconds(queued_nbytes + chunks * nbytes)
        if limit is None or (self._may_try(needed, chunks, limit) and limit.wait > 0):
            return LoadChoice(chunks)
        in_time = int(self._speed.within(limit.wait) - queued_nbytes) // nbytes if limit.wait > 0 else 0
        fitting = max(0, min(chunks, in_time))
        if fitting and self._speed.seconds(queued_nbytes + fitting * nbytes) <= fitting * limit.chunk_seconds:
            return LoadChoice(fitting)
        declined = Declined(self._tier, chunks, needed, chunks * limit.chunk_seconds)
        return LoadChoice(0, declined)

    @property
    def silence(self) -> float:
        """Seconds for which the store has owed an answer, or has delivered nothing of what it is to deliver."""
        return self._speed.silence(self._clock())

    def _may_try(self, answer: float | None, chunks: int, limit: LoadLimit) -> bool:
        """Has the store delivered nothing yet, and does it not take too long to answer?"""
        return self._speed.rate is None and (answer or 0.0) <= chunks * limit.chunk_seconds

    def worth_asking(self, chunks: int, limit: LoadLimit | None) -> bool:
        """Should a request wait until the store has answered whether it has these chunks?"""
        if limit is None:
            return True
        expected = max(self._speed.answer or 0.0, self.silence)
        return expected <= _QUESTION_SHARE * chunks * limit.chunk_seconds

    def probe(self, chunks: int, nbytes: int, queued_nbytes: int) -> int:
        """How many declined chunks to load all the same, while nobody waits, to see how fast the store is by now."""
        now = self._clock()
        if queued_nbytes or now < self._next_probe:
            return 0
        self._next_probe = now + _PROBE_EVERY
        return min(chunks, max(1, _PROBE_NBYTES // nbytes))
