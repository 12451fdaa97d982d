"""The laws of a backend's calls: bytes come back as they went in, under the key that they were written under."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey
from kvtier_testing.laws.backend_frames import damage_of, listed, read, release_view
from kvtier_testing.laws.base import StoreLaws
from kvtier_testing.samples import Poisoned, make_context, make_frame, make_key, make_keys, make_namespace, same

HOSTILE_KEYS = [
    ChunkKey(key)
    for key in (
        bytes(KEY_NBYTES),
        b"\xff" * KEY_NBYTES,
        b"/.." * 10 + b"//",
        b"../" * 10 + b"\0\0",
        b"\n" * KEY_NBYTES,
        b"key with spaces, * ? [ ] { } : ".ljust(KEY_NBYTES, b"%"),
        b"KEY".ljust(KEY_NBYTES, b"a"),
        b"key".ljust(KEY_NBYTES, b"a"),
        b"key".ljust(KEY_NBYTES, b"A"),
    )
]


class BackendCallLaws(StoreLaws[BackendConfig]):
    """The laws of `BackendLaws` that are about one call after the other."""

    contract = "kvtier_core.interfaces.store_tier"
    persistent: ClassVar[bool] = False  #: are the frames still there after close and open?
    scan_tick: ClassVar[float] = 0.02  #: seconds between two writes whose order `scan` can tell

    def spoil(self, folder: Path, key: ChunkKey) -> bool:
        """Make the frame of one key unreadable, as its medium might; False if that cannot be done."""
        return False

    @contextlib.contextmanager
    def stalled(self, folder: Path, key: ChunkKey) -> Iterator[bool]:
        """A read of this key does not return before the context ends; yields False if that cannot be done."""
        yield False

    def opened(self, folder: Path, ctx: OpenContext | None = None) -> contextlib.closing[Backend]:
        """The backend under test, closed afterwards."""
        return contextlib.closing(self.config(folder).open(ctx or self.context()))

    def frame(self, key: ChunkKey, seed: int = 0) -> memoryview:
        """A whole frame of this suite's layout."""
        return make_frame(key, nbytes=self.layout.frame_nbytes, seed=seed)

    def context(self, model: str = "tiny", capacity: int = 1 << 30, codec: str = "") -> OpenContext:
        """The context from the stack: this suite's layout, and the namespace of a model and a codec."""
        namespace = make_namespace(model).narrowed("codec", codec) if codec else make_namespace(model)
        return make_context(layout=self.layout, namespace=namespace, capacity=capacity)

    # -- bytes -------------------------------------------------------------------------------------

    def test_bytes_read_are_bytes_written(self, tmp_path: Path) -> None:
        """A frame comes back as the bytes that were written, whatever its length and wherever its views begin.

        Otherwise every such frame would fail verification: the tier would fill and never serve a hit.
        """
        sizes = [FRAME_ALIGNMENT, 2 * FRAME_ALIGNMENT, 7 * FRAME_ALIGNMENT, self.layout.frame_nbytes]
        with self.opened(tmp_path) as backend:
            for offset in (0, 1, 4096 - 333):
                keys = make_keys(len(sizes))
                frames = [Poisoned(nbytes, offset).view for nbytes in sizes]
                for i, key in enumerate(keys):
                    frames[i][:] = make_frame(key, nbytes=sizes[i], seed=offset + i)
                backend.write(keys, frames)
                into = [Poisoned(nbytes, 4096 - offset) for nbytes in sizes]
                counts = list(backend.read(keys, [room.view for room in into]))
                assert counts == sizes, f"frames of {sizes} bytes were written; read() returned {counts}"
                for i, room in enumerate(into):
                    assert same(room.view, frames[i]), f"a frame of {sizes[i]} bytes came back as other bytes"
                    assert room.untouched_beyond(sizes[i]), f"a read of {sizes[i]} bytes wrote outside its view"

    def test_only_the_given_view_is_touched(self, tmp_path: Path) -> None:
        """A read writes to the returned length of its view alone: not beside it, not behind it, nowhere for a miss.

        Otherwise the KV of another chunk, verified already, would be overwritten: slots lie side by side in an arena.
        """
        there, absent = make_keys(2)
        with self.opened(tmp_path) as backend:
            backend.write([there], [make_frame(there, nbytes=2 * FRAME_ALIGNMENT)])
            for offset in (333, 4096):
                into = [Poisoned(self.layout.frame_nbytes, offset) for _ in range(2)]
                counts = list(backend.read([absent, there], [room.view for room in into]))
                expected = [0, 2 * FRAME_ALIGNMENT]
                assert counts == expected, f"a miss and a hit are {expected}; read() returned {counts}"
                assert into[0].untouched_beyond(0), "a read that is a miss wrote into its view, or beside it"
                assert into[1].untouched_beyond(expected[1]), "a read wrote beyond the length that it returned"

    def test_misses_stay_in_place(self, tmp_path: Path) -> None:
        """Answers come in the order of the keys, one for each.

        Otherwise the engine would read frames of other keys than it asked for, and delete each of them as damaged.
        """
        keys = make_keys(16)
        present = [random.Random(key).random() < 0.5 for key in keys]
        written = [key for key, there in zip(keys, present, strict=True) if there]
        with self.opened(tmp_path) as backend:
            backend.write(written, [self.frame(key, seed=i) for i, key in enumerate(written)])
            into = [Poisoned(self.layout.frame_nbytes) for _ in keys]
            counts = list(backend.read(keys, [room.view for room in into]))
            expected = [self.layout.frame_nbytes if there else 0 for there in present]
            assert counts == expected, f"read() returns for each key its bytes or 0, {expected}; it returned {counts}"
            found = list(backend.contains(keys))
            assert found == present, f"contains() returns an answer for each key, {present}; it returned {found}"
            for key, room, count in zip(keys, into, expected, strict=True):
                assert room.untouched_beyond(count), "a read wrote beyond the length that it returned"
                damage = damage_of(room.view, key, make_namespace()) if count else ""
                assert not damage, f"among hits and misses a view holds {damage}"

    def test_a_view_too_small_is_a_miss(self, tmp_path: Path) -> None:
        """A frame that is longer than its view is a miss, and nothing is written outside the view.

        Otherwise frames of another layout would overwrite the next slot: the KV of another chunk.
        """
        key = make_key(0)
        with self.opened(tmp_path) as backend:
            backend.write([key], [make_frame(key, nbytes=3 * FRAME_ALIGNMENT)])
            small = Poisoned(2 * FRAME_ALIGNMENT)
            counts = list(backend.read([key], [small.view]))
            assert counts == [0], f"a frame longer than its view is a miss, [0]; read() returned {counts}"
            assert small.untouched_beyond(2 * FRAME_ALIGNMENT), "a frame longer than its view was read beyond the view"

    def test_no_view_is_kept(self, tmp_path: Path) -> None:
        """A backend uses a view only until its call returns: then the arena reuses the slot.

        Otherwise the store would take in the KV of another chunk, or overwrite it in its slot.
        """
        key = make_key(0)
        expected = bytes(self.frame(key))
        with self.opened(tmp_path) as backend:
            source = bytearray(expected)
            view = memoryview(source)
            backend.write([key], [view])
            view[:] = bytes(len(view))
            release_view(view, source)
            target = bytearray(len(expected))
            view = memoryview(target)
            counts = list(backend.read([key], [view]))
            assert counts == [len(expected)], f"{len(expected)} bytes were written; read() returned {counts}"
            assert same(target, expected), "what the caller did to its buffer after the write reached the store"
            release_view(view, target)

    def test_an_overwrite_gives_the_new_bytes(self, tmp_path: Path) -> None:
        """A write replaces the frame that its key has, by a shorter or a longer one.

        Otherwise a damaged frame could never be replaced by a good one.
        """
        key = make_key(0)
        with self.opened(tmp_path) as backend:
            for seed, pages in enumerate((3, 5, 2, 5)):
                newest = make_frame(key, nbytes=pages * FRAME_ALIGNMENT, seed=seed)
                backend.write([key], [newest])
                found = read(backend, key, self.layout.frame_nbytes)
                assert same(found, newest), f"write {seed + 1} of one key left {len(found)} bytes that are not its own"

    # -- keys --------------------------------------------------------------------------------------

    def test_keys_are_any_32_bytes(self, tmp_path: Path) -> None:
        """Keys are opaque: zeros, slashes, newlines, upper and lower case all make different keys.

        Otherwise two prompts would overwrite each other's frame, or a key would name a file outside the store.
        """
        keys = list(HOSTILE_KEYS)
        frames = [make_frame(key, nbytes=2 * FRAME_ALIGNMENT, seed=i) for i, key in enumerate(keys)]
        with self.opened(tmp_path) as backend:
            early = [key for key, there in zip(keys, backend.contains(keys), strict=True) if there]
            assert not early, f"contains() finds keys that were never written: {early}"
            backend.write(keys, frames)
            lost = [key for key, there in zip(keys, backend.contains(keys), strict=True) if not there]
            assert not lost, f"contains() does not find keys that were written: {lost}"
            for key, written in zip(keys, frames, strict=True):
                found = read(backend, key, self.layout.frame_nbytes)
                assert same(found, written), f"the frame of key {key!r} came back as another one"

    def test_deleted_is_gone(self, tmp_path: Path) -> None:
        """A deleted or erased key is not found, the others are; and to delete a key that is absent is no error.

        Otherwise the tier would count room as free that is in use, and the store would outgrow its capacity.
        """
        kept, deleted, never = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write([kept], [self.frame(kept)])
            for call in ["delete"] if backend.shared else ["delete", "erase"]:
                backend.write([deleted], [self.frame(deleted)])
                getattr(backend, call)([never, deleted])
                getattr(backend, call)([deleted])
                self._must_be_gone(backend, deleted, kept, never, f"{call}()")

    def test_what_is_quarantined_is_gone(self, tmp_path: Path) -> None:
        """After `quarantine` a key is not found, and a new frame can be written under it.

        Otherwise a damaged frame would be read, verified and thrown away by every request that names it.
        """
        kept, damaged, never = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write([kept, damaged], [self.frame(kept), self.frame(damaged)])
            backend.quarantine([never, damaged])
            backend.quarantine([damaged])
            if not backend.shared:  # there it is not deleted: another engine may have replaced it, or may read it well
                self._must_be_gone(backend, damaged, kept, never, "quarantine()")
                assert damaged not in dict(listed(backend)), "scan() names a key after quarantine()"
            backend.write([damaged], [self.frame(damaged)])
            for key, what in ((damaged, "written again after quarantine()"), (kept, "beside a quarantined one")):
                found = read(backend, key, self.layout.frame_nbytes)
                assert same(found, self.frame(key)), f"a frame {what} is lost or another one"

    def test_a_frame_that_cannot_be_read_fails_alone(self, tmp_path: Path) -> None:
        """A frame that cannot be read fails alone in its batch, and the next write replaces it.

        Otherwise one bad sector would make the whole tier count as broken, and not be called for a while.
        """
        keys = first, spoiled, last = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write(keys, [self.frame(key) for key in keys])
            if not self.spoil(tmp_path, spoiled):
                pytest.skip("this suite cannot make a frame unreadable")
            into = [Poisoned(self.layout.frame_nbytes) for _ in keys]
            counts = backend.read(keys, [room.view for room in into])
            nbytes = self.layout.frame_nbytes
            assert [counts[0], counts[2]] == [nbytes] * 2, (
                f"beside a frame that cannot be read two others of {nbytes} bytes are served; read() returned {counts}"
            )
            assert same([into[0].view, into[2].view], [self.frame(first), self.frame(last)]), (
                "beside a frame that cannot be read another one came back as other bytes"
            )
            whole = isinstance(counts[1], int) and counts[1] and into[1].view[: counts[1]]
            assert not whole or damage_of(whole, spoiled, make_namespace()), "a spoiled frame is served as a whole one"
            backend.quarantine([spoiled])
            there = list(backend.contains(keys))
            assert backend.shared or there == [True, False, True], (
                f"of three keys the second is quarantined; contains() returned {there}"
            )
            backend.write([spoiled], [self.frame(spoiled)])
            found = read(backend, spoiled, self.layout.frame_nbytes)
            assert same(found, self.frame(spoiled)), "a key whose frame could not be read cannot be written again"

    def test_an_empty_batch_is_nothing(self, tmp_path: Path) -> None:
        """Without keys a call does nothing and answers nothing.

        Otherwise a tier with an empty batch would count an error of the store, and rest after a few of them.
        """
        with self.opened(tmp_path) as backend:
            backend.write([], [])
            backend.delete([])
            answers = [list(backend.contains([])), list(backend.read([], []))]
            assert answers == [[], []], f"for no keys contains() and read() return no answers; they returned {answers}"

    def test_two_namespaces_never_meet(self, tmp_path: Path) -> None:
        """A frame of one namespace is neither found nor changed from another.

        Otherwise an engine would find frames of another model under its own keys and delete them as damaged, and the
        other engine would find its cache empty.
        """
        key, nbytes = make_key(0), self.layout.frame_nbytes
        ours, theirs = self.frame(key, seed=1), self.frame(key, seed=2)
        # One after another: a store may belong to one process at a time.
        with self.opened(tmp_path, self.context("ours")) as backend:
            backend.write([key], [ours])
        with self.opened(tmp_path, self.context("theirs")) as backend:
            seen = (list(backend.contains([key])), read(backend, key, nbytes), list(listed(backend)))
            assert seen == ([False], b"", []), "a key that another namespace wrote is found"
            backend.delete([key])
            backend.write([key], [theirs])
        with self.opened(tmp_path, self.context("ours")) as backend:
            found = read(backend, key, nbytes)
            assert not same(found, theirs), "a frame of another namespace is served"
            allowed = [ours] if self.persistent else [ours, b""]
            assert any(same(found, frame) for frame in allowed), (
                "another namespace deleted or changed a frame of ours under the same key"
            )

    def _must_be_gone(self, backend: Backend, gone: ChunkKey, kept: ChunkKey, never: ChunkKey, call: str) -> None:
        there = list(backend.contains([kept, gone, never]))
        assert there == [True, False, False], (
            f"of a kept key, one after {call} and one never written contains() says [True, False, False]; "
            f"it returned {there}"
        )
        found = len(read(backend, gone, self.layout.frame_nbytes))
        assert not found, f"after {call} a read of the key is a miss; it returned {found} bytes"
