"""The way down: frames are sealed in the hottest arena, and offered to every level below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtier_core.frames import format as frame
from kvtier_core.frames.checksum import join
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.store_tier.tier import FrameWrite, StoreTier
from kvtier_core.transfer.io_pool import Outcome, Pool
from kvtier_core.types import ChunkKey, ChunkLayout, Event, EventKind, Namespace, Slot

#: Headers are written for groups of about this many bytes at a time.
_SEAL_NBYTES = 16 << 20
#: Who holds a slot while its header is written.
_SEALER = "sealing"

#: Who of these may come into an arena, where there is room for them then.
Trade = Callable[[Arena, Sequence[ChunkKey], Sequence[ChunkKey]], list[ChunkKey]]


class WriteThrough:
    """Every method on the owner's thread, but `_seal`."""

    def __init__(
        self,
        hot: Arena,
        below: Sequence[Arena | StoreTier],
        *,
        namespace: Namespace,
        layout: ChunkLayout,
        pool: Pool,
        trade: Trade,
        report: Callable[[Event], None],
    ):
        self.namespace = namespace
        self._hot = hot
        self._below = below
        self._layout = layout
        self._pool = pool
        self._trade = trade
        self._report = report
        self._descending: set[ChunkKey] = set()

    def writable(self, path: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Those of a path, root first, that a level below would take in now."""
        return set().union(*(level.would_admit(path) for level in self._below))

    def begin(self, keys: Sequence[ChunkKey], checksums: Mapping[ChunkKey, Sequence[int]]) -> None:
        """Seal what a level below would like to have, then offer it to all of them. ``sums``: see `commit`."""
        if not self._below:
            return
        held = [key for key in keys if self._hot.has(key) and key not in self._descending]
        welcome = self.writable(held)
        wanted = [key for key in held if key in welcome]
        per_group = max(1, _SEAL_NBYTES // self._layout.frame_nbytes)
        for start in range(0, len(wanted), per_group):
            group = wanted[start : start + per_group]
            slots = self._hot.pin(group, _SEALER)
            work = [(key, self._hot.view(key), checksums.get(key, ())) for key in group]
            self._descending.update(group)
            self._pool.submit_store(
                lambda work=work, namespace=self.namespace: self._seal(work, namespace),
                lambda outcome, group=group, slots=slots: self._sealed(group, slots, outcome),
            )

    def _seal(self, work: Sequence[tuple[ChunkKey, memoryview, Sequence[int]]], namespace: Namespace) -> None:
        """On a thread."""
        for key, view, checksums in work:
            summed = join(checksums, self._layout.shard_nbytes) if checksums else None
            frame.seal(view, namespace, key, self._layout.payload_nbytes, summed=summed)

    def _sealed(self, keys: Sequence[ChunkKey], slots: Sequence[Slot], outcome: Outcome) -> None:
        self._descending.difference_update(keys)
        if outcome.error is None:
            self.offer(keys, self._below)
        else:
            self._report(Event(EventKind.IO_ERROR, self._hot.name, tuple(keys), 0, str(outcome.error)))
        self._hot.unpin(slots, _SEALER)

    def offer(self, keys: Sequence[ChunkKey], levels: Sequence[Arena | StoreTier]) -> None:
        """FrameWrite sealed frames to levels below the hottest. Each offer holds a pin of its own."""
        for level in levels:
            held = [key for key in keys if self._hot.has(key)]
            if isinstance(level, Arena):
                self._copy_down(level.without_slot(held), level)
            elif offered := level.index.meets_frequency(level.writable(held)):
                pins = dict(zip(offered, self._hot.pin(offered, level.name), strict=True))
                parent = self._hot.index.held.parent
                level.write(
                    [FrameWrite(key, parent(key), self._hot.view(key)) for key in offered],
                    lambda key, pins=pins, level=level: self._hot.unpin([pins[key]], level.name),
                )

    def _copy_down(self, keys: Sequence[ChunkKey], arena: Arena) -> None:
        keys = self._trade(arena, keys, keys)
        if not keys:
            return
        arena.reserve(keys)
        slots = self._hot.pin(keys, arena.name)
        copies = [(arena.view(key), self._hot.view(key)) for key in keys]
        parents = [self._hot.index.held.parent(key) for key in keys]

        def copy() -> None:
            for into, source in copies:
                into[:] = source

        def copied(outcome: Outcome) -> None:
            self._hot.unpin(slots, arena.name)
            if outcome.error is None:
                arena.commit(keys, parents)
            else:
                arena.abort(keys)

        self._pool.submit_store(copy, copied)
