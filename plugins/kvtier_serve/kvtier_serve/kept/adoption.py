"""Adopts what a former server left in one arena of a stack.

Processes that the former server lent the memory to may still read and write there until they have released it
(`kvtier_remote/user_locks.py`). So until then no slot that was in use changes: a chunk that proves to be whole is READY
and pinned, and every other slot stays reserved.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

from kvtier_core.frames.format import FrameError, verify
from kvtier_core.frames.identity import codec_of_slots, namespace_of_slots
from kvtier_core.types import ChunkKey, Slot
from kvtier_core.work.io_pool import Outcome, Pool
from kvtier_serve.kept.journal import Held
from kvtier_serve.lent_arena import LentArena
from kvtier_serve.sessions import Space

logger = logging.getLogger("kvtier")

#: The holder of what is adopted, after the session number that no engine has.
_FORMER = "0/former server"
#: Bytes that are verified together.
_GROUP_NBYTES = 64 << 20


class Adoption:
    """Ends when all is verified, and no other process may touch it. The owner's thread calls every method."""

    def __init__(self, space: Space, arena: LentArena, held: Mapping[int, Held], pool: Pool):
        """Takes over the slots; ``pool`` verifies what they hold."""
        self.space = space
        self._arena = arena
        ready = [each for each in held.values() if each.ready]
        self._parents = {ChunkKey(each.key): ChunkKey(each.parent) if each.parent else None for each in ready}
        self._unusable = [ChunkKey(each.key) for each in held.values() if not each.ready]
        self._unverified = len(self._parents)
        self._pinned: list[Slot] = []
        arena.restore({slot: (ChunkKey(each.key), each.tenant) for slot, each in held.items()})
        keys, at_a_time = list(self._parents), max(1, _GROUP_NBYTES // arena.memory.slot_nbytes)
        for first in range(0, len(keys), at_a_time):
            group = keys[first : first + at_a_time]
            views = [arena.view(key) for key in group]
            pool.submit_load(functools.partial(self._verify, group, views), functools.partial(self._verified, group))

    def _verify(self, keys: Sequence[ChunkKey], views: Sequence[memoryview]) -> list[FrameError | None]:
        """Compare frames with the keys that they should have, on a thread of the pool."""
        layout = self.space.layout
        namespace = namespace_of_slots(self.space.namespace, layout)
        codec = codec_of_slots(layout)
        return [
            verify(view, namespace, key, codec=codec, payload_nbytes=layout.part_of(key).payload_nbytes)
            for key, view in zip(keys, views, strict=True)
        ]

    def _verified(self, keys: Sequence[ChunkKey], outcome: Outcome) -> None:
        self._unverified -= len(keys)
        errors = outcome.value if outcome.error is None else keys
        whole = [key for key, error in zip(keys, errors, strict=True) if error is None and self._arena.is_reserved(key)]
        self._arena.commit(whole, [self._parents[key] for key in whole])
        self._arena.show(whole, self.space.layout)
        self._pinned += self._arena.pin(whole, _FORMER)
        adopted = set(whole)
        self._unusable += [key for key in keys if key not in adopted]
        if not self._unverified:
            logger.info(
                "kvtier: %s: %s: adopted %d chunks; %d slots of the previous server are not adopted",
                *(self.space.model, self._arena.name, len(self._pinned), len(self._unusable)),
            )

    def end(self) -> bool:
        """No other process may touch the slots now: free the useless ones. False if some are not verified yet."""
        if self._unverified:
            return False
        self._arena.unpin(self._pinned, _FORMER)
        self._arena.condemn(self._unusable)  # what was erased may be among them
        self._arena.abort(self._unusable)
        return True
