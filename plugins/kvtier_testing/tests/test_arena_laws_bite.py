"""The laws of an arena can fail, each where a bug is planted."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import zlib
from typing import ClassVar

import attrs
import pytest

from kvtier_core import interfaces
from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing import ArenaLaws, resources

_MEMORY = {}


class Memory(interfaces.AllocatorBackend):
    """Correct, and its handle a name in a dict of this process."""

    handle = ""

    def __init__(self, ctx):
        self.slot_nbytes = ctx.slot_nbytes
        self.slots = ctx.capacity // self.slot_nbytes
        if not self.slots:
            raise BackendError("no room for one slot")
        self.bytes = memoryview(mmap.mmap(-1, self.slots * self.slot_nbytes))
        self.handle = f"memory-{id(self)}"
        _MEMORY[self.handle] = self

    def view(self, slot):
        return self.bytes[slot * self.slot_nbytes :][: self.slot_nbytes]

    def close(self):
        _MEMORY.pop(self.handle, None)
        self.bytes = memoryview(b"")


class SaysWhatToChange(Memory):
    """Correct: what is wrong with the configuration may be a ConfigError."""

    path = "$.capacity"

    def __init__(self, ctx):
        try:
            super().__init__(ctx)
        except BackendError as error:
            raise ConfigError([Problem("", self.path, str(error))]) from error


class Copier(interfaces.Mover):
    """Correct, and done before it returns."""

    def __init__(self, memory, cache):
        if cache.device != "cpu":
            raise BackendError(f"no mover for {cache.device}")
        self.memory, self.kv_cache = memory, cache
        self.done = []

    def part_of(self, chunk):
        groups = tuple(number for number, row in enumerate(chunk) if row)
        return next(part for part in self.kv_cache.layout.parts if part.groups == groups)

    def pairs(self, pages, slots):
        """Of each wanted page: its memory in the engine, and in the slot."""
        for chunk, slot in zip(pages, slots, strict=True):
            part = self.part_of(chunk)
            at = part.shard_of(self.kv_cache.rank).offset
            for place in part.shard_of(self.kv_cache.rank).layers:
                run = self.kv_cache.layers[place.layer]
                for block in chunk[place.group]:
                    if block != interfaces.NO_BLOCK:
                        page = (ctypes.c_char * run.nbytes).from_address(run.base + block * run.stride)
                        yield memoryview(page).cast("B"), self.memory.view(slot)[at : at + run.nbytes]
                    at += run.nbytes

    def store(self, job, pages, slots):
        for page, place in self.pairs(pages, slots):
            place[:] = page
        self.done.append(interfaces.JobResult(job, ok=True))

    def load(self, job, slots, pages, after=None):
        for page, place in self.pairs(pages, slots):
            page[:] = place
        self.done.append(interfaces.JobResult(job, ok=True))

    def finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, jobs):
        pass

    def close(self):
        pass


class SlotsOverlap(Memory):
    def view(self, slot):
        return self.bytes[slot * (self.slot_nbytes - FRAME_ALIGNMENT) :][: self.slot_nbytes]


class Unaligned(Memory):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.bytes = memoryview(bytearray(len(self.bytes) + 1))[1:]


class SlotsOfTheLayout(Memory):
    def __init__(self, ctx):
        super().__init__(attrs.evolve(ctx, slot_nbytes=ctx.layout.frame_nbytes))


class TakesTooMuch(Memory):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.slots += 1


class AlwaysHasASlot(Memory):
    def __init__(self, ctx):
        super().__init__(attrs.evolve(ctx, capacity=max(ctx.capacity, ctx.layout.frame_nbytes)))


class HandsOutAnObject(Memory):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.handle = id(self)
        _MEMORY[self.handle] = self


class CountsInFacts(Memory):
    def facts(self):
        return {"numa": 0}


class ClosesOnce(Memory):
    def close(self):
        del _MEMORY[self.handle]


class SaysNotWhere(SaysWhatToChange):
    path = "tiers[0].capacity"


class CutsTheNumberOfASlot(Memory):
    def view(self, slot):
        return super().view(slot % 256)


class HasOneMemoryForAll(Memory):
    ever = None

    def __init__(self, ctx):
        super().__init__(ctx)
        HasOneMemoryForAll.ever = self.bytes = HasOneMemoryForAll.ever or self.bytes


class WipesTheOther(Memory):
    """Its memory is a file that the last one to close empties."""

    def close(self):
        for other in _MEMORY.values():
            other.bytes[:] = bytes(len(other.bytes))
        super().close()


class IsFullOfHoles(Memory):
    def __init__(self, ctx):
        super().__init__(ctx)
        with tempfile.TemporaryFile() as file:
            file.truncate(len(self.bytes))
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0))


class HasAllItsBlocks(Memory):
    """Correct: a file without holes, though none of it is in memory yet."""

    def __init__(self, ctx):
        super().__init__(ctx)
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, len(self.bytes))
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0))


class LeavesItsFile(Memory):
    def __init__(self, ctx):
        super().__init__(ctx)
        fd, self.path = tempfile.mkstemp()
        os.posix_fallocate(fd, 0, len(self.bytes))
        self.bytes = memoryview(mmap.mmap(fd, 0))
        os.close(fd)


class LeavesADescriptor(Memory):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.fd = os.memfd_create("planted")


class SharesAnotherFile(Memory):
    """A file as long as its slots, which are elsewhere."""

    def __init__(self, ctx):
        super().__init__(ctx)
        self.descriptor = os.memfd_create("planted")
        os.ftruncate(self.descriptor, len(self.bytes))

    def close(self):
        super().close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class LeavesItsMemory(Memory):
    ever: ClassVar = []

    def close(self):
        self.ever.append(self.bytes)
        super().close()


class SkipsHoles(Copier):
    """Packs what is wanted, as if a hole had no place."""

    def pairs(self, pages, slots):
        for chunk, slot in zip(pages, slots, strict=True):
            wanted = [[block for block in blocks if block != interfaces.NO_BLOCK] for blocks in chunk]
            yield from super().pairs([wanted], [slot])


class TakesEveryGroupForTheFirst(Copier):
    def pairs(self, pages, slots):
        return super().pairs([[chunk[0][: len(blocks)] for blocks in chunk] for chunk in pages], slots)


class TakesEveryPartForTheFirst(Copier):
    def part_of(self, chunk):
        return self.kv_cache.layout.parts[0]


class ForgetsTheStride(Copier):
    def __init__(self, memory, cache):
        dense = tuple(attrs.evolve(run, stride=run.nbytes) for run in cache.layers)
        super().__init__(memory, attrs.evolve(cache, layers=dense))


class ForgetsTheRank(Copier):
    def __init__(self, memory, cache):
        super().__init__(memory, attrs.evolve(cache, rank=0))


class TakesRanksForStages(Copier):
    """As if all stages had the layers of the first one's shard side by side."""

    def __init__(self, memory, cache):
        first = cache.rank * len(cache.layout.stages or [()]) // cache.layout.ranks
        super().__init__(memory, attrs.evolve(cache, rank=min(cache.rank, first)))


class TakesAllReplicasForTheFirst(Copier):
    """As if who stores nothing had the bytes of rank 0."""

    def __init__(self, memory, cache):
        super().__init__(memory, attrs.evolve(cache, rank=cache.rank if cache.layout.stores(cache.rank) else 0))


class CopiesOneByteTooMany(Copier):
    def load(self, job, slots, pages, after=None):
        super().load(job, slots, pages, after)
        run = self.kv_cache.layers[0]
        ctypes.memset(run.base + run.nbytes + run.stride * (self.kv_cache.blocks - 1), 0, 1)


class Transposes(Copier):
    """Consistent with itself, and with nobody else."""

    def pairs(self, pages, slots):
        return super().pairs([[blocks[::-1] for blocks in chunk] for chunk in pages], slots)


class Packing(HostMover):
    """Correct, for shards that are packed."""

    def __init__(self, memory, cache):
        super().__init__(cache, memory.bytes, memory.slot_nbytes)


class SaysThatAllPacks(Packing):
    def finished(self):
        return [interfaces.JobResult(job, ok=True) for job, *_ in super().finished()]


class FailsAll(Packing):
    def finished(self):
        return [result._replace(filled=()) for result in super().finished()]


class LoadsNothing(Copier):
    def load(self, job, slots, pages, after=None):
        self.done.append(interfaces.JobResult(job, ok=True))


class SumsThePages(Copier):
    """And forgets the holes between them."""

    def store(self, job, pages, slots):
        super().store(job, pages, slots)
        chunks = zip(pages, slots, strict=True)
        parts = [b"".join(bytes(page) for page, _ in self.pairs([chunk], [slot])) for chunk, slot in chunks]
        self.done[-1] = self.done[-1]._replace(checksums=[zlib.crc32(part) for part in parts])


class ReportsTwice(Copier):
    def finished(self):
        return super().finished() * 2


class Lazy(Copier):
    """Begins when it is asked whether it has ended; `wait` is not that."""

    def __init__(self, memory, cache):
        super().__init__(memory, cache)
        self.todo = []

    def store(self, job, pages, slots):
        self.todo.append((job, pages, slots))

    def finished(self):
        while self.todo:
            super().store(*self.todo.pop())
        return super().finished()


class MoverClosesOnce(Copier):
    def close(self):
        del self.kv_cache


class LeavesAThread(Copier):
    def __init__(self, memory, cache):
        super().__init__(memory, cache)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class ReachesAnyDevice(Copier):
    def __init__(self, memory, cache):
        super().__init__(memory, attrs.evolve(cache, device="cpu"))


@attrs.frozen
class PlantedArena(interfaces.ArenaConfig):
    type: ClassVar[str] = "planted"
    memory: type = Memory
    mover: type = Copier

    def open(self, ctx):
        return self.memory(ctx)

    def attach(self, handle, cache):
        if handle not in _MEMORY:
            raise BackendError(f"{handle} is not open")
        return self.mover(_MEMORY[handle], cache)


@attrs.frozen
class SaysThatItPacks(PlantedArena):
    packs: ClassVar[tuple[str, ...]] = ("cpu",)


@attrs.frozen
class LeaksOtherErrors(PlantedArena):
    def attach(self, handle, cache):
        if handle not in _MEMORY:
            raise FileNotFoundError(handle)
        return super().attach(handle, cache)


class TestReference(ArenaLaws):
    planted = PlantedArena()

    def config(self, folder):
        return self.planted


GIVES_BACK = "test_close_gives_everything_back"
BUGS = [
    (PlantedArena(memory=TakesTooMuch), "test_slots_are_as_promised"),
    (PlantedArena(memory=SlotsOfTheLayout), "test_slots_are_as_promised"),
    (PlantedArena(memory=AlwaysHasASlot), "test_no_room_for_one_slot_is_an_error"),
    (PlantedArena(memory=SaysNotWhere), "test_no_room_for_one_slot_is_an_error"),
    (PlantedArena(memory=CutsTheNumberOfASlot), "test_many_slots_are_apart"),
    (PlantedArena(memory=SharesAnotherFile), "test_what_is_shared_is_the_slots"),
    (PlantedArena(memory=HasOneMemoryForAll), "test_two_arenas_share_nothing"),
    (PlantedArena(memory=WipesTheOther), "test_two_arenas_share_nothing"),
    (PlantedArena(memory=IsFullOfHoles), "test_memory_is_there_when_open_returns"),
    (PlantedArena(memory=LeavesItsFile), GIVES_BACK),
    (PlantedArena(memory=LeavesADescriptor), GIVES_BACK),
    (PlantedArena(memory=LeavesItsMemory), GIVES_BACK),
    (PlantedArena(mover=LeavesAThread), GIVES_BACK),
    (LeaksOtherErrors(), "test_attach_raises_backend_error_when_it_cannot"),
    (PlantedArena(mover=ReachesAnyDevice), "test_attach_raises_backend_error_when_it_cannot"),
    (PlantedArena(memory=SlotsOverlap), "test_views_are_writable_aligned_and_apart"),
    (PlantedArena(memory=Unaligned), "test_views_are_writable_aligned_and_apart"),
    (PlantedArena(memory=HandsOutAnObject), "test_handle_is_plain_text"),
    (PlantedArena(memory=CountsInFacts), "test_facts_are_plain_words"),
    (PlantedArena(memory=ClosesOnce), "test_close_twice"),
    (PlantedArena(mover=SkipsHoles), "test_store_gathers_exact_bytes"),
    (PlantedArena(mover=SumsThePages), "test_sums_are_of_what_was_stored"),
    (PlantedArena(mover=ForgetsTheStride), "test_store_gathers_exact_bytes"),
    (PlantedArena(mover=Transposes), "test_store_gathers_exact_bytes"),
    (PlantedArena(mover=SkipsHoles), "test_load_scatters_exact_bytes"),
    (PlantedArena(mover=CopiesOneByteTooMany), "test_load_scatters_exact_bytes"),
    (PlantedArena(mover=LoadsNothing), "test_what_is_stored_is_loaded"),
    (PlantedArena(mover=TakesEveryGroupForTheFirst), "test_each_group_has_its_own_blocks"),
    (PlantedArena(mover=TakesEveryPartForTheFirst), "test_each_part_has_its_own_groups"),
    (PlantedArena(mover=ForgetsTheRank), "test_ranks_do_not_meet"),
    (PlantedArena(mover=TakesRanksForStages), "test_stages_have_layers_of_their_own"),
    (PlantedArena(mover=TakesAllReplicasForTheFirst), "test_ranks_with_the_same_bytes_share_a_shard"),
    (SaysThatItPacks(), "test_packed_shards_hold_their_pages"),
    (SaysThatItPacks(mover=SaysThatAllPacks), "test_pages_that_do_not_pack_leave_their_slot_unfilled"),
    (SaysThatItPacks(mover=FailsAll), "test_pages_that_do_not_pack_leave_their_slot_unfilled"),
    (PlantedArena(mover=ReportsTwice), "test_every_job_is_reported_once"),
    (PlantedArena(mover=Lazy), "test_wait_frees_the_pages"),
    (PlantedArena(mover=MoverClosesOnce), "test_mover_closes_twice"),
]


_SEEDED = ("test_store_gathers_exact_bytes", "test_sums_are_of_what_was_stored", "test_load_scatters_exact_bytes")


@pytest.mark.parametrize(("planted", "law"), BUGS)
def test_a_planted_bug_breaks_its_law(tmp_path, monkeypatch, planted, law):
    monkeypatch.setattr(resources, "PATIENCE", 0.2)
    monkeypatch.setattr(TestReference, "planted", planted)
    seed = {"seed": 0} if law in _SEEDED else {}
    with pytest.raises((AssertionError, AttributeError, KeyError, IndexError, pytest.fail.Exception)):
        getattr(TestReference(), law)(tmp_path, **seed)


@pytest.mark.parametrize(
    ("memory", "law"),
    [
        (SaysWhatToChange, "test_no_room_for_one_slot_is_an_error"),
        (HasAllItsBlocks, "test_memory_is_there_when_open_returns"),
        (HasAllItsBlocks, GIVES_BACK),
    ],
)
def test_permitted_behaviour_breaks_no_law(tmp_path, monkeypatch, memory, law):
    monkeypatch.setattr(TestReference, "planted", PlantedArena(memory=memory))
    getattr(TestReference(), law)(tmp_path)
