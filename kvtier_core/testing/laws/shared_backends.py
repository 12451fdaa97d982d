"""The laws of a backend that several processes use at once. Subclass `SharedBackendLaws` and name a config."""

from __future__ import annotations

from pathlib import Path

from kvtier_core.interfaces import Backend
from kvtier_core.testing.laws.backend_frames import damage_of, read, write_many, write_one, writers
from kvtier_core.testing.laws.backends import BackendLaws
from kvtier_core.testing.laws.base import in_new_process
from kvtier_core.testing.samples import make_key, make_keys, make_namespace, same
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey

_WRITES = 120
_LARGEST = 16 * FRAME_ALIGNMENT


class SharedBackendLaws(BackendLaws):
    """Subclass, and implement `config`. All laws of `BackendLaws` hold too.

    Two instances with one config are two users of one store, in one process or in two. What one writes the other finds,
    whatever it was told before; what one opens, closes or has no room for deletes nothing that the other may use.
    """

    _tries_sharing = True

    def test_it_says_that_it_is_shared(self, tmp_path: Path):
        with self.opened(tmp_path) as backend:
            assert backend.shared is True, (
                f"{type(backend).__name__}.shared is {backend.shared!r}; only with `shared = True` does a tier ask for "
                "keys that other processes may have added"
            )

    def test_absence_is_asked(self, tmp_path: Path):
        """That a key was not there says nothing: another user may have written it since."""
        here, there = make_keys(2)
        with self.opened(tmp_path) as ours, self.opened(tmp_path) as theirs:
            for key in (here, there):
                assert list(ours.contains([key])) == [False], "contains() finds a key that was never written"
                assert not read(ours, key, _LARGEST), "read() finds a key that was never written"
            theirs.write([here], [self.frame(here)])
            in_new_process(write_one, self.config(tmp_path), self.context(), there, bytes(self.frame(there)))
            for key, who in ((here, "another instance"), (there, "another process")):
                self._must_find(ours, key, f"{who} wrote a key after it had been asked for")

    def test_what_others_change_is_seen(self, tmp_path: Path):
        """A frame that another user overwrote or deleted is not served from before."""
        key = make_key(0)
        with self.opened(tmp_path) as ours, self.opened(tmp_path) as theirs:
            ours.write([key], [self.frame(key)])
            self._must_find(theirs, key, "another instance wrote a key")
            newest = self.frame(key, seed=1)
            theirs.write([key], [newest])
            found = read(ours, key, _LARGEST)
            assert same(found, newest), (
                "another instance overwrote a frame; read() returns other bytes than the new ones"
            )
            theirs.delete([key])
            assert list(ours.contains([key])) == [False], "another instance deleted a key; contains() still finds it"
            assert not read(ours, key, _LARGEST), "another instance deleted a key; read() still finds it"

    def test_others_come_and_go_and_nothing_is_lost(self, tmp_path: Path):
        """One with less capacity, one of another namespace, one that closes: none deletes what others may use."""
        keys = make_keys(6)
        with self.opened(tmp_path) as ours:
            ours.write(keys, [self.frame(key) for key in keys])
            for what, ctx in {
                "of the same configuration": self.context(),
                "with room for one frame": self.context(capacity=self.layout.frame_nbytes),
                "of another namespace with room for one frame": self.context("other", self.layout.frame_nbytes),
            }.items():
                with self.opened(tmp_path, ctx) as theirs:
                    list(theirs.scan())
                    self._must_find(ours, keys[0], f"a user {what} opened the store")
                for key in keys:
                    self._must_find(ours, key, f"a user {what} opened and closed the store")

    def test_an_open_leaves_the_writes_of_others_alone(self, tmp_path: Path):
        """What another process has not finished writing must not be swept away."""
        keys = make_keys(_WRITES)
        with writers(1) as processes:
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

    def test_two_writers_of_one_key_leave_a_whole_frame(self, tmp_path: Path):
        """The frame is one of the two; no reader sees a part of it or a mixture of both."""
        keys = make_keys(2) * (_WRITES // 2)
        with self.opened(tmp_path) as backend, writers(2) as processes:
            both = [processes.submit(write_many, self.config(tmp_path), self.context(), keys, i) for i in range(2)]
            while not all(writer.done() for writer in both):
                for key in keys[:2]:
                    found = read(backend, key, _LARGEST)
                    damage = damage_of(found, key, make_namespace()) if found else ""
                    assert not damage, f"while two processes write one key, read() returns a frame that is {damage}"
            wrong = [each for writer in both for each in writer.result()]
            assert not wrong, f"two processes wrote the same keys; {len(wrong)} writes failed, the first: {wrong[0]}"

    def _must_find(self, backend: Backend, key: ChunkKey, what: str) -> None:
        assert list(backend.contains([key])) == [True], f"{what}; contains() does not find it"
        found = read(backend, key, _LARGEST)
        assert same(found, self.frame(key)), (
            f"{what}; read() returns {len(found)} bytes, not the frame that was written"
        )
