"""How fast a store delivers: running estimates from the calls that were made anyway."""

from __future__ import annotations

import math

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
