"""The laws of an arena and its mover. Subclass `ArenaLaws` and name a config."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import NO_BLOCK, JobResult, PagedKVCache, PageList
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_core.transfer.packing import plain_unpack
from kvtier_core.types import FRAME_HEADER_NBYTES
from kvtier_testing.laws.arena_memory import ArenaMemoryLaws
from kvtier_testing.laws.attached import BLOCKS, AttachedEngine, reports_of, settle, shard_of
from kvtier_testing.samples import is_poison, make_group, make_layout, poison, same

_SEEDS = range(4)


class ArenaLaws(ArenaMemoryLaws):
    """Subclass, and implement `config`; and `paged_buffer` if the mover cannot reach host memory."""

    # -- attaching ---------------------------------------------------------------------------------

    def test_attach_raises_backend_error_when_it_cannot(self, tmp_path: Path) -> None:
        """`attach` to a closed arena, or to pages of an unknown device, raises BackendError.

        Otherwise a worker would copy to memory that is not the arena's, or the engine would end with a traceback
        instead of serving without kvtier.
        """
        with self.opened(tmp_path) as memory:
            cache = self.paged_buffer(self.layout, BLOCKS, random.Random(0)).kv_cache()
            handle = memory.handle
            elsewhere = attrs.evolve(cache, device="nowhere:0")
            self._must_refuse(tmp_path, handle, elsewhere, "pages on a device 'nowhere:0'")
        self._must_refuse(tmp_path, handle, cache, "an arena that was closed")

    # -- pages -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_store_gathers_exact_bytes(self, tmp_path: Path, seed: int) -> None:
        """A shard holds, layer after layer, the chunk's pages in token order; the place of a NO_BLOCK is untouched.

        Otherwise the arena would hold KV in another order than the engine reads. The seal covers these bytes, so no
        checksum finds it; kvtier's self-test does at the start, and nothing is stored or loaded.
        """
        with self.engine(tmp_path, seed) as engine:
            _must_gather(engine, *engine.choose())

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_sums_are_of_what_was_stored(self, tmp_path: Path, seed: int) -> None:
        """A mover need not sum. The checksums of one that does are of its shards, holes and all.

        Otherwise every chunk that comes back from a store tier would count as damaged, and be computed again.
        """
        with self.engine(tmp_path, seed) as engine:
            slots, pages = engine.choose()
            engine.mover.store(1, pages, slots)
            checksums = list(reports_of(engine.mover, [1])[1].checksums)
            own = engine.part.shard_of(0)
            shards = [engine.memory.view(slot)[own.offset :][: own.nbytes] for slot in slots]
            expected = [zlib.crc32(shard) for shard in shards]
            assert checksums in ([], expected), (
                f"checksums are the CRC-32 of each slot's shard, {expected}, or none at all; reported are {checksums}"
            )

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_load_scatters_exact_bytes(self, tmp_path: Path, seed: int) -> None:
        """A load fills the wanted pages; their neighbours, their padding and the slots stay as they are.

        Otherwise the engine would compute on the KV of another prompt, or another request's KV would be overwritten:
        wrong answers that nothing above a mover can find.
        """
        with self.engine(tmp_path, seed) as engine:
            _must_scatter(engine, *engine.choose())

    def test_what_is_stored_is_loaded(self, tmp_path: Path) -> None:
        """One mover loads into other pages the slots that another one stored.

        Otherwise a prompt that one worker stored would come back as other KV once the engine has moved its blocks.
        """
        with self.engine(tmp_path, seed=1) as engine:
            chunk = engine.draw()
            engine.mover.store(1, [chunk], [0])
            settle(engine.mover, [1])
            other = self.paged_buffer(self.layout, BLOCKS, engine.rng)
            elsewhere = engine.draw()
            with contextlib.closing(self.config(tmp_path).attach(engine.memory.handle, other.kv_cache())) as mover:
                mover.load(1, [0], [elsewhere])
                assert settle(mover, [1]) == {1: True}, "a load through a second mover failed"
            for layer in engine.part.shard_of(0).layers:
                for source, target in zip(chunk[layer.group], elsewhere[layer.group], strict=True):
                    assert same(other.page(layer.layer, target), engine.pages.page(layer.layer, source)), (
                        f"block {source} of layer {layer.layer} was stored; block {target} has other bytes after it "
                        "was loaded"
                    )

    def test_each_group_has_its_own_blocks(self, tmp_path: Path) -> None:
        """Of two groups with blocks of other lengths, each layer gets the pages of its own group.

        Otherwise in a model with several kinds of attention, layers of one kind would be given the KV of another.
        """
        groups = [make_group((512, 1024)), make_group((768,), name="group 1", block_tokens=8)]
        self._comes_back(tmp_path, ChunkLayout(groups, 32), part=0)

    def test_each_part_has_its_own_groups(self, tmp_path: Path) -> None:
        """A slot holds one part of a chunk: the layers of its groups and no others, the last pages of the chunk.

        Otherwise a hybrid model would continue a prompt with the states or windows of other tokens.
        """
        groups = [
            make_group((512, 1024)),
            make_group((768, 256), name="a window", block_tokens=8, kind=KVKind.SLIDING_WINDOW, reach=17),
            make_group((2048,), name="states", block_tokens=32, kind=KVKind.STATE),
        ]
        for part in range(3):
            self._comes_back(tmp_path, ChunkLayout(groups, 32), part)

    def _comes_back(self, tmp_path: Path, layout: ChunkLayout, part: int) -> None:
        with self.engine(tmp_path, 5, layout, part) as engine:
            slots, pages = engine.choose()
            _must_gather(engine, slots, pages)
            _must_scatter(engine, slots, pages)

    def test_ranks_do_not_meet(self, tmp_path: Path) -> None:
        """Each rank stores to its own shard of a slot and loads from it, and touches no other.

        Otherwise with tensor parallelism one rank would compute on the heads of another.
        """
        self._each_has_its_shard(tmp_path, make_layout(ranks=3))

    def test_stages_have_layers_of_their_own(self, tmp_path: Path) -> None:
        """Two pipeline stages of two ranks: the first has one layer, the second two.

        Otherwise with pipeline parallelism a stage would be given the KV of layers that it does not have.
        """
        groups = [make_group((512, 1024, 768))]
        self._each_has_its_shard(tmp_path, ChunkLayout(groups, 64, ranks=4, stages=((1,), (2,))))

    def test_ranks_with_the_same_bytes_share_a_shard(self, tmp_path: Path) -> None:
        """Of two ranks with the same bytes one stores the shard, and both load it.

        Otherwise with latent attention a rank would load what nobody stored, or a slot would be too small for its
        chunk.
        """
        self._each_has_its_shard(tmp_path, make_layout(ranks=4, replicas=2))

    def _each_has_its_shard(self, tmp_path: Path, layout: ChunkLayout) -> None:
        (part,) = layout.parts
        rng = random.Random(7)
        chunk = [rng.sample(range(BLOCKS), blocks) for blocks in part.blocks]
        with self.opened(tmp_path, layout) as memory:
            poison(memory.view(0))
            expected = bytearray(memory.view(0))
            for rank in rng.sample(range(layout.ranks), layout.ranks):
                if not layout.stores(rank):
                    continue
                pages = self.paged_buffer(layout, BLOCKS, rng, rank)
                pages.fill(rng)
                with contextlib.closing(self.config(tmp_path).attach(memory.handle, pages.kv_cache())) as mover:
                    mover.store(1, [chunk], [0])
                    assert settle(mover, [1]) == {1: True}, f"the store of rank {rank} failed"
                shard = part.shard_of(rank)
                expected[shard.offset : shard.offset + shard.nbytes] = shard_of(pages, shard, chunk)
                assert same(memory.view(0), expected), f"rank {rank} did not write its own shard and nothing else"
            for rank in range(layout.ranks):
                pages = self.paged_buffer(layout, BLOCKS, rng, rank)
                with contextlib.closing(self.config(tmp_path).attach(memory.handle, pages.kv_cache())) as mover:
                    mover.load(1, [0], [chunk])
                    assert settle(mover, [1]) == {1: True}, f"the load of rank {rank} failed"
                shard = part.shard_of(rank)
                held = expected[shard.offset : shard.offset + shard.nbytes]
                assert same(shard_of(pages, shard, chunk), held), f"rank {rank} did not read its own shard"

    # -- packed shards -----------------------------------------------------------------------------

    def test_packed_shards_hold_their_pages(self, tmp_path: Path) -> None:
        """Where the layout packs shards, a NO_BLOCK is packed as zeros, and pages come back as they were.

        Otherwise the engine would compute on other KV than that of its prompt.
        """
        with self._packing(tmp_path) as engine:
            slots, pages, shard = [1, 0], [engine.draw(), engine.draw()], engine.part.shard_of(0)
            pages[1][0][1] = NO_BLOCK
            held = [
                b"".join(
                    bytes(layer.page_nbytes) if block == NO_BLOCK else engine.pages.page(layer.layer, block)
                    for layer in shard.layers
                    for block in chunk[layer.group]
                )
                for chunk in pages
            ]
            engine.mover.store(1, pages, slots)
            checksums = list(reports_of(engine.mover, [1])[1].checksums)
            packed = [engine.memory.view(slot)[shard.offset :][: shard.nbytes] for slot in slots]
            assert checksums in ([], [zlib.crc32(each) for each in packed]), "the checksums are of other bytes"
            for chunk, found, expected in zip(pages, packed, held, strict=True):
                unpacked = bytearray(shard.pages_nbytes)
                assert plain_unpack(found, memoryview(unpacked)), f"the shard of blocks {chunk} is not packed"
                assert same(unpacked, expected), f"the shard of blocks {chunk} holds other bytes than their pages"
            engine.pages.fill(engine.rng)
            elsewhere = engine.draw()
            engine.mover.load(2, [1], [elsewhere])
            _must_succeed(engine, 2)
            assert same(shard_of(engine.pages, shard, elsewhere), held[0]), "a load gave other pages than were stored"

    def test_pages_that_do_not_pack_leave_their_slot_unfilled(self, tmp_path: Path) -> None:
        """A store of pages that do not fit when packed is not ok, and it says which slots are filled.

        Otherwise a chunk would be served of which a part is missing, or no chunk of the job would be.
        """
        with self._packing(tmp_path) as engine:
            shard, each = engine.part.shard_of(0), BLOCKS // 3
            pages = [[range(first, first + engine.part.blocks[0])] for first in (0, each, 2 * each)]
            for layer in shard.layers:
                for block in pages[1][layer.group]:
                    engine.pages.put(layer.layer, block, engine.rng.randbytes(layer.page_nbytes))
            poison(engine.memory.view(1))
            engine.mover.store(1, pages, [0, 1, 2])
            report = reports_of(engine.mover, [1])[1]
            assert (report.ok, sorted(report.filled)) == (False, [0, 2]), f"the second of three has no room: {report}"
            beyond = engine.memory.view(1)[shard.offset + shard.nbytes :]
            assert is_poison(beyond), "a store wrote beyond its shard"

    @contextlib.contextmanager
    def _packing(self, tmp_path: Path) -> Iterator[AttachedEngine]:
        """An engine with packed shards, whose pages hold numbers that pack: from 0.5 to 2, and their negatives."""
        layout = attrs.evolve(make_layout((12288, 4096, 1536), blocks=4, ranks=2), packed=True)
        device, _, _ = self.paged_buffer(layout, 1, random.Random(0)).device.partition(":")
        if device not in self.config(tmp_path).packs:
            pytest.skip("its movers do not pack for this device")
        with self.engine(tmp_path, 5, layout) as engine:
            for layer in engine.part.shard_of(0).layers:
                for block in range(BLOCKS):
                    page = bytearray(engine.rng.randbytes(layer.page_nbytes))
                    page[1::2] = bytes(0x3F | byte & 0x80 for byte in page[1::2])
                    engine.pages.put(layer.layer, block, bytes(page))
            yield engine

    # -- jobs --------------------------------------------------------------------------------------

    def test_every_job_is_reported_once(self, tmp_path: Path) -> None:
        """`finished` reports each job that began, exactly once.

        Otherwise a request would wait for its load until the engine gives up, or a slot would be reused while a job
        still copies.
        """
        with self.engine(tmp_path, seed=2) as engine:
            chunk = [list(range(blocks)) for blocks in engine.part.blocks]
            behind = [[block + len(row) for block in row] for row in chunk]
            jobs = engine.rng.sample(range(1000), 40)
            reports: list[JobResult] = []
            for i, job in enumerate(jobs):
                slot = i % engine.memory.slots
                if i % 2:
                    engine.mover.load(job, [slot], [behind])
                else:
                    engine.mover.store(job, [chunk], [slot])
                reports += engine.mover.finished()
                engine.mover.wait([job])
            reports += engine.mover.finished()
            reported = sorted(ended[:2] for ended in reports)
            assert reported == sorted((job, True) for job in jobs), (
                f"finished() reports each of the {len(jobs)} jobs once, as ok; it reported {reported}"
            )
            again = list(engine.mover.finished())
            assert again == [], f"finished() reports jobs again: {again}"

    def test_wait_frees_the_pages(self, tmp_path: Path) -> None:
        """After `wait` the engine may overwrite the pages; the job is still to be reported.

        Otherwise pages of a preempted request would be overwritten while they are stored: one chunk with the KV of two
        prompts, under a good seal.
        """
        with self.engine(tmp_path, seed=3) as engine:
            slots, pages = engine.choose(holes=False)
            expected = [engine.expected_slot(chunk)[FRAME_HEADER_NBYTES:] for chunk in pages]
            for slot in slots:
                poison(engine.memory.view(slot))
            engine.mover.store(5, pages, slots)
            engine.mover.wait([5])
            engine.pages.fill(engine.rng)
            _must_succeed(engine, 5)
            assert same([engine.memory.view(slot)[FRAME_HEADER_NBYTES:] for slot in slots], expected), (
                "pages that were overwritten after wait() had returned are in the slots: the store still read them"
            )
            engine.mover.wait([5])

    def test_mover_closes_twice(self, tmp_path: Path) -> None:
        """`close` of a mover may be called twice.

        Otherwise an engine that ends for another reason would end with a traceback of the plugin's instead.
        """
        with self.engine(tmp_path, seed=0) as engine:
            engine.mover.close()
            engine.mover.close()

    def _must_refuse(self, folder: Path, handle: str, cache: PagedKVCache, what: str) -> None:
        try:
            mover = self.config(folder).attach(handle, cache)
        except BackendError:
            return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise AssertionError(f"attach() to {what} raises BackendError; it raised {why}") from error
        mover.close()
        raise AssertionError(f"attach() to {what} raises BackendError; it returned a mover")


def _must_gather(engine: AttachedEngine, slots: Sequence[int], pages: PageList) -> None:
    """A store fills these slots with these pages, and changes nothing else."""
    for slot in range(engine.memory.slots):
        poison(engine.memory.view(slot))
    before = engine.pages.everything()
    engine.mover.store(1, pages, slots)
    _must_succeed(engine, 1)
    assert same(engine.pages.everything(), before), "a store changed the pages"
    for slot, chunk in zip(slots, pages, strict=True):
        assert same(engine.memory.view(slot), engine.expected_slot(chunk)), (
            f"after a store of blocks {chunk} slot {slot} holds other bytes than their pages, group by group "
            "and layer after layer from the rank's shard offset on, with unwanted places as they were"
        )
    others = [slot for slot in range(engine.memory.slots) if slot not in slots]
    others = [slot for slot in others if not is_poison(engine.memory.view(slot))]
    assert not others, f"a store into slots {slots} changed slots {others}"


def _must_scatter(engine: AttachedEngine, slots: Sequence[int], pages: PageList) -> None:
    """A load of these slots fills these pages, and changes nothing else."""
    for slot in slots:
        engine.memory.view(slot)[:] = engine.rng.randbytes(engine.memory.slot_nbytes)
    held = [bytes(engine.memory.view(slot)) for slot in slots]
    expected = engine.expected_pages(slots, pages)
    engine.mover.load(2, slots, pages)
    _must_succeed(engine, 2)
    assert same([bytes(engine.memory.view(slot)) for slot in slots], held), "a load changed a slot"
    assert same(engine.pages.everything(), expected), (
        f"after a load of slots {slots} into blocks {[list(blocks) for blocks in pages]} a wanted page has "
        "other bytes than its place in the shard, or something beside the wanted pages changed"
    )


def _must_succeed(engine: AttachedEngine, job: int) -> None:
    assert settle(engine.mover, [job])[job], f"job {job}, whose pages and slots are as they should be, is not ok"
