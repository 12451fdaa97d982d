"""How often what happened, folded from Events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier_core.types import Event, EventKind, Nbytes

#: Seconds between two looks at the counters while something happens. A server is seldom told that it ends.
_EVERY = 600.0


class Stats:
    """Of each tier, since the stack was opened at ``now``. Time is handed in."""

    def __init__(self, now: float = 0.0) -> None:
        self._chunks: dict[str, Counter[EventKind]] = {}
        self._nbytes: dict[str, Counter[EventKind]] = {}
        self._next = now + _EVERY

    def take_in(self, events: Iterable[Event]) -> None:
        for event in events:
            # Some events are of a whole tier: a rest, for instance.
            self._chunks.setdefault(event.tier, Counter())[event.kind] += len(event.keys) or 1
            self._nbytes.setdefault(event.tier, Counter())[event.kind] += event.nbytes

    def count(self, tier: str, kind: EventKind) -> int:
        """Chunks of a tier to which this happened; for what happens to a whole tier, how often it did."""
        return self._chunks.get(tier, Counter())[kind]

    def due(self, now: float) -> list[str]:
        """Every ten minutes what `describe` says, and nothing in between."""
        if now < self._next:
            return []
        self._next = now + _EVERY
        return self.describe()

    def describe(self) -> list[str]:
        """A line a tier, in plain words."""
        return [
            f"{tier}: {', '.join(self._phrase(tier, kind) for kind in EventKind if counts[kind])}"
            for tier, counts in self._chunks.items()
        ]

    def _phrase(self, tier: str, kind: EventKind) -> str:
        nbytes = self._nbytes[tier][kind]
        return f"{kind.value} {self._chunks[tier][kind]}" + (f" ({Nbytes(nbytes)})" if nbytes else "")
