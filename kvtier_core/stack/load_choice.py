"""Whether the chunks that a store has are worth loading: they must be there sooner than the engine computes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from kvtier_core.stack.outcomes import Declined, LoadLimit

#: Seconds between two probes of a store that is declined.
_PROBE_EVERY = 1.0
#: Bytes of a probe: enough for all threads.
_PROBE_NBYTES = 16 << 20
#: A request waits for the answer whether a store has chunks if that takes at most this part of computing them.
_QUESTION_SHARE = 0.1
#: Bytes after which what is measured counts for two thirds of the estimate, and what was before for one third.
_MEMORY_NBYTES = 16 << 20
#: A long run of reads is measured in pieces of at least this many bytes: those of several threads end together.
_PIECE_NBYTES = 64 << 20
#: The part of an answer's time that a new one contributes to the estimate.
_NEWEST = 0.3


class StoreSpeed:
    """Bytes a second while reads are under way, all threads together, and seconds until the store answers a question.

    A call that fails counts with its time: for so long there was no answer. Whatever a store delivers shows how soon it
    answers again.

    All times are in seconds, of any one clock. What takes no time, as in a simulation, is not counted.
    """

    def __init__(self) -> None:
        self.rate: float | None = None  #: bytes a second; None before the first read has ended
        self.answer: float | None = None  #: seconds that a question for keys takes; None before the first answer
        self._questions: list[float] = []  # when each was put that is not answered
        self._under_way = 0
        self._begun = 0.0
        self._ended = 0.0
        self._delivered = 0.0  # when the store last delivered, or began to
        self._nbytes = 0

    def silence(self, now: float) -> float:
        """For how long the store has owed its oldest answer, or has delivered nothing of what it is to deliver."""
        return now - min([*self._questions, *([self._delivered] if self._under_way else [])], default=now)

    def begin(self, reads: int, now: float) -> None:
        """So many reads begin."""
        if not self._under_way:
            self._begun, self._delivered, self._nbytes = now, now, 0
        self._under_way += reads

    def end(self, nbytes: int, ended: float) -> None:
        """A read has ended at this time, and brought ``nbytes``; 0 if it failed."""
        self._under_way -= 1
        self._nbytes += nbytes
        self._ended = max(ended, self._begun)
        if nbytes:
            self._delivered = self._ended
        else:
            self._no_answer(self._ended - self._delivered)
        if not self._under_way or self._nbytes >= _PIECE_NBYTES:
            self._measured(self._nbytes, self._ended - self._begun)
            self._begun, self._nbytes = self._ended, 0

    def asked(self, now: float) -> None:
        """A question for keys is put."""
        self._questions.append(now)

    def answered(self, asked: float, ended: float, *, ok: bool = True) -> None:
        """The question that was put then has been answered; not ``ok``: its call has failed."""
        self._questions.remove(asked)
        if not ok:
            self._no_answer(ended - asked)
        elif ended > asked:
            mean = ended - asked if self.answer is None else self.answer
            self.answer = mean + _NEWEST * (ended - asked - mean)

    def seconds(self, nbytes: int) -> float | None:
        """The time in which so many bytes would come, all that is under way included; None if that is not known.

        Before the first read that is no more than the time until there is an answer.
        """
        return self.answer if self.rate is None else (self.answer or 0.0) + nbytes / self.rate

    def within(self, seconds: float) -> float:
        """The bytes that would come in this time; none if the rate is not known."""
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
