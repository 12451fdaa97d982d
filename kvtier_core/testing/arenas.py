"""The laws of an arena and its mover. Subclass `ArenaLaws` and name a config."""

from __future__ import annotations

import contextlib
import random
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import NO_BLOCK, AllocatorBackend, ArenaConfig, JobResult, Mover, PageList
from kvtier_core.testing.laws import Laws
from kvtier_core.testing.samples import PagedBuffer, address_of, is_poison, make_context, make_layout, poison, same
from kvtier_core.types import FRAME_ALIGNMENT, ChunkLayout

_SLOTS = 6
_BLOCKS = 24
_SEEDS = range(4)
_PATIENCE = 30.0  # seconds


class ArenaLaws(Laws):
    """Subclass, and implement `config`; and `paged_buffer` if the mover cannot reach host memory."""

    def config(self, folder: Path) -> ArenaConfig:
        return super().config(folder)

    def paged_buffer(self, layout: ChunkLayout, blocks: int, rng: random.Random) -> PagedBuffer:
        """An engine's paged buffer that the mover can reach."""
        return PagedBuffer(layout, blocks, rng)

    @contextlib.contextmanager
    def opened(self, folder: Path, layout: ChunkLayout | None = None) -> Iterator[AllocatorBackend]:
        """The arena under test with at least one slot and room for six, closed afterwards."""
        layout = layout or self.layout
        memory = self.config(folder).open(make_context(layout=layout, capacity=_SLOTS * layout.frame_nbytes))
        try:
            yield memory
        finally:
            memory.close()

    @contextlib.contextmanager
    def engine(self, folder: Path, seed: int, layout: ChunkLayout | None = None) -> Iterator[_Engine]:
        """An arena, a worker attached to it, and pages full of random bytes."""
        layout = layout or self.layout
        rng = random.Random(seed)
        with self.opened(folder, layout) as memory:
            pages = self.paged_buffer(layout, _BLOCKS, rng)
            pages.fill(rng)
            mover = self.config(folder).attach(memory.handle, pages.table())
            try:
                yield _Engine(memory, mover, pages, layout, rng)
            finally:
                mover.close()

    # -- slots -------------------------------------------------------------------------------------

    def test_slots_are_as_promised(self, tmp_path: Path):
        capacity = _SLOTS * self.layout.frame_nbytes + self.layout.frame_nbytes // 2
        memory = self.config(tmp_path).open(make_context(layout=self.layout, capacity=capacity))
        try:
            assert memory.slots >= 1
            assert memory.slot_nbytes == self.layout.frame_nbytes
            assert memory.slots * memory.slot_nbytes <= capacity
        finally:
            memory.close()

    def test_no_room_for_one_slot_is_an_error(self, tmp_path: Path):
        with pytest.raises(BackendError):
            self.config(tmp_path).open(make_context(layout=self.layout, capacity=self.layout.frame_nbytes - 1))

    def test_views_are_writable_aligned_and_apart(self, tmp_path: Path):
        with self.opened(tmp_path) as memory:
            for slot in range(memory.slots):
                view = memory.view(slot)
                assert not view.readonly
                assert len(view) == memory.slot_nbytes
                assert address_of(view) % FRAME_ALIGNMENT == 0
                view[:] = bytes([slot]) * len(view)
            for slot in range(memory.slots):
                assert same(memory.view(slot), bytes([slot]) * memory.slot_nbytes), "two slots share bytes"

    def test_handle_is_plain_text(self, tmp_path: Path):
        with self.opened(tmp_path) as memory:
            assert isinstance(memory.handle, str)
            assert memory.handle.isprintable()

    def test_facts_are_plain_words(self, tmp_path: Path):
        with self.opened(tmp_path) as memory:
            assert all(isinstance(word, str) for fact in memory.facts().items() for word in fact)

    def test_close_twice(self, tmp_path: Path):
        with self.engine(tmp_path, seed=0) as engine:
            engine.mover.close()
            engine.memory.close()
            engine.memory.close()

    # -- pages -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_store_gathers_exact_bytes(self, tmp_path: Path, seed: int):
        """A shard holds, layer after layer, the chunk's pages in token order; a hole is left alone."""
        with self.engine(tmp_path, seed) as engine:
            slots, pages = engine.choose()
            for slot in range(engine.memory.slots):
                poison(engine.memory.view(slot))
            before = engine.pages.everything()
            engine.mover.store(1, pages, slots)
            assert settle(engine.mover, [1]) == {1: True}
            assert same(engine.pages.everything(), before), "a store changed the pages"
            for slot, blocks in zip(slots, pages, strict=True):
                assert same(engine.memory.view(slot), engine.expected_slot(blocks))
            assert all(is_poison(engine.memory.view(slot)) for slot in engine.others(slots)), "another slot changed"

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_sums_are_of_what_was_stored(self, tmp_path: Path, seed: int):
        """A mover need not sum. One that does says what lies in the shards, holes and all."""
        with self.engine(tmp_path, seed) as engine:
            slots, pages = engine.choose()
            engine.mover.store(1, pages, slots)
            checksums = reports_of(engine.mover, [1])[1].checksums
            shards = [engine.memory.view(slot)[FRAME_ALIGNMENT:][: engine.layout.shard_nbytes] for slot in slots]
            assert list(checksums) in ([], [zlib.crc32(shard) for shard in shards])

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_load_scatters_exact_bytes(self, tmp_path: Path, seed: int):
        """Into the pages that are wanted; their neighbours, their padding and the slots stay as they are."""
        with self.engine(tmp_path, seed) as engine:
            slots, pages = engine.choose()
            for slot in slots:
                engine.memory.view(slot)[:] = engine.rng.randbytes(engine.memory.slot_nbytes)
            held = [bytes(engine.memory.view(slot)) for slot in slots]
            expected = engine.expected_pages(slots, pages)
            engine.mover.load(1, slots, pages)
            assert settle(engine.mover, [1]) == {1: True}
            assert same([bytes(engine.memory.view(slot)) for slot in slots], held), "a load changed a slot"
            assert same(engine.pages.everything(), expected)

    def test_what_is_stored_is_loaded(self, tmp_path: Path):
        """Through a second mover, to other pages."""
        with self.engine(tmp_path, seed=1) as engine:
            blocks = engine.rng.sample(range(_BLOCKS), engine.layout.blocks)
            engine.mover.store(1, [blocks], [0])
            settle(engine.mover, [1])
            other = self.paged_buffer(engine.layout, _BLOCKS, engine.rng)
            mover = self.config(tmp_path).attach(engine.memory.handle, other.table())
            elsewhere = engine.rng.sample(range(_BLOCKS), engine.layout.blocks)
            mover.load(1, [0], [elsewhere])
            assert settle(mover, [1]) == {1: True}
            mover.close()
            for layer in range(len(engine.layout.page_nbytes)):
                for source, target in zip(blocks, elsewhere, strict=True):
                    assert same(other.page(layer, target), engine.pages.page(layer, source))

    def test_ranks_do_not_meet(self, tmp_path: Path):
        layout = make_layout(ranks=3)
        rng = random.Random(7)
        blocks = rng.sample(range(_BLOCKS), layout.blocks)
        with self.opened(tmp_path, layout) as memory:
            poison(memory.view(0))
            expected = bytearray(memory.view(0))
            for rank in (1, 0, 2):
                pages = self.paged_buffer(layout, _BLOCKS, rng)
                pages.fill(rng)
                mover = self.config(tmp_path).attach(memory.handle, pages.table(rank))
                mover.store(1, [blocks], [0])
                assert settle(mover, [1]) == {1: True}
                mover.close()
                begin = layout.shard_offset(rank)
                expected[begin : begin + layout.shard_nbytes] = shard_of(pages, layout, blocks)
                assert same(memory.view(0), expected), f"rank {rank} did not write its own shard and nothing else"

    # -- jobs --------------------------------------------------------------------------------------

    def test_every_job_is_reported_once(self, tmp_path: Path):
        with self.engine(tmp_path, seed=2) as engine:
            blocks = list(range(engine.layout.blocks))
            jobs = engine.rng.sample(range(1000), 40)
            reports: list[JobResult] = []
            for i, job in enumerate(jobs):
                slot = i % engine.memory.slots
                if i % 2:
                    engine.mover.load(job, [slot], [[block + engine.layout.blocks for block in blocks]])
                else:
                    engine.mover.store(job, [blocks], [slot])
                reports += engine.mover.finished()
                engine.mover.wait([job])
            reports += engine.mover.finished()
            assert sorted(ended[:2] for ended in reports) == sorted((job, True) for job in jobs)
            assert list(engine.mover.finished()) == []

    def test_wait_frees_the_pages(self, tmp_path: Path):
        """After it the engine may overwrite the pages; the job is still to be reported."""
        with self.engine(tmp_path, seed=3) as engine:
            slots, pages = engine.choose(holes=False)
            expected = [engine.expected_slot(blocks)[FRAME_ALIGNMENT:] for blocks in pages]
            for slot in slots:
                poison(engine.memory.view(slot))
            engine.mover.store(5, pages, slots)
            engine.mover.wait([5])
            engine.pages.fill(engine.rng)
            assert settle(engine.mover, [5]) == {5: True}
            assert same([engine.memory.view(slot)[FRAME_ALIGNMENT:] for slot in slots], expected)
            engine.mover.wait([5])

    def test_mover_closes_twice(self, tmp_path: Path):
        with self.engine(tmp_path, seed=0) as engine:
            engine.mover.close()
            engine.mover.close()


def settle(mover: Mover, jobs: Collection[int]) -> dict[int, bool]:
    """Poll until each job is reported; whether it succeeded."""
    return {job: ended.ok for job, ended in reports_of(mover, jobs).items()}


def reports_of(mover: Mover, jobs: Collection[int]) -> dict[int, JobResult]:
    """Poll until each job is reported; what was reported."""
    reports: dict[int, JobResult] = {}
    deadline = time.monotonic() + _PATIENCE
    while not reports.keys() >= set(jobs):
        assert time.monotonic() < deadline, f"jobs {set(jobs) - reports.keys()} are never reported"
        for ended in mover.finished():
            assert ended.job not in reports, f"job {ended.job} is reported twice"
            reports[ended.job] = ended
        time.sleep(0.001)
    return reports


def shard_of(pages: PagedBuffer, layout: ChunkLayout, blocks: Sequence[int]) -> bytes:
    """What a rank's shard of a chunk must be."""
    return b"".join(pages.page(layer, block) for layer in range(len(layout.page_nbytes)) for block in blocks)


@attrs.frozen
class _Engine:
    memory: AllocatorBackend
    mover: Mover
    pages: PagedBuffer
    layout: ChunkLayout
    rng: random.Random

    def choose(self, *, holes: bool = True) -> tuple[list[int], PageList]:
        """Some slots, and for each the blocks of one chunk, a few of them not wanted."""
        slots = self.rng.sample(range(self.memory.slots), self.rng.randint(1, min(3, self.memory.slots)))
        blocks = self.rng.sample(range(_BLOCKS), len(slots) * self.layout.blocks)
        if holes:
            blocks = [NO_BLOCK if self.rng.random() < 0.3 else block for block in blocks]
        return slots, [blocks[i * self.layout.blocks :][: self.layout.blocks] for i in range(len(slots))]

    def others(self, slots: Collection[int]) -> list[int]:
        return [slot for slot in range(self.memory.slots) if slot not in slots]

    def expected_slot(self, blocks: Sequence[int]) -> bytes:
        """A poisoned slot after the store of a chunk."""
        slot = memoryview(bytearray(self.memory.slot_nbytes))
        poison(slot)
        for layer, block, begin, nbytes in self._pieces(blocks):
            slot[begin : begin + nbytes] = self.pages.page(layer, block)
        return bytes(slot)

    def expected_pages(self, slots: Sequence[int], pages: PageList) -> list[bytes]:
        """The whole paged buffer after the load of these slots; the buffer itself is left as it was."""
        pieces = [(slot, piece) for slot, blocks in zip(slots, pages, strict=True) for piece in self._pieces(blocks)]
        originals = [self.pages.page(layer, block) for _, (layer, block, _, _) in pieces]
        for slot, (layer, block, begin, nbytes) in pieces:
            self.pages.put(layer, block, bytes(self.memory.view(slot)[begin : begin + nbytes]))
        expected = self.pages.everything()
        for (_, (layer, block, _, _)), page in zip(pieces, originals, strict=True):
            self.pages.put(layer, block, page)
        return expected

    def _pieces(self, blocks: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Layer, block, place in the slot and bytes of each page that is wanted, of rank 0."""
        begin = self.layout.shard_offset(0)
        for layer, nbytes in enumerate(self.layout.page_nbytes):
            for block in blocks:
                if block != NO_BLOCK:
                    yield layer, block, begin, nbytes
                begin += nbytes
