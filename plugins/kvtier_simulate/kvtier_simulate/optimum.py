"""The offline optimum: the most hits that a cache of a given size could have if it knew the future."""

from __future__ import annotations

import heapq
from array import array

from kvtier_core.types import ChunkKey
from kvtier_simulate.traces import Trace


class Optimum:
    """Belady's rule (IBM Systems Journal 5(2), 1966) on prefixes: after each request keep what is needed again soonest
    and, of a path that returns as a whole, its beginning.

    A parent returns no later than its child. So a kept chunk's parents are kept too, each chunk that is held when it is
    requested is a hit, and the result is exact. Like policies, it may refuse newcomers. In tokens it is an upper bound:
    a chunk that a prompt fills only in part counts as much as any other.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self._never = len(trace.prompts)
        self._next = self._look_ahead()  # for each chunk of each prompt, the number of the next prompt with it

    def hits(self, capacity: int) -> list[int]:
        """For each prompt, the number of its leading chunks that a cache of ``capacity`` chunks would have had."""
        hits = []
        held: set[ChunkKey] = set()
        latest: list[tuple[int, int, ChunkKey]] = []  # a heap; stale entries lie below all current ones
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
