"""The laws of a shared store that keeps within a capacity: its users count together, and the oldest frames go first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier_core.interfaces import Backend, OpenContext, SupportsWalk
from kvtier_core.types import ChunkKey
from kvtier_testing.laws.backends import BackendLaws
from kvtier_testing.laws.shared_processes import users, write, write_numbered
from kvtier_testing.samples import make_frame, make_key, make_keys, make_namespace

_ROOM = 64  # frames
_USERS = 3
_WRITES = 40  # a user's


class SharedCapacityLaws(BackendLaws):
    """The laws of `SharedBackendLaws` for what a store may hold."""

    bounded: ClassVar[bool] = False  #: do all users together keep within `OpenContext.capacity`?

    def stored(self, folder: Path) -> Mapping[str, int]:
        """Where everything in the store lies, and its bytes, of every namespace; by default what `walk` names."""
        config = self.config(folder)
        assert isinstance(config, SupportsWalk), f"{type(config).__name__} cannot be walked: say what is stored"
        with config.walk() as stored:
            return {each.where: each.nbytes for each in stored}

    def test_all_users_together_keep_within_the_capacity(self, tmp_path: Path) -> None:
        """Users in three processes and two namespaces keep within the capacity at every moment, and can still write.

        Otherwise the store would outgrow what the user gave it, by as many times as there are engines.
        """
        contexts = [self._bounded(_ROOM, model) for model in ("one", "other", "other")]
        numbers = [range(user * _WRITES, (user + 1) * _WRITES) for user in range(_USERS)]
        largest = 0
        with users(_USERS) as processes:
            running = [
                processes.submit(write_numbered, self.config(tmp_path), ctx, those, self.layout.frame_nbytes)
                for ctx, those in zip(contexts, numbers, strict=True)
            ]
            while not all(user.done() for user in running):
                largest = max(largest, self._stored_together(tmp_path))
                time.sleep(0.01)  # the users need the processor, too
            wrong = [each for user in running for each in user.result()]
        assert not wrong, f"{_USERS} users of a full store wrote new frames; {len(wrong)} failed, the first: {wrong[0]}"
        left, capacity = self._stored_together(tmp_path), contexts[0].capacity
        assert max(largest, left) <= capacity, (
            f"{_USERS} users with one capacity of {capacity} bytes had {max(largest, left)} bytes in the store at once"
        )
        assert left > capacity / 2, f"of a capacity of {capacity} bytes {left} are used when more was written"
        newest = make_keys(_USERS * _WRITES + _USERS)[-_USERS:]
        for ctx, key in zip(contexts, newest, strict=True):
            with self.opened(tmp_path, ctx) as backend:
                self._write(backend, [key], ctx)
        for ctx, key in zip(contexts, newest, strict=True):
            with self.opened(tmp_path, ctx) as backend:
                assert not _missing(backend, [key]), f"one of the last {_USERS} frames written to a full store is gone"

    def test_the_oldest_go_first(self, tmp_path: Path) -> None:
        """Where room is needed the oldest frames leave, whichever engine wrote them.

        Otherwise what was stored a moment ago would be gone when its prompt comes back.
        """
        ctx = self._bounded(_ROOM)
        older, newer = make_keys(2 * _WRITES)[:_WRITES], make_keys(2 * _WRITES)[_WRITES:]
        with self.opened(tmp_path, ctx) as ours, self.opened(tmp_path, ctx) as theirs:
            for keys in (older, newer):
                self._write(ours, keys[::2])
                self._write(theirs, keys[1::2])
                time.sleep(self.scan_tick)
            lost = _missing(ours, newer)
            assert not lost, f"the oldest frames make room for new ones; {len(lost)} newer ones are gone"
            assert _missing(ours, older), f"of {2 * _WRITES} frames in a store with room for {_ROOM} all are found"

    def test_room_is_given_back(self, tmp_path: Path) -> None:
        """A frame that is overwritten or deleted gives its room back.

        Otherwise frames that are gone would fill the account, and less and less of the capacity would be used.
        """
        kept, overwritten, deleted = make_keys(10)[:8], make_key(8), make_key(9)
        with self.opened(tmp_path, self._bounded(_ROOM // 4)) as backend:
            self._write(backend, kept)
            for _ in range(_ROOM // 4):
                self._write(backend, [overwritten])
                self._write(backend, [deleted])
                backend.delete([deleted])
            lost = _missing(backend, [*kept, overwritten])
            assert not lost, (
                f"a store with room for {_ROOM // 4} frames never held more than 10, for the others were overwritten "
                f"or deleted; {len(lost)} of those that should have stayed are gone"
            )

    def test_without_a_capacity_nothing_is_evicted(self, tmp_path: Path) -> None:
        """A user without a capacity evicts nothing: the store bounds itself, and others use what they wrote.

        Otherwise an engine without a limit would delete the frames of those with one.
        """
        older, newer = make_keys(24)[:12], make_keys(24)[12:]
        room = 16 if self.bounded else 0
        with (
            self.opened(tmp_path, self.context(capacity=room * self.layout.frame_nbytes)) as ours,
            self.opened(tmp_path, self.context(capacity=0)) as theirs,
        ):
            self._write(ours, older)
            self._write(theirs, newer)
            lost = _missing(theirs, [*older, *newer])
            assert not lost, f"a user without a capacity wrote {len(newer)} frames; {len(lost)} frames were evicted"

    def _bounded(self, frames: int, model: str = "tiny") -> OpenContext:
        """The context of a user of a store with room for so many frames."""
        if not self.bounded:
            pytest.skip("this store bounds itself (`bounded` is False)")
        return self.context(model, frames * self.layout.frame_nbytes)

    def _stored_together(self, folder: Path) -> int:
        """Bytes that lay in the store at one moment, between two listings: what both of them name.

        One listing may name a frame that was deleted before another one that it names was written. No key is written
        twice here, so what is named twice has been there all the time.
        """
        earlier, later = self.stored(folder), self.stored(folder)
        return sum(nbytes for where, nbytes in earlier.items() if where in later)

    def _write(self, backend: Backend, keys: Sequence[ChunkKey], ctx: OpenContext | None = None) -> None:
        namespace = ctx.namespace if ctx else make_namespace()
        frames = [make_frame(key, self.layout.frame_nbytes, namespace=namespace) for key in keys]
        errors = [error for error in write(backend, keys, frames) if error is not None]
        assert not errors, f"a store that may evict rejects a new frame: {errors[0]}"


def _missing(backend: Backend, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    return [key for key, there in zip(keys, backend.contains(keys), strict=True) if not there]
