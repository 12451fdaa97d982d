"""Prompts that another engine continues: the chunks that it needs stay in the arena for a while."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import LoadLimit, Terms
from kvtier_core.telemetry.log_limit import LogLimit
from kvtier_core.telemetry.readings import BYPASSED, NO_ROOM, TOO_LONG
from kvtier_core.types import ChunkKey, Event, EventKind

#: Seconds that a prompt is kept: as long as vLLM's NIXL connector keeps one whose reader does not respond.
LEASE = 30.0
#: Seconds that it is kept after another engine has copied its last chunk: that engine reads several chunks at a time.
COPIED = 2.0

#: All prompts together keep at most one in this many bytes of the hottest arena.
_SHARE = 2


@attrs.define
class _Lease:
    path: Sequence[ChunkKey]
    limit: LoadLimit | None
    salt: bytes
    ends: float  #: infinite while the prompt is being computed
    settled: bool = False  #: everything that can be pinned is pinned


class Handovers:
    """The leases on prompts that another engine continues. Owner's thread; ``clock`` returns seconds.

    A lease begins with the first store of its prompt, so that no chunk of it is evicted before the prompt is handed
    over, and ends in the first step after `LEASE` seconds, or `COPIED` seconds after a peer has copied its last chunk.
    An engine that takes no step needs no memory.
    """

    def __init__(
        self,
        stack: Stack,
        layout: ChunkLayout,
        clock: Callable[[], float],
        tell: Callable[[Sequence[Event]], None],
        *,
        lent: bool,
    ):
        """``tell`` counts events. ``lent``: the arena is a server's. A prompt that was handed over is not pinned there:
        other engines need the memory while this one takes no step.
        """
        self._stack = stack
        self._lent = lent
        self._chunk_nbytes = sum(part.frame_nbytes for part in layout.parts)
        self._chunk_tokens = layout.tokens
        self._clock = clock
        self._tell = tell
        self._log = LogLimit(clock)
        self._leases: dict[str, _Lease] = {}  # by holder
        self._chunks: Counter[ChunkKey] = Counter()  # of their paths: prompts may begin alike

    @property
    def holders(self) -> set[str]:
        """The holders of all pins for prompts."""
        return set(self._leases)

    def promise(self, state: RequestState, path: Sequence[ChunkKey], limit: LoadLimit | None) -> tuple[str, int]:
        """The prompt has been computed up to the end of this path. Its chunks that are here are pinned.

        Returns the holder to which its chunks are promised, and the number of promised leading chunks.
        """
        holder = _holder(state)
        known = holder in self._leases
        lease = self._lease(holder, path, limit, state.identity.salt, math.inf)
        if not known:
            self._find(holder, lease)
        return holder, len(lease.path)

    def hand_over(self, state: RequestState, path: Sequence[ChunkKey], limit: LoadLimit | None) -> int:
        """The prompt has been computed: keep its leading chunks, including those that are still being stored.

        Returns the number of its tokens that are kept.
        """
        if not path:
            return 0
        holder = _holder(state)
        lease = self._lease(holder, path, limit, state.identity.salt, self._clock() + LEASE)
        kept = self._find(holder, lease)
        if self._lent:
            self._end(holder)
        reason = TOO_LONG if kept == len(lease.path) else NO_ROOM
        self._report(state, kept, len(path) - kept, reason, reason)
        return kept * self._chunk_tokens

    def refuse(self, state: RequestState, why: str, chunks: int) -> None:
        """Nothing is kept of a prompt of ``chunks`` whole chunks that another engine continues."""
        self.drop(state)
        self._report(state, 0, chunks, BYPASSED, why)

    def drop(self, state: RequestState) -> None:
        """No other engine will continue this request."""
        if _holder(state) in self._leases:
            self._end(_holder(state))

    def step(self) -> None:
        """End the leases whose time is over, and pin chunks that have been stored since the last step."""
        self._log.flush()
        now, copied = self._clock(), Counter[ChunkKey | None](self._stack.copied())
        for holder, lease in list(self._leases.items()):
            last = lease.path[-1] if lease.path else None
            if copied[last] and now + COPIED < lease.ends < math.inf:
                copied[last] -= 1  # of equal prompts, the one that was handed over first has been read
                lease.ends = now + COPIED
            if lease.ends <= now:
                self._end(holder)
            elif not lease.settled and not self._stack.still_pending(holder):
                self._find(holder, lease)

    def release_all(self) -> None:
        """End every lease."""
        for holder in list(self._leases):
            self._end(holder)

    def _lease(
        self, holder: str, path: Sequence[ChunkKey], limit: LoadLimit | None, salt: bytes, ends: float
    ) -> _Lease:
        """Begin a lease, or extend it. If there are too many, others end: the oldest of a prompt that was handed over,
        or the oldest of all.
        """
        if known := self._leases.pop(holder, None):
            self._forget(known.path)
        usage = self._stack.usage()
        most = usage[0].capacity // self._chunk_nbytes // _SHARE if usage else 0  # with packed shards it could be more
        lease = self._leases[holder] = _Lease(path[:most], limit, salt, ends)
        self._chunks.update(lease.path)
        while len(self._chunks) > most:
            others = (each for each in self._leases if each != holder)
            self._end(min(others, key=lambda each: self._leases[each].ends))
        return lease

    def _find(self, holder: str, lease: _Lease) -> int:
        through_the_arena = self._stack.media  # peers see nothing else
        terms = Terms(lease.limit, lease.salt, not_direct=through_the_arena, lasting=True)
        found = self._stack.lookup(lease.path, holder, terms)
        lease.settled = not found.pending
        return found.chunks + found.pending

    def _end(self, holder: str) -> None:
        self._forget(self._leases.pop(holder).path)
        self._stack.release(holder)

    def _forget(self, path: Sequence[ChunkKey]) -> None:
        self._chunks.subtract(path)
        for key in path:
            if not self._chunks[key]:
                del self._chunks[key]

    def _report(self, state: RequestState, kept: int, lost: int, reason: str, why: str) -> None:
        """Count the chunks of a prompt that are kept and those that are not; if none is, log ``why`` in full."""
        tier, request = next(iter(self._stack.media), ""), state.name
        if kept:
            self._tell([Event(EventKind.HANDED_OVER, tier, tokens=kept * self._chunk_tokens, request=request)])
        if lost:
            tokens = lost * self._chunk_tokens
            self._tell([Event(EventKind.NOT_KEPT, tier, tokens=tokens, why=reason, request=request)])
        if lost and not kept:
            detail = f"{request}: nothing is kept; the engine that decodes computes the prompt again"
            self._log.log(logging.WARNING, "prefill for another engine", detail, why)


def _holder(state: RequestState) -> str:
    return f"handover of {state.holder}"
