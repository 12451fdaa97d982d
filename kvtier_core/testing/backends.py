"""The laws of a backend. Subclass `BackendLaws`, name a config, and pytest does the rest."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier_core.errors import BackendError
from kvtier_core.frames import format as frame
from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.testing.laws import Laws
from kvtier_core.testing.samples import Poisoned, make_context, make_frame, make_key, make_keys, make_namespace, same
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey

_HOSTILE_KEYS = [
    bytes(KEY_NBYTES),
    b"\xff" * KEY_NBYTES,
    b"/.." * 10 + b"//",
    b"../" * 10 + b"\0\0",
    b"\n" * KEY_NBYTES,
    b"key with spaces, * ? [ ] { } : ".ljust(KEY_NBYTES, b"%"),
    b"KEY".ljust(KEY_NBYTES, b"a"),
    b"key".ljust(KEY_NBYTES, b"a"),
    b"key".ljust(KEY_NBYTES, b"A"),
]
_KILLS = 6
_SOAK_SECONDS = 1.0


class BackendLaws(Laws):
    """Subclass, and implement `config`."""

    persistent: ClassVar[bool] = False  #: are the frames still there after close and open?
    scan_tick: ClassVar[float] = 0.02  #: seconds between two writes whose order `scan` can tell

    def config(self, folder: Path) -> BackendConfig:
        return super().config(folder)

    def spoil(self, folder: Path, key: ChunkKey) -> bool:
        """Make the frame of one key unreadable, as its medium might; False if that cannot be done."""
        return False

    @contextlib.contextmanager
    def opened(self, folder: Path, ctx: OpenContext | None = None) -> Iterator[Backend]:
        """The backend under test, closed afterwards."""
        backend = self.config(folder).open(ctx or self.context())
        try:
            yield backend
        finally:
            backend.close()

    def frame(self, key: ChunkKey, seed: int = 0) -> memoryview:
        """A whole frame of this suite's layout."""
        return make_frame(key, nbytes=self.layout.frame_nbytes, seed=seed)

    def context(self, model: str = "tiny") -> OpenContext:
        return make_context(layout=self.layout, namespace=make_namespace(model))

    # -- bytes -------------------------------------------------------------------------------------

    def test_bytes_read_are_bytes_written(self, tmp_path: Path):
        sizes = [FRAME_ALIGNMENT, 2 * FRAME_ALIGNMENT, 7 * FRAME_ALIGNMENT, self.layout.frame_nbytes]
        with self.opened(tmp_path) as backend:
            for offset in (0, 1, 4096 - 333):
                keys = make_keys(len(sizes))
                frames = [Poisoned(nbytes, offset).view for nbytes in sizes]
                for i, key in enumerate(keys):
                    frames[i][:] = make_frame(key, nbytes=sizes[i], seed=offset + i)
                backend.write(keys, frames)
                into = [Poisoned(nbytes, 4096 - offset) for nbytes in sizes]
                assert list(backend.read(keys, [room.view for room in into])) == sizes
                for i, room in enumerate(into):
                    assert same(room.view, frames[i]), f"a frame of {sizes[i]} bytes came back as other bytes"
                    assert room.untouched_beyond(sizes[i])

    def test_only_the_given_view_is_touched(self, tmp_path: Path):
        """Not the neighbours, not the view beyond the reported length, nothing at all for a miss."""
        there, absent = make_keys(2)
        with self.opened(tmp_path) as backend:
            backend.write([there], [make_frame(there, nbytes=2 * FRAME_ALIGNMENT)])
            for offset in (333, 4096):
                into = [Poisoned(self.layout.frame_nbytes, offset) for _ in range(2)]
                counts = backend.read([absent, there], [room.view for room in into])
                assert list(counts) == [0, 2 * FRAME_ALIGNMENT]
                assert [room.untouched_beyond(count) for room, count in zip(into, counts, strict=True)] == [True, True]

    def test_misses_stay_in_place(self, tmp_path: Path):
        keys = make_keys(16)
        present = [random.Random(key).random() < 0.5 for key in keys]
        written = [key for key, there in zip(keys, present, strict=True) if there]
        with self.opened(tmp_path) as backend:
            backend.write(written, [self.frame(key, seed=i) for i, key in enumerate(written)])
            into = [Poisoned(self.layout.frame_nbytes) for _ in keys]
            counts = backend.read(keys, [room.view for room in into])
            assert list(counts) == [self.layout.frame_nbytes if there else 0 for there in present]
            assert list(backend.contains(keys)) == present
            for key, room, count in zip(keys, into, counts, strict=True):
                assert room.untouched_beyond(count)
                assert not count or frame.check(room.view, make_namespace(), key) is None

    def test_a_view_too_small_is_a_miss(self, tmp_path: Path):
        key = make_key(0)
        with self.opened(tmp_path) as backend:
            backend.write([key], [make_frame(key, nbytes=3 * FRAME_ALIGNMENT)])
            small = Poisoned(2 * FRAME_ALIGNMENT)
            assert list(backend.read([key], [small.view])) == [0]
            assert small.untouched_beyond(2 * FRAME_ALIGNMENT)

    def test_no_view_is_kept(self, tmp_path: Path):
        """The arena reuses a slot as soon as the call has returned."""
        key = make_key(0)
        expected = bytes(self.frame(key))
        with self.opened(tmp_path) as backend:
            source = bytearray(expected)
            view = memoryview(source)
            backend.write([key], [view])
            view[:] = bytes(len(view))
            _let_go(view, source)
            target = bytearray(len(expected))
            view = memoryview(target)
            assert list(backend.read([key], [view])) == [len(expected)]
            assert same(target, expected), "what the caller did to its buffer after the write reached the store"
            _let_go(view, target)

    def test_an_overwrite_gives_the_new_bytes(self, tmp_path: Path):
        key = make_key(0)
        with self.opened(tmp_path) as backend:
            for seed, pages in enumerate((3, 5, 2, 5)):
                newest = make_frame(key, nbytes=pages * FRAME_ALIGNMENT, seed=seed)
                backend.write([key], [newest])
                assert same(_read(backend, key, self.layout.frame_nbytes), newest)

    # -- keys --------------------------------------------------------------------------------------

    def test_keys_are_any_32_bytes(self, tmp_path: Path):
        keys = [ChunkKey(key) for key in _HOSTILE_KEYS]
        frames = [make_frame(key, nbytes=2 * FRAME_ALIGNMENT, seed=i) for i, key in enumerate(keys)]
        with self.opened(tmp_path) as backend:
            assert not any(backend.contains(keys))
            backend.write(keys, frames)
            assert all(backend.contains(keys))
            for key, written in zip(keys, frames, strict=True):
                assert same(_read(backend, key, self.layout.frame_nbytes), written), key

    def test_deleted_is_gone(self, tmp_path: Path):
        kept, deleted, never = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write([kept, deleted], [self.frame(kept), self.frame(deleted)])
            backend.delete([never, deleted])
            backend.delete([deleted])
            assert list(backend.contains([kept, deleted, never])) == [True, False, False]
            assert same(_read(backend, deleted, self.layout.frame_nbytes), b"")

    def test_what_is_quarantined_is_gone(self, tmp_path: Path):
        kept, damaged, never = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write([kept, damaged], [self.frame(kept), self.frame(damaged)])
            backend.quarantine([never, damaged])
            backend.quarantine([damaged])
            assert list(backend.contains([kept, damaged, never])) == [True, False, False]
            assert same(_read(backend, damaged, self.layout.frame_nbytes), b"")
            assert damaged not in dict(backend.scan())
            backend.write([damaged], [self.frame(damaged)])
            assert same(_read(backend, damaged, self.layout.frame_nbytes), self.frame(damaged))
            assert same(_read(backend, kept, self.layout.frame_nbytes), self.frame(kept))

    def test_what_cannot_be_read_is_its_keys_alone(self, tmp_path: Path):
        """The others of its batch are served, and the next write puts it right."""
        keys = first, spoiled, last = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write(keys, [self.frame(key) for key in keys])
            if not self.spoil(tmp_path, spoiled):
                pytest.skip("this suite cannot make a frame unreadable")
            into = [Poisoned(self.layout.frame_nbytes) for _ in keys]
            counts = backend.read(keys, [room.view for room in into])
            assert [counts[0], counts[2]] == [self.layout.frame_nbytes] * 2
            assert same([into[0].view, into[2].view], [self.frame(first), self.frame(last)])
            whole = isinstance(counts[1], int) and into[1].view[: counts[1]]
            assert not whole or frame.check(whole, make_namespace(), spoiled) is not None
            backend.quarantine([spoiled])
            assert list(backend.contains(keys)) == [True, False, True]
            backend.write([spoiled], [self.frame(spoiled)])
            assert same(_read(backend, spoiled, self.layout.frame_nbytes), self.frame(spoiled))

    def test_an_empty_batch_is_nothing(self, tmp_path: Path):
        with self.opened(tmp_path) as backend:
            backend.write([], [])
            backend.delete([])
            assert list(backend.contains([])) == []
            assert list(backend.read([], [])) == []

    def test_two_namespaces_never_meet(self, tmp_path: Path):
        """One after the other, for a store may be one process's alone."""
        key = make_key(0)
        ours, theirs = self.frame(key, seed=1), self.frame(key, seed=2)
        with self.opened(tmp_path, self.context("ours")) as backend:
            backend.write([key], [ours])
        with self.opened(tmp_path, self.context("theirs")) as backend:
            assert list(backend.contains([key])) == [False]
            assert same(_read(backend, key, self.layout.frame_nbytes), b"")
            assert list(backend.scan()) == []
            backend.delete([key])
            backend.write([key], [theirs])
        with self.opened(tmp_path, self.context("ours")) as backend:
            assert _read(backend, key, self.layout.frame_nbytes) in ([ours] if self.persistent else [ours, b""])

    # -- lives -------------------------------------------------------------------------------------

    def test_scan_finds_what_survived(self, tmp_path: Path):
        if not self.persistent:
            pytest.skip("nothing survives by design")
        keys = make_keys(6)
        frames = [make_frame(key, nbytes=(i + 1) * FRAME_ALIGNMENT) for i, key in enumerate(keys)]
        with self.opened(tmp_path) as backend:
            for key, written in zip(reversed(keys), reversed(frames), strict=True):
                backend.write([key], [written])
                time.sleep(self.scan_tick)
            backend.delete([keys[2]])
        with self.opened(tmp_path) as backend:
            survivors = [5, 4, 3, 1, 0]
            assert [(bytes(key), nbytes) for key, nbytes in backend.scan()] == [
                (keys[i], len(frames[i])) for i in survivors
            ], "scan must name every survivor with the bytes of its frame, oldest first, and nothing else"
            assert all(_read(backend, keys[i], self.layout.frame_nbytes) == frames[i] for i in survivors)

    def test_a_killed_writer_leaves_no_torn_frame(self, tmp_path: Path):
        if not self.persistent:
            pytest.skip("nothing survives by design")
        rng = random.Random(0)
        for round_ in range(_KILLS):
            _write_and_die(self.config(tmp_path), self.context(), round_, rng.uniform(0, 0.05))
            with self.opened(tmp_path) as backend:
                survivors = dict(backend.scan())
                assert make_key(0) in survivors, "what was written long before the kill is lost"
                for key, nbytes in survivors.items():
                    whole = _read(backend, key, nbytes)
                    assert len(whole) == nbytes, "scan names a frame that cannot be read"
                    damage = frame.check(memoryview(whole), make_namespace(), key)
                    assert damage is None, f"a torn frame: {damage.value}"

    def test_only_backend_error_escapes(self, tmp_path: Path):
        """Whatever a closed backend does when it is used: a BackendError or an answer."""
        key = make_key(0)
        with self.opened(tmp_path) as backend:
            backend.write([key], [self.frame(key)])
        for use in (
            lambda: backend.contains([key]),
            lambda: backend.read([key], [Poisoned(self.layout.frame_nbytes).view]),
            lambda: backend.write([key], [self.frame(key)]),
            lambda: backend.delete([key]),
            lambda: list(backend.scan()),
        ):
            with contextlib.suppress(BackendError):
                use()

    def test_close_twice(self, tmp_path: Path):
        backend = self.config(tmp_path).open(self.context())
        backend.close()
        backend.close()

    def test_facts_are_plain_words(self, tmp_path: Path):
        with self.opened(tmp_path) as backend:
            assert all(isinstance(word, str) for fact in backend.facts().items() for word in fact)

    def test_threads_at_once(self, tmp_path: Path):
        """No two calls name the same key; everything else may happen at the same time."""
        with self.opened(tmp_path) as backend, ThreadPoolExecutor(4) as threads:
            for soak in [threads.submit(_soak, backend, seed) for seed in range(4)]:
                soak.result()


def _read(backend: Backend, key: ChunkKey, nbytes: int) -> bytes:
    """The frame of a key, empty if it is a miss."""
    into = memoryview(bytearray(nbytes))
    (count,) = backend.read([key], [into])
    return bytes(into[:count])


def _let_go(view: memoryview, buffer: bytearray) -> None:
    """A view that somebody else holds makes this a BufferError."""
    try:
        view.release()
        buffer.clear()
    except BufferError as error:
        raise AssertionError(f"the backend kept a view: {error}") from error


def _soak(backend: Backend, seed: int) -> None:
    """Write, read and delete batches of this thread's own keys, and know what must come back."""
    rng = random.Random(seed)
    keys = [make_key(1000 * (seed + 1) + i) for i in range(12)]
    held: dict[ChunkKey, memoryview] = {}
    deadline = time.monotonic() + _SOAK_SECONDS
    while time.monotonic() < deadline:
        batch = rng.sample(keys, rng.randint(1, 4))
        match rng.choice(("write", "read", "delete")):
            case "write":
                sizes = [rng.randint(1, 8) * FRAME_ALIGNMENT for _ in batch]
                seeds = [rng.getrandbits(32) for _ in batch]
                frames = [make_frame(*of) for of in zip(batch, sizes, seeds, strict=True)]
                backend.write(batch, frames)
                held.update(zip(batch, frames, strict=True))
            case "read":
                into = [memoryview(bytearray(8 * FRAME_ALIGNMENT)) for _ in batch]
                counts = backend.read(batch, into)
                got = [view[:count] for view, count in zip(into, counts, strict=True)]
                assert same(got, [held.get(key, b"") for key in batch]), "a thread read other bytes than it wrote"
                assert list(backend.contains(batch)) == [key in held for key in batch]
            case "delete":
                backend.delete(batch)
                for key in batch:
                    held.pop(key, None)


def _write_and_die(config: BackendConfig, ctx: OpenContext, seed: int, after: float) -> None:
    """Run `_write_for_ever` in a process and kill it ``after`` seconds of writing."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    writer = spawn.Process(target=_write_for_ever, args=(config, ctx, seed, theirs), daemon=True)
    writer.start()
    theirs.close()
    try:
        assert ours.poll(60), "the writer does not get going"
        ours.recv()
        time.sleep(after)
    finally:
        writer.kill()
        writer.join()
        ours.close()


def _write_for_ever(config: BackendConfig, ctx: OpenContext, seed: int, started: Connection) -> None:
    rng = random.Random(seed)
    backend = config.open(ctx)
    backend.write([make_key(0)], [make_frame(make_key(0))])
    started.send("writing")
    keys = [make_key(number) for number in range(1, 33)]
    frames = [[make_frame(key, nbytes=pages * FRAME_ALIGNMENT) for pages in (2, 9)] for key in keys]
    while True:
        i, j = rng.sample(range(len(keys)), 2)
        backend.write([keys[i], keys[j]], [rng.choice(frames[i]), rng.choice(frames[j])])
        backend.delete([rng.choice(keys)])
