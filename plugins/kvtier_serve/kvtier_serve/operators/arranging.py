"""Finds the order of documents with the longest cached prefix.

A prefix is cached up to its first missing chunk, and a chunk may span documents. The search extends the order with the
longest cached prefix by each remaining document, and goes no further where a chunk is missing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from kvtier_core.builtin.chained import Chained
from kvtier_core.types import ChunkKey
from kvtier_serve.operators.forms import Arranged, Documents, Order

#: Steps of a search, in addition to the chunks of the prompt. A step looks up a chunk, or adds a document to an order.
_MOST = 10_000
#: Steps between two yields, and tokens hashed in them.
_PIECE, _TOKENS = 64, 1 << 14


class _Candidate(NamedTuple):
    """An order of some documents."""

    documents: tuple[int, ...]
    cached: int  #: leading chunks
    key: ChunkKey | None  #: of the last of them
    rest: Sequence[int]  #: the tokens after it, less than a chunk
    ended: bool  #: is the next chunk missing?


class Search:
    """A search for one prompt."""

    def __init__(
        self, asked: Documents, keys: Chained, chunk_tokens: int, salt: bytes, is_cached: Callable[[ChunkKey], bool]
    ):
        self._asked = asked
        self._keys = keys
        self._chunk_tokens = chunk_tokens
        self._salt = salt
        self._is_cached = is_cached
        self._piece = max(1, min(_PIECE, _TOKENS // chunk_tokens))
        self._steps = 0

    def arranged(self) -> Generator[None, None, Arranged]:
        """Run the search. It yields after each small piece of work."""
        numbers = range(len(self._asked.documents))
        start = yield from self._extended(_Candidate((), 0, None, (), False), self._asked.before)
        requested = start
        for number in numbers:
            requested = yield from self._with(requested, number)
        best = {0: requested}  # by the first document
        tokens = sum(map(len, (self._asked.before, *self._asked.documents, self._asked.after)))
        most = self._steps + _MOST + tokens // self._chunk_tokens
        unfinished = [(_rank(start), start)]
        while unfinished and self._steps < most:
            _, shorter = heapq.heappop(unfinished)
            for number in (each for each in numbers if each not in shorter.documents):
                longer = yield from self._with(shorter, number)
                if not longer.ended and len(longer.documents) < len(numbers):
                    heapq.heappush(unfinished, (_rank(longer), longer))
                others = (each for each in numbers if each not in longer.documents)
                whole = longer._replace(documents=(*longer.documents, *others))
                first = whole.documents[0]
                best[first] = min(best.get(first, whole), whole, key=_rank)
        found = [self._order(each) for each in sorted(best.values(), key=_rank)]
        return Arranged(found[0], self._order(requested), found, exhaustive=not unfinished)

    def _with(self, candidate: _Candidate, number: int) -> Generator[None, None, _Candidate]:
        """A candidate with one more document; with the last one, also with the tokens after the documents."""
        yield from self._step()
        documents = (*candidate.documents, number)
        longer = yield from self._extended(candidate, self._asked.documents[number])
        if len(documents) == len(self._asked.documents):
            longer = yield from self._extended(longer, self._asked.after)
        return longer._replace(documents=documents)

    def _extended(self, candidate: _Candidate, tokens: Sequence[int]) -> Generator[None, None, _Candidate]:
        """A candidate with more tokens."""
        documents, cached, key, rest, ended = candidate
        if ended:
            return candidate
        end = self._chunk_tokens - len(rest)
        chunk: Sequence[int] = [*rest, *tokens[:end]]
        while len(chunk) == self._chunk_tokens:
            yield from self._step()
            (following,) = self._keys.continued(key, chunk, salt=self._salt)
            if not self._is_cached(following):
                return _Candidate(documents, cached, key, (), True)
            cached, key = cached + 1, following
            begin, end = end, end + self._chunk_tokens
            chunk = tokens[begin:end]
        return _Candidate(documents, cached, key, chunk, False)

    def _step(self) -> Generator[None, None, None]:
        self._steps += 1
        if self._steps % self._piece == 0:
            yield

    def _order(self, candidate: _Candidate) -> Order:
        return Order(list(candidate.documents), candidate.cached * self._chunk_tokens)


def _rank(candidate: _Candidate) -> tuple[int, tuple[int, ...]]:
    """The smaller, the better: first the longer cached prefix, then the order closer to the request."""
    return -candidate.cached, candidate.documents
