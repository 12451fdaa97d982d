"""The stores under way: from the slots that a step's chunks got until every rank has copied its pages to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import attrs
from vllm.v1.core.sched.output import SchedulerOutput

from kvtier_core.engine.messages import Progress, Transfer
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import ChunkKey


@attrs.define
class _Store:
    keys: list[ChunkKey]
    blocks: frozenset[int]  #: whose pages are read
    waiting: int  #: workers that have not reported
    failed: bool = False
    checksums: dict[int, Sequence[int]] = attrs.field(factory=dict)  #: of the shards, by rank


class Stores:
    """By job, as the workers know them."""

    def __init__(self, manager: StorageManager, ranks: int):
        self._manager = manager
        self._ranks = ranks
        self._under_way: dict[int, _Store] = {}
        self._jobs = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, path: Sequence[ChunkKey], pages: Iterable[Sequence[int]]) -> list[tuple[int, Transfer]]:
        """Store what nobody keeps yet of a path whose chunks lie in ``pages``, the block ids of each."""
        slots = self._manager.reserve(path)
        if not slots:
            return []
        wanted = tuple(tuple(row) for key, row in zip(path, pages, strict=True) if key in slots)
        self._jobs += 1
        self._under_way[self._jobs] = _Store(list(slots), frozenset(itertools.chain(*wanted)), self._ranks)
        return [(self._jobs, Transfer(tuple(slots.values()), wanted))]

    def stores_to_fence(self, output: SchedulerOutput, block_tokens: int) -> tuple[int, ...]:
        """Jobs whose blocks were freed meanwhile, and which this step gives to a request, to be written."""
        if not self._under_way:
            return ()
        given = {
            block
            for new in output.scheduled_new_reqs
            for block in new.block_ids[0][new.num_computed_tokens // block_tokens :]
        }
        given.update(block for ids in output.scheduled_cached_reqs.new_block_ids if ids for block in ids[0])
        return tuple(job for job, store in self._under_way.items() if not store.blocks.isdisjoint(given))

    def fail(self) -> None:
        """Keep nothing of what is under way."""
        for store in self._under_way.values():
            store.failed = True

    def take_in(self, report: Progress) -> None:
        """What the workers did."""
        for (job, rank), checksums in report.checksums.items():
            self._under_way[job].checksums[rank] = checksums
        for job, workers in report.ended.items():
            self._end(job, workers, failed=bool(report.failed[job]))

    def _end(self, job: int, workers: int, *, failed: bool) -> None:
        """A chunk is READY when every rank has stored its shard; a slot is free when none writes to it."""
        store = self._under_way[job]
        store.waiting -= workers
        store.failed |= failed
        if store.waiting:
            return
        del self._under_way[job]
        if store.failed:
            self._manager.abort(store.keys)
        else:
            summed = len(store.checksums) == self._ranks
            by_chunk = zip(*(store.checksums[rank] for rank in range(self._ranks)), strict=True) if summed else ()
            self._manager.commit(store.keys, dict(zip(store.keys, by_chunk, strict=summed)))
