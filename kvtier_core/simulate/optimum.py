"""The most that any tier of a size could have given, by one who knows the future."""

from __future__ import annotations

import heapq
from array import array

from kvtier_core.simulate.traces import Trace
from kvtier_core.types import ChunkKey


class Optimum:
    """Belady's rule on prefixes, which is exact for them: of all that is at hand after a request, keep what is
    asked for again soonest, and of a path that comes back as a whole its beginning.

    A parent comes back no later than its child, so what is kept is closed under parents, and each chunk that is
    held when it is asked for is a hit. As policies may, it refuses newcomers. In tokens it is a bound: a chunk that
    a prompt fills only in part counts as much as any other.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self._never = len(trace.prompts)
        self._next = self._look_ahead()  # for each chunk of each prompt, the prompt that asks for it next

    def hits(self, capacity: int) -> list[int]:
        """Of each prompt, the chunks that a tier for ``capacity`` of them would have had."""
        hits = []
        held: set[ChunkKey] = set()
        latest: list[tuple[int, int, ChunkKey]] = []  # a heap; what is out of date lies below all others
        for prompt, nexts in zip(self._trace.prompts, self._next, strict=True):
            hits.append(next((i for i, key in enumerate(prompt.path) if key not in held), len(prompt.path)))
            for depth, (key, when) in enumerate(zip(prompt.path, nexts, strict=True)):
                held.add(key)
                heapq.heappush(latest, (-when, -depth, key))
            while len(held) > capacity:
                held.remove(heapq.heappop(latest)[2])
        return hits

    def _look_ahead(self) -> list[array]:
        seen: dict[ChunkKey, int] = {}
        nexts = []
        for number in reversed(range(len(self._trace.prompts))):
            path = self._trace.prompts[number].path
            nexts.append(array("l", [seen.get(key, self._never) for key in path]))
            seen.update(dict.fromkeys(path, number))
        return nexts[::-1]
