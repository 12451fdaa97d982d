"""An arena with a worker attached to it, and what its memory and its pages must be after a copy."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Sequence

import attrs

from kvtier_core.interfaces import NO_BLOCK, AllocatorBackend, JobResult, Mover, PageList
from kvtier_core.layouts import Part, Shard
from kvtier_testing.resources import PATIENCE
from kvtier_testing.samples import PagedBuffer, poison

BLOCKS = 24  #: pages in each layer of the paged buffer


def settle(mover: Mover, jobs: Collection[int]) -> dict[int, bool]:
    """Poll until each job is reported; returns which of them succeeded."""
    return {job: ended.ok for job, ended in reports_of(mover, jobs).items()}


def reports_of(mover: Mover, jobs: Collection[int]) -> dict[int, JobResult]:
    """Poll until each job is reported; returns the reports."""
    reports: dict[int, JobResult] = {}
    deadline = time.monotonic() + PATIENCE
    while not reports.keys() >= set(jobs):
        missing = sorted(set(jobs) - reports.keys())
        assert time.monotonic() < deadline, f"finished() has not reported jobs {missing} for {PATIENCE:.0f} seconds"
        for ended in mover.finished():
            assert ended.job not in reports, f"finished() reports job {ended.job} twice"
            reports[ended.job] = ended
        time.sleep(0.001)
    return reports


def shard_of(pages: PagedBuffer, shard: Shard, chunk: Sequence[Sequence[int]]) -> bytes:
    """The right content of a rank's shard of a chunk with these block ids, group by group."""
    return b"".join(pages.page(layer.layer, block) for layer in shard.layers for block in chunk[layer.group])


@attrs.frozen
class AttachedEngine:
    """An arena, a worker's mover, the worker's pages, a part of chunks, and a generator of random choices."""

    memory: AllocatorBackend
    mover: Mover
    pages: PagedBuffer
    part: Part
    rng: random.Random

    def choose(self, *, holes: bool = True) -> tuple[list[int], PageList]:
        """Some slots, and for each the blocks of one chunk, a few of them not wanted."""
        slots = self.rng.sample(range(self.memory.slots), self.rng.randint(1, min(3, self.memory.slots)))
        chunks = list(zip(*(self._rows(blocks, len(slots), holes) for blocks in self.part.blocks), strict=True))
        return slots, chunks

    def draw(self) -> list[list[int]]:
        """The block ids of one chunk, group by group."""
        return [self.rng.sample(range(BLOCKS), blocks) for blocks in self.part.blocks]

    def _rows(self, blocks: int, chunks: int, holes: bool) -> list[list[int]]:
        """Of one group, the block ids of each chunk."""
        drawn = self.rng.sample(range(BLOCKS), chunks * blocks)
        if holes:
            drawn = [NO_BLOCK if self.rng.random() < 0.3 else block for block in drawn]
        return [drawn[i * blocks :][:blocks] for i in range(chunks)]

    def expected_slot(self, chunk: Sequence[Sequence[int]]) -> bytes:
        """A poisoned slot after the store of a chunk."""
        slot = memoryview(bytearray(self.memory.slot_nbytes))
        poison(slot)
        for layer, block, begin, nbytes in self._pieces(chunk):
            slot[begin : begin + nbytes] = self.pages.page(layer, block)
        return bytes(slot)

    def expected_pages(self, slots: Sequence[int], pages: PageList) -> list[bytes]:
        """The whole paged buffer after the load of these slots; the buffer itself is left as it was."""
        pieces = [(slot, piece) for slot, chunk in zip(slots, pages, strict=True) for piece in self._pieces(chunk)]
        originals = [self.pages.page(layer, block) for _, (layer, block, _, _) in pieces]
        for slot, (layer, block, begin, nbytes) in pieces:
            self.pages.put(layer, block, bytes(self.memory.view(slot)[begin : begin + nbytes]))
        expected = self.pages.everything()
        for (_, (layer, block, _, _)), page in zip(pieces, originals, strict=True):
            self.pages.put(layer, block, page)
        return expected

    def _pieces(self, chunk: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int, int]]:
        """Layer, block, place in the slot and bytes of each page that is wanted, of rank 0."""
        shard = self.part.shard_of(0)
        begin = shard.offset
        for layer in shard.layers:
            for block in chunk[layer.group]:
                if block != NO_BLOCK:
                    yield layer.layer, block, begin, layer.page_nbytes
                begin += layer.page_nbytes
