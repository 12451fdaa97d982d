"""The laws of a shared store for users that meet: in several processes, at one key, at one moment, or at their end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import attrs

from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, Nbytes
from kvtier_testing.laws.backend_frames import damage_of, read, write_for_ever
from kvtier_testing.laws.backends import BackendLaws
from kvtier_testing.laws.base import kill_at_work
from kvtier_testing.laws.shared_processes import (
    fault_of_write,
    keep_to_itself,
    overwrite_and_delete,
    users,
    write_many,
)
from kvtier_testing.samples import make_frame, make_key, make_keys, make_layout, make_namespace, same

_MIB = 1 << 20

_WRITES = 120
_ROUNDS = 16
_KILLS = 4
_LARGEST = 16 * FRAME_ALIGNMENT
#: A store may write large frames in parts, which must not be mixed: neither those of two frames of one length, nor of a
#: longer and a shorter one.
_SIZES = [Nbytes(2 * FRAME_ALIGNMENT), Nbytes(3 * _MIB), Nbytes(3 * _MIB), Nbytes(6 * _MIB + FRAME_ALIGNMENT)]


class SharedRaceLaws(BackendLaws):
    """The laws of `SharedBackendLaws` for users in several processes at once."""

    def test_an_open_leaves_the_writes_of_others_alone(self, tmp_path: Path) -> None:
        """A file that another process has not finished writing must not be removed.

        Otherwise each engine that starts would make the writes of the running ones fail, until their breakers open.
        """
        keys = make_keys(_WRITES)
        with users(1) as processes:
            writer = processes.submit(write_many, self.config(tmp_path), self.context(), keys, 0)
            while not writer.done():
                self.config(tmp_path).open(self.context()).close()
            wrong = writer.result()
        assert not wrong, (
            f"a process wrote {_WRITES} frames while this one opened and closed the store again and again; "
            f"{len(wrong)} writes failed, the first: {wrong[0]}"
        )
        with self.opened(tmp_path) as backend:
            lost = [key for key in keys if not read(backend, key, _LARGEST)]
            assert not lost, (
                f"{len(lost)} of {_WRITES} frames, written while another process opened the store, are lost"
            )

    def test_two_writers_of_one_key_leave_a_whole_frame(self, tmp_path: Path) -> None:
        """Two writers of one key leave the frame of one of them; no reader sees a part or a mixture.

        Otherwise two engines that compute one prompt, the usual thing in a fleet, would leave a frame that nobody can
        use.
        """
        keys = make_keys(2) * (_WRITES // 2)
        with self.opened(tmp_path) as backend, users(2) as processes:
            both = [processes.submit(write_many, self.config(tmp_path), self.context(), keys, i) for i in range(2)]
            _read_meanwhile(backend, keys[:2], _LARGEST, both)

    def test_a_read_races_with_overwrites_and_deletes(self, tmp_path: Path) -> None:
        """A read finds a whole frame of one writer, or none; and the last frame when all writers have ended.

        Otherwise popular prompts, which are written most often, would be those that are read damaged.
        """
        key, ctx = make_key(0), self._context_of_large_frames()
        with self.opened(tmp_path, ctx) as backend, users(2) as processes:
            both = [
                processes.submit(overwrite_and_delete, self.config(tmp_path), ctx, key, _SIZES, seed, _ROUNDS)
                for seed in range(2)
            ]
            _read_meanwhile(backend, [key], max(_SIZES), both)
            found = read(backend, key, max(_SIZES))
            assert found, "two processes overwrote and deleted a key, and both wrote it at last; it is not found"
            damage = damage_of(found, key, make_namespace())
            assert not damage, f"two processes overwrote and deleted a key; what they left is {damage}"

    def test_a_killed_writer_harms_no_other(self, tmp_path: Path) -> None:
        """Under each key of a killed writer others find a whole frame or none, and can write it.

        Otherwise an engine that was killed would leave keys that are lost to the whole fleet.
        """
        rng = random.Random(0)
        ctx, pages = self._context_of_large_frames(), (2, 9, max(_SIZES) // FRAME_ALIGNMENT)
        with self.opened(tmp_path, ctx) as before:
            for round_ in range(_KILLS):
                kill_at_work(write_for_ever, self.config(tmp_path), ctx, round_, 4, pages, after=rng.uniform(0, 0.1))
                with self.opened(tmp_path, ctx) as after:
                    for key in make_keys(4):
                        _must_be_whole_or_missing([before, after], key)
                        for backend in (before, after):
                            _must_be_writable(backend, key)

    def test_namespaces_share_keys_at_the_same_time(self, tmp_path: Path) -> None:
        """Users with another model, or with another codec alone, neither find nor harm each other's frames.

        Otherwise engines of two models would delete each other's frames as damaged, for ever.
        """
        contexts = [self.context("ours"), self.context("theirs"), self.context("ours", codec="another")]
        with users(len(contexts)) as processes:
            running = [
                processes.submit(keep_to_itself, self.config(tmp_path), ctx, make_key(0), seed, _WRITES // 2)
                for seed, ctx in enumerate(contexts)
            ]
            wrong = [each for user in running for each in user.result()]
        assert not wrong, (
            f"three namespaces used one key at the same time, each in a process of its own; {len(wrong)} calls went "
            f"wrong, the first: {wrong[0]}"
        )

    def _context_of_large_frames(self) -> OpenContext:
        page = (max(_SIZES) - FRAME_ALIGNMENT) // 4
        return attrs.evolve(self.context(), layout=make_layout([page], blocks=4), max_frame_nbytes=max(_SIZES))


def _read_meanwhile(
    backend: Backend, keys: Sequence[ChunkKey], nbytes: int, writers: Sequence[Future[list[str]]]
) -> None:
    """Read until the writers have ended: nothing but whole frames and misses; and they must have had no trouble."""
    while not all(writer.done() for writer in writers):
        for key in keys:
            found = read(backend, key, nbytes)
            damage = damage_of(found, key, make_namespace()) if found else ""
            assert not damage, f"while two processes write one key, read() returns a frame that is {damage}"
    wrong = [each for writer in writers for each in writer.result()]
    assert not wrong, f"two processes used the same keys; {len(wrong)} calls went wrong, the first: {wrong[0]}"


def _must_be_whole_or_missing(backends: Sequence[Backend], key: ChunkKey) -> None:
    for backend in backends:
        found = read(backend, key, max(_SIZES))
        damage = damage_of(found, key, make_namespace()) if found else ""
        assert not damage, f"a process was killed while it wrote; another one reads a frame that is {damage}"
        there = list(backend.contains([key]))
        assert there == [bool(found)], (
            f"a process was killed while it wrote; of one key contains() says {there}, and read() finds "
            f"{len(found)} bytes"
        )


def _must_be_writable(backend: Backend, key: ChunkKey) -> None:
    written = make_frame(key, seed=random.Random(key).getrandbits(32))
    wrong = fault_of_write(backend, key, written)
    assert not wrong, f"a process was killed while it wrote a key; another one cannot write that key: {wrong[0]}"
    assert same(read(backend, key, _LARGEST), written), (
        "a process was killed while it wrote a key; what another one wrote there afterwards is lost or another frame"
    )
