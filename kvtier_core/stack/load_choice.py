"""Decides whether stored chunks are worth loading: loading must be faster than computing."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from kvtier_core.stack.outcomes import Declined, LoadLimit

#: Seconds between two probes of a store that is declined.
_PROBE_EVERY = 1.0
#: Bytes of a probe: enough for all threads.
_PROBE_NBYTES = 16 << 20
#: A request waits to learn whether a store has chunks if the answer takes at most this share of their computing time.
_QUESTION_SHARE = 0.1
#: After this many bytes, new measurements make up two thirds of the estimate, and older ones one third.
_MEMORY_NBYTES = 16 << 20
#: A long run of reads is measured in pieces of at least this many bytes: reads of several threads end together.
_PIECE_NBYTES = 64 << 20
#: The weight of a new answer's time in the estimate.
_NEWEST = 0.3


class StoreSpeed:
    """Estimates the read rate of a store, all threads together, and the time that it takes to answer a query.

    A failed call counts with its time: for that long there was no answer. A successful read shows how fast the store
    answers again.

    All times are seconds of one clock. Calls that take no time, as in a simulation, are not counted.
    """

    def __init__(self) -> None:
        self.rate: float | None = None  #: bytes per second; None before the first read has ended
        self.answer: float | None = None  #: seconds that a query for keys takes; None before the first answer
        self._queries: list[float] = []  # start times of those without an answer
        self._under_way = 0
        self._begun = 0.0
        self._delivered = 0.0  # when the store last delivered, or began to
        self._nbytes = 0

    def silence(self, now: float) -> float:
        """Seconds for which the store has owed an answer, or delivered nothing of the reads under way."""
        return now - min([*self._queries, *([self._delivered] if self._under_way else [])], default=now)

    def begin(self, reads: int, now: float) -> None:
        """This many reads begin."""
        if not self._under_way:
            self._begun, self._delivered, self._nbytes = now, now, 0
        self._under_way += reads

    def end(self, nbytes: int, ended: float) -> None:
        """A read ended at this time with ``nbytes``; 0 if it failed."""
        self._under_way -= 1
        self._nbytes += nbytes
        ended = max(ended, self._begun)
        if nbytes:
            self._delivered = ended
        else:
            self._no_answer(ended - self._delivered)
        if not self._under_way or self._nbytes >= _PIECE_NBYTES:
            self._measured(self._nbytes, ended - self._begun)
            self._begun, self._nbytes = ended, 0

    def asked(self, now: float) -> None:
        """A query for keys begins."""
        self._queries.append(now)

    def answered(self, asked: float, ended: float, *, ok: bool = True) -> None:
        """The query that began at ``asked`` has ended. ``ok`` is False if its call failed."""
        self._queries.remove(asked)
        if not ok:
            self._no_answer(ended - asked)
        elif ended > asked:
            mean = ended - asked if self.answer is None else self.answer
            self.answer = mean + _NEWEST * (ended - asked - mean)

    def seconds(self, nbytes: int) -> float | None:
        """The time to read this many bytes, including reads under way; None if unknown.

        Before the first read it is only the time of an answer.
        """
        return self.answer if self.rate is None else (self.answer or 0.0) + nbytes / self.rate

    def within(self, seconds: float) -> float:
        """The bytes that can be read in this time; 0 if the rate is unknown."""
        return max(0.0, seconds - (self.answer or 0.0)) * (self.rate or 0.0)

    def _no_answer(self, seconds: float) -> None:
        self.answer = max(seconds, self.answer or 0.0) or None

    def _measured(self, nbytes: int, seconds: float) -> None:
        """The estimate is a geometric mean: it follows a store that becomes slow as quickly as one that recovers."""
        if not nbytes or seconds <= 0:
            return
        rate = nbytes / seconds
        if self.rate is not None:
            newest = 1 - math.exp(-nbytes / _MEMORY_NBYTES)
            rate = self.rate ** (1 - newest) * rate**newest
        self.rate = rate
        if self.answer is not None:
            self.answer = min(self.answer, seconds)


@attrs.frozen
class LoadChoice:
    """The number of chunks of a run to load."""

    chunks: int  #: the number to load while the request waits
    declined: Declined | None = None  #: set if that is 0


class LoadChooser:
    """Chooses for one store tier. ``clock`` returns seconds."""

    def __init__(self, tier: str, speed: StoreSpeed, clock: Callable[[], float]):
        self._tier = tier
        self._speed = speed
        self._clock = clock
        self._next_probe = float("-inf")

    def choose(self, chunks: int, nbytes: int, queued_nbytes: int, limit: LoadLimit | None) -> LoadChoice:
        """How many of ``chunks`` of ``nbytes`` each to load, behind ``queued_nbytes`` of earlier loads.

        All if ``limit`` is None or the store's speed is unknown; none if the request may not wait.
        """
        needed = self._speed.seconds(queued_nbytes + chunks * nbytes)
        if limit is None:
            return LoadChoice(chunks)
        may_try = self._speed.rate is None and (needed or 0.0) <= limit.computing(chunks)
        if may_try and limit.wait > 0:
            return LoadChoice(chunks)
        in_time = self._speed.within(limit.wait) - queued_nbytes if limit.wait > 0 else 0
        fitting = int(max(0, min(chunks * nbytes, in_time))) // nbytes
        takes = self._speed.seconds(queued_nbytes + fitting * nbytes)
        if fitting and takes is not None and takes <= limit.computing(fitting):
            return LoadChoice(fitting)
        return LoadChoice(0, Declined(self._tier, chunks, needed, limit.computing(chunks)))

    @property
    def silence(self) -> float:
        """Seconds for which the store has owed an answer, or delivered nothing of the reads under way."""
        return self._speed.silence(self._clock())

    def worth_asking(self, chunks: int, limit: LoadLimit | None) -> bool:
        """Should a request wait for the store's answer whether it has these chunks?"""
        if limit is None:
            return True
        expected = max(self._speed.answer or 0.0, self.silence)
        return expected <= _QUESTION_SHARE * limit.computing(chunks)

    def probe(self, chunks: int, nbytes: int, queued_nbytes: int) -> int:
        """How many declined chunks to load anyway, with no request waiting, to measure the store again."""
        now = self._clock()
        if queued_nbytes or now < self._next_probe:
            return 0
        self._next_probe = now + _PROBE_EVERY
        return min(chunks, max(1, _PROBE_NBYTES // nbytes))
