"""The laws of an arena's memory: its slots, and what is left of it when it is closed."""

from __future__ import annotations

import contextlib
import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, SupportsSharing
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing import resources
from kvtier_testing.laws.attached import BLOCKS, AttachedEngine, settle
from kvtier_testing.laws.base import StoreLaws
from kvtier_testing.samples import PagedBuffer, address_of, is_poison, make_context, make_layout, poison, same

_SLOTS = 6
_MANY_SLOTS = 300


class ArenaMemoryLaws(StoreLaws[ArenaConfig]):
    """The laws of `ArenaLaws` that are about slots."""

    contract = "kvtier_core.interfaces.arena"

    def paged_buffer(self, layout: ChunkLayout, blocks: int, rng: random.Random, rank: int = 0) -> PagedBuffer:
        """An engine's paged buffer that the mover can reach."""
        return PagedBuffer(layout, blocks, rng, rank)

    def opened(
        self, folder: Path, layout: ChunkLayout | None = None, slots: int = _SLOTS
    ) -> contextlib.closing[AllocatorBackend]:
        """The arena under test with room for so many slots, closed afterwards."""
        layout = layout or self.layout
        ctx = make_context(layout=layout, capacity=slots * layout.frame_nbytes)
        return contextlib.closing(self.config(folder).open(ctx))

    @contextlib.contextmanager
    def engine(
        self, folder: Path, seed: int, layout: ChunkLayout | None = None, part: int = 0
    ) -> Iterator[AttachedEngine]:
        """An arena, a worker attached to it, and pages full of random bytes."""
        layout = layout or self.layout
        rng = random.Random(seed)
        with self.opened(folder, layout) as memory:
            pages = self.paged_buffer(layout, BLOCKS, rng)
            pages.fill(rng)
            with contextlib.closing(self.config(folder).attach(memory.handle, pages.kv_cache())) as mover:
                yield AttachedEngine(memory, mover, pages, layout.parts[part], rng)

    # -- slots -------------------------------------------------------------------------------------

    def test_slots_are_as_promised(self, tmp_path: Path) -> None:
        """There are as many slots as fit into the capacity, each as long as the context says.

        Otherwise kvtier would refuse the arena and the engine serve without it, or part of the memory would never be
        used.
        """
        usual = self.layout.frame_nbytes
        capacity = _SLOTS * usual + usual // 2
        for slot_nbytes in (usual, usual - FRAME_ALIGNMENT):
            ctx = attrs.evolve(make_context(layout=self.layout, capacity=capacity), slot_nbytes=slot_nbytes)
            with contextlib.closing(self.config(tmp_path).open(ctx)) as memory:
                assert memory.slots >= 1, f"capacity has room for {_SLOTS} slots; slots is {memory.slots}"
                assert memory.slot_nbytes == slot_nbytes, (
                    f"a slot has room for one frame, {slot_nbytes} bytes; slot_nbytes is {memory.slot_nbytes}"
                )
                taken = memory.slots * memory.slot_nbytes
                assert taken <= capacity, f"all slots fit into the capacity of {capacity} bytes; they take {taken}"

    def test_no_room_for_one_slot_is_an_error(self, tmp_path: Path) -> None:
        """A capacity below one slot is a BackendError, or a ConfigError whose paths begin at ``$``, the tier.

        Otherwise the user would see the plugin's traceback, not the setting that is too small.
        """
        ctx = make_context(layout=self.layout, capacity=self.layout.frame_nbytes - 1)
        try:
            self.config(tmp_path).open(ctx).close()
        except BackendError:
            return
        except ConfigError as error:
            paths = [problem.path for problem in error.problems]
            assert all(path == "$" or path.startswith(("$.", "$[")) for path in paths), (
                f"the path of a problem begins at $, the tier; the ConfigError that open() raised has {paths}"
            )
            return
        raise AssertionError("open() with less capacity than one slot takes raises BackendError or ConfigError")

    def test_views_are_writable_aligned_and_apart(self, tmp_path: Path) -> None:
        """The view of a slot is writable, aligned to FRAME_ALIGNMENT, and shares no byte with another one.

        Otherwise two chunks would overwrite each other: KV of one request in the answer to another. And a store that
        moves bytes directly would fail at a slot that is not aligned.
        """
        with self.opened(tmp_path) as memory:
            for slot in range(memory.slots):
                view = memory.view(slot)
                assert not view.readonly, f"view({slot}) is read-only"
                assert len(view) == memory.slot_nbytes, f"view({slot}) has {len(view)} of {memory.slot_nbytes} bytes"
                assert address_of(view) % FRAME_ALIGNMENT == 0, (
                    f"view({slot}) begins at {address_of(view):#x}, not a multiple of {FRAME_ALIGNMENT}"
                )
                view[:] = bytes([slot]) * len(view)
            for slot in range(memory.slots):
                assert same(memory.view(slot), bytes([slot]) * memory.slot_nbytes), (
                    f"slot {slot} has not the bytes that were written to it: two slots share memory"
                )

    def test_many_slots_are_apart(self, tmp_path: Path) -> None:
        """There may be more slots than a byte counts: a slot number that is cut names another slot's memory.

        Otherwise two chunks of a large arena would lie in one place, and each be served for the other.
        """
        layout = make_layout(page_nbytes=(64,), blocks=1)
        with self.opened(tmp_path, layout, _MANY_SLOTS) as memory:
            for slot in range(memory.slots):
                memory.view(slot)[-4:] = memory.view(slot)[:4] = slot.to_bytes(4)
            for slot in range(memory.slots):
                found = [int.from_bytes(memory.view(slot)[:4]), int.from_bytes(memory.view(slot)[-4:])]
                assert found == [slot, slot], f"slot {slot} of {memory.slots} shares memory with slots {found}"

    def test_what_is_shared_is_the_slots(self, tmp_path: Path) -> None:
        """The file of an arena with SupportsSharing holds all slots side by side, from its first byte on.

        Otherwise an engine of `kvtier serve` would copy to memory that is not the server's, or to another slot.
        """
        with self.opened(tmp_path) as memory:
            if not isinstance(memory, SupportsSharing):
                pytest.skip("the memory cannot be shared")
            with mmap.mmap(memory.descriptor, memory.slots * memory.slot_nbytes) as mapped:
                for slot in range(memory.slots):
                    memory.view(slot)[:] = bytes([slot + 1]) * memory.slot_nbytes
                    found = mapped[slot * memory.slot_nbytes : (slot + 1) * memory.slot_nbytes]
                    assert same(found, memory.view(slot)), f"slot {slot} is not where it should be in the file"

    def test_two_arenas_share_nothing(self, tmp_path: Path) -> None:
        """Two engines of a node with one configuration do not see each other's slots, nor each other's end.

        Otherwise one engine would serve the KV of the other, perhaps of another model, or lose its memory when that one
        ends.
        """
        with self.opened(tmp_path) as ours, self.opened(tmp_path) as theirs:
            assert ours.handle != theirs.handle, f"two arenas have one handle: {ours.handle}"
            poison(ours.view(0))
            view = theirs.view(0)
            view[:] = bytes(len(view))
            del view
            assert is_poison(ours.view(0)), "what was written to an arena appears in another one"
            theirs.close()
            assert is_poison(ours.view(0)), "an arena changed when another one was closed"

    def test_memory_is_there_when_open_returns(self, tmp_path: Path) -> None:
        """`open` takes all memory: in a file with holes, the first touch of a page may end the process by SIGBUS.

        Otherwise the engine would be killed while it serves, long after it started well.
        """
        if not resources.READABLE:
            pytest.skip("where memory lies is read from /proc, which is not there")
        with self.opened(tmp_path) as memory:
            sparse = [slot for slot in range(memory.slots) if resources.may_fail_when_touched(memory.view(slot))]
            assert not sparse, (
                f"the memory of slots {sparse} is in a file that has no blocks for it yet, so a later write may fail; "
                "open() must have all memory, or raise"
            )

    def test_handle_is_plain_text(self, tmp_path: Path) -> None:
        """The handle is text that goes through JSON unchanged.

        Otherwise the engine's workers could not be told where the arena is, and nothing would be served.
        """
        with self.opened(tmp_path) as memory:
            assert isinstance(memory.handle, str), f"handle is text; it is of type {type(memory.handle).__name__}"
            assert memory.handle.isprintable(), f"handle is plain text; it is {memory.handle!r}"

    def _live(self, folder: Path) -> set[str]:
        """Open, attach, store, load and close. Returns the files that were written meanwhile and not before."""
        before = resources.written_files()
        with self.engine(folder, seed=0) as engine:
            slots, pages = engine.choose(holes=False)
            engine.mover.store(1, pages, slots)
            engine.mover.load(2, slots, pages)
            settle(engine.mover, [1, 2])
            return resources.written_files() - before
