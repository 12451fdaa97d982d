"""Counts of what happened, by tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvtier_core.types import Event, EventKind, Nbytes

#: Seconds between two log lines of the counters: servers are often killed without notice.
_EVERY = 600.0

_OF_TOKENS = {EventKind.QUERIED, EventKind.HIT, EventKind.MISSED, EventKind.BYPASSED}


class Stats:
    """Counters of chunks, bytes and events. ``now`` is in seconds, of any clock."""

    def __init__(self, now: float = 0.0) -> None:
        self._chunks: dict[str, Counter[EventKind]] = {}
        self._nbytes: dict[str, Counter[EventKind]] = {}
        self._tokens: dict[str, Counter[EventKind]] = {}
        self._next = now + _EVERY

    def count_events(self, events: Iterable[Event]) -> None:
        """Add these events to the counts."""
        for event in events:
            # Some events concern a whole tier: an open breaker, for instance.
            self._chunks.setdefault(event.tier, Counter())[event.kind] += len(event.keys) or 1
            self._nbytes.setdefault(event.tier, Counter())[event.kind] += event.nbytes

    def count_tokens(self, events: Iterable[Event]) -> None:
        """Add what became of the tokens of requests."""
        for event in events:
            if event.kind in _OF_TOKENS:
                self._tokens.setdefault(event.tier, Counter())[event.kind] += event.tokens

    def of(self, tier: str, kind: EventKind) -> int:
        """Number of chunks of a tier to which this happened; of events, for those that concern a whole tier."""
        return self._chunks.get(tier, Counter())[kind]

    def totals(self, tier: str) -> dict[str, dict[str, int]]:
        """For each kind of event of a tier by its name: how many chunks, and how many bytes."""
        chunks, nbytes = self._chunks.get(tier, Counter()), self._nbytes.get(tier, Counter())
        return {kind.value: {"chunks": count, "nbytes": nbytes[kind]} for kind, count in chunks.items()}

    def tokens(self, tier: str) -> dict[str, int]:
        """What became of the tokens that a tier was asked for, by the name of the event."""
        return {kind.value: count for kind, count in self._tokens.get(tier, {}).items()}

    def due(self, now: float) -> list[str]:
        """The lines of `describe`, once every ten minutes; nothing in between."""
        if now < self._next:
            return []
        self._next = now + _EVERY
        return self.describe()

    def describe(self) -> list[str]:
        """A line a tier."""
        return [f"{tier}: {', '.join(self._phrases(tier))}" for tier in self._chunks | self._tokens]

    def _phrases(self, tier: str) -> Iterator[str]:
        counts, tokens = self._chunks.get(tier, Counter()), self._tokens.get(tier, Counter())
        yield from (self._phrase(tier, kind) for kind in EventKind if counts[kind])
        if tokens:
            yield f"hit {tokens[EventKind.HIT]} of {tokens[EventKind.QUERIED]} tokens"

    def _phrase(self, tier: str, kind: EventKind) -> str:
        nbytes = self._nbytes[tier][kind]
        return f"{kind.value} {self._chunks[tier][kind]}" + (f" ({Nbytes(nbytes)})" if nbytes else "")
