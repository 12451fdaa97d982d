"""The laws of an arena can fail, each where a bug is planted."""

from __future__ import annotations

import ctypes
import mmap
import zlib
from typing import ClassVar

import attrs
import pytest

from kvtier_core import interfaces
from kvtier_core.errors import BackendError
from kvtier_core.testing import ArenaLaws, laws_of
from kvtier_core.types import FRAME_ALIGNMENT

_MEMORY = {}


class Memory(interfaces.AllocatorBackend):
    """Correct, and its handle a name in a dict of this process."""

    handle = ""

    def __init__(self, ctx):
        self.slot_nbytes = ctx.layout.frame_nbytes
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


class Copier(interfaces.Mover):
    """Correct, and done before it returns."""

    def __init__(self, memory, table):
        self.memory, self.table = memory, table
        self.done = []

    def pairs(self, pages, slots):
        """Of each wanted page: its memory in the engine, and in the slot."""
        for blocks, slot in zip(pages, slots, strict=True):
            at = self.table.layout.shard_offset(self.table.rank)
            for run in self.table.layers:
                for block in blocks:
                    if block != interfaces.NO_BLOCK:
                        page = (ctypes.c_char * run.nbytes).from_address(run.base + block * run.stride)
                        yield memoryview(page).cast("B"), self.memory.view(slot)[at : at + run.nbytes]
                    at += run.nbytes

    def store(self, job, pages, slots):
        for page, place in self.pairs(pages, slots):
            place[:] = page
        self.done.append(interfaces.JobResult(job, ok=True))

    def load(self, job, slots, pages):
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


class SkipsHoles(Copier):
    """Packs what is wanted, as if a hole had no place."""

    def pairs(self, pages, slots):
        for blocks, slot in zip(pages, slots, strict=True):
            wanted = [block for block in blocks if block != interfaces.NO_BLOCK]
            yield from super().pairs([wanted], [slot])


class ForgetsTheStride(Copier):
    def __init__(self, memory, table):
        dense = tuple(attrs.evolve(run, stride=run.nbytes) for run in table.layers)
        super().__init__(memory, attrs.evolve(table, layers=dense))


class ForgetsTheRank(Copier):
    def __init__(self, memory, table):
        super().__init__(memory, attrs.evolve(table, rank=0))


class CopiesOneByteTooMany(Copier):
    def load(self, job, slots, pages):
        super().load(job, slots, pages)
        run = self.table.layers[0]
        ctypes.memset(run.base + run.nbytes + run.stride * (self.table.blocks - 1), 0, 1)


class Transposes(Copier):
    """Consistent with itself, and with nobody else."""

    def pairs(self, pages, slots):
        return super().pairs([list(reversed(blocks)) for blocks in pages], slots)


class LoadsNothing(Copier):
    def load(self, job, slots, pages):
        self.done.append(interfaces.JobResult(job, ok=True))


class SumsThePages(Copier):
    """And forgets the holes between them."""

    def store(self, job, pages, slots):
        super().store(job, pages, slots)
        chunks = zip(pages, slots, strict=True)
        parts = [b"".join(bytes(page) for page, _ in self.pairs([row], [slot])) for row, slot in chunks]
        self.done[-1] = self.done[-1]._replace(checksums=[zlib.crc32(part) for part in parts])


class ReportsTwice(Copier):
    def finished(self):
        return super().finished() * 2


class Lazy(Copier):
    """Begins when it is asked whether it has ended; `wait` is not that."""

    def __init__(self, memory, table):
        super().__init__(memory, table)
        self.todo = []

    def store(self, job, pages, slots):
        self.todo.append((job, pages, slots))

    def finished(self):
        while self.todo:
            super().store(*self.todo.pop())
        return super().finished()


class MoverClosesOnce(Copier):
    def close(self):
        del self.table


@attrs.frozen
class PlantedArena(interfaces.ArenaConfig):
    type: ClassVar[str] = "planted"
    memory: type = Memory
    mover: type = Copier

    def open(self, ctx):
        return self.memory(ctx)

    def attach(self, handle, table):
        return self.mover(_MEMORY[handle], table)


class TestReference(ArenaLaws):
    planted = PlantedArena()

    def config(self, folder):
        return self.planted


BUGS = [
    (PlantedArena(memory=TakesTooMuch), "test_slots_are_as_promised"),
    (PlantedArena(memory=AlwaysHasASlot), "test_no_room_for_one_slot_is_an_error"),
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
    (PlantedArena(mover=ForgetsTheRank), "test_ranks_do_not_meet"),
    (PlantedArena(mover=ReportsTwice), "test_every_job_is_reported_once"),
    (PlantedArena(mover=Lazy), "test_wait_frees_the_pages"),
    (PlantedArena(mover=MoverClosesOnce), "test_mover_closes_twice"),
]


_SEEDED = ("test_store_gathers_exact_bytes", "test_sums_are_of_what_was_stored", "test_load_scatters_exact_bytes")


@pytest.mark.parametrize(("planted", "law"), BUGS)
def test_a_planted_bug_breaks_its_law(tmp_path, monkeypatch, planted, law):
    monkeypatch.setattr(TestReference, "planted", planted)
    seed = {"seed": 0} if law in _SEEDED else {}
    with pytest.raises((AssertionError, AttributeError, KeyError, IndexError, pytest.fail.Exception)):
        getattr(TestReference(), law)(tmp_path, **seed)


def test_every_law_has_a_planted_bug():
    assert {law for _, law in BUGS} | {"test_import_is_light"} == set(laws_of(ArenaLaws))
