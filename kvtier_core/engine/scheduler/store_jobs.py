"""Stores under way: from the reservation of slots until every rank has copied its pages into them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import attrs

from kvtier_core.engine.messages import ChunkPages, Transfer, WorkerProgress
from kvtier_core.stack.interface import Stores
from kvtier_core.types import ChunkKey

#: Numbers of jobs, each with its transfer.
Jobs = tuple[tuple[int, Transfer], ...]


@attrs.define
class _StoreJob:
    keys: list[ChunkKey]
    blocks: frozenset[int]  #: the blocks whose pages are read
    waiting: int  #: workers that have not reported its end
    filled: int  #: number of leading chunks that are filled, according to the workers' reports so far
    failed: bool = False
    checksums: dict[int, Sequence[int]] = attrs.field(factory=dict)  #: of each chunk, by shard


class StoreJobs:
    """The stores under way, by the job number that the workers use."""

    def __init__(self, stack: Stores, ranks: int, shards: int):
        self._stack = stack
        self._ranks = ranks
        self._shards = shards
        self._jobs: dict[int, _StoreJob] = {}
        self._last_job = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def keys(self) -> set[ChunkKey]:
        """The keys of all chunks that are being stored."""
        return {key for store in self._jobs.values() for key in store.keys}

    def begin(
        self,
        path: Sequence[ChunkKey],
        pages: Mapping[ChunkKey, ChunkPages],
        salt: bytes,
        parts: Sequence[ChunkKey] = (),
        promised_to: str = "",
        *,
        memory_only: bool = False,
    ) -> Jobs:
        """Store the chunks of a path that the stack admits, and other parts of chunks, from these ``pages``.

        Returns the new job and its transfer, or nothing if the stack admits no chunk. ``promised_to`` and
        ``memory_only``: see `Stack.reserve`.
        """
        holder = _holder(self._last_job + 1)
        slots = self._stack.reserve(path, holder, salt, parts, promised_to, memory_only=memory_only)
        if not slots:
            return ()
        wanted = tuple(map(pages.__getitem__, slots))
        blocks = frozenset(itertools.chain.from_iterable(itertools.chain.from_iterable(wanted)))
        self._last_job += 1
        self._jobs[self._last_job] = _StoreJob(list(slots), blocks, self._ranks, len(slots))
        return ((self._last_job, Transfer(tuple(slots.values()), wanted)),)

    def to_fence(self, new_blocks: Collection[int]) -> tuple[int, ...]:
        """Jobs that may still read one of these blocks, which a step is about to overwrite."""
        return tuple(job for job, store in self._jobs.items() if not store.blocks.isdisjoint(new_blocks))

    def fail_all(self) -> None:
        """Discard the chunks of every store under way as soon as the workers have ended it."""
        for store in self._jobs.values():
            store.failed = True

    def record(self, progress: WorkerProgress) -> None:
        """Process the ends that the workers report."""
        for (job, shard), checksums in progress.checksums.items():
            self._jobs[job].checksums[shard] = checksums
        for job, filled in progress.filled.items():
            self._jobs[job].filled = min(self._jobs[job].filled, filled)
        for job, workers in progress.ended.items():
            self._end(job, workers, failed=bool(progress.failed[job]))

    def _end(self, job: int, workers: int, *, failed: bool) -> None:
        """Commit or release the slots once every rank has ended: only then is a chunk whole, or its slot unused."""
        store = self._jobs[job]
        store.waiting -= workers
        store.failed |= failed
        if store.waiting:
            return
        del self._jobs[job]
        if store.failed:
            self._stack.release(_holder(job))
        else:
            self._stack.commit(_holder(job), self._checksums_by_chunk(store), store.keys[store.filled :])

    def _checksums_by_chunk(self, store: _StoreJob) -> dict[ChunkKey, Sequence[int]]:
        """For each chunk the checksums of its shards; empty unless all were computed."""
        if len(store.checksums) != self._shards:
            return {}
        by_chunk = zip(*(store.checksums[shard] for shard in range(self._shards)), strict=True)
        return dict(zip(store.keys, by_chunk, strict=True))


def _holder(job: int) -> str:
    """The holder of the slots that a job fills."""
    return f"store {job}"
