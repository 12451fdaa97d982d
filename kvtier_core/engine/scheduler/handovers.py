"""Prompts that another engine goes on with: what it needs of them stays in the arena for a while."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import LoadLimit
from kvtier_core.types import ChunkKey

#: Seconds that a prompt is kept: as long as vLLM's NIXL connector keeps one of whose reader it hears nothing.
LEASE = 30.0

#: All of them keep at most one in this many bytes of the hottest arena.
_SHARE = 2


@attrs.define
class _Lease:
    path: Sequence[ChunkKey]
    limit: LoadLimit | None
    salt: bytes
    ends: float
    settled: bool = False  #: all that can be pinned is


class Handovers:
    """The leases on prompts that were handed over. Owner's thread; ``clock`` returns seconds.

    A lease ends in the first step after `LEASE` seconds: an engine that takes no step needs no memory.
    """

    def __init__(self, stack: Stack, layout: ChunkLayout, clock: Callable[[], float], *, lent: bool):
        """``lent``: the arena is a server's. Nothing is pinned: other engines need it while this one takes no step."""
        self._stack = stack
        self._lent = lent
        self._chunk_nbytes = sum(part.frame_nbytes for part in layout.parts)
        self._clock = clock
        self._leases: dict[str, _Lease] = {}  # by holder, the first to end first
        self._chunks: Counter[ChunkKey] = Counter()  # of their paths: prompts may begin alike
        self._numbers = itertools.count(1)

    @property
    def holders(self) -> set[str]:
        """Of what is pinned for them."""
        return set(self._leases)

    def begin(self, path: Sequence[ChunkKey], limit: LoadLimit | None, salt: bytes) -> int:
        """Keep the leading chunks of a path, those too that are still being stored. Returns how many.

        The oldest leases end if there are too many.
        """
        most = self._most_chunks()
        lease = _Lease(path[:most], limit, salt, self._clock() + LEASE)
        if not lease.path:
            return 0
        holder = f"handover {next(self._numbers)}"
        kept = self._find(holder, lease)
        if self._lent:
            self._stack.release(holder)
            return kept
        self._leases[holder] = lease
        self._chunks.update(lease.path)
        while len(self._chunks) > most:
            self._end(next(iter(self._leases)))
        return kept

    def step(self) -> None:
        """End the leases whose time is over, and pin what has been stored since the last step."""
        for holder, lease in list(self._leases.items()):
            if lease.ends <= self._clock():
                self._end(holder)
            elif not lease.settled and not self._stack.still_pending(holder):
                self._find(holder, lease)

    def release_all(self) -> None:
        """End every lease."""
        for holder in list(self._leases):
            self._end(holder)

    def _find(self, holder: str, lease: _Lease) -> int:
        through_the_arena = self._stack.media  # peers see nothing else
        found = self._stack.lookup(lease.path, holder, lease.limit, lease.salt, not_direct=through_the_arena)
        lease.settled = not found.pending
        return found.chunks + found.pending

    def _end(self, holder: str) -> None:
        path = self._leases.pop(holder).path
        self._chunks.subtract(path)
        for key in path:
            if not self._chunks[key]:
                del self._chunks[key]
        self._stack.release(holder)

    def _most_chunks(self) -> int:
        """How many chunks all leases together may keep; where shards are packed it could be some more."""
        usage = self._stack.usage()
        return usage[0].capacity // self._chunk_nbytes // _SHARE if usage else 0
