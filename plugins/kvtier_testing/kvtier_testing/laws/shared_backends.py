"""The laws of a backend that several processes use at once. Subclass `SharedBackendLaws` and name a config."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier_core.interfaces import Backend
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey
from kvtier_testing.laws.backend_frames import read
from kvtier_testing.laws.base import in_new_process
from kvtier_testing.laws.shared_capacity import SharedCapacityLaws
from kvtier_testing.laws.shared_processes import delete_one, write_one
from kvtier_testing.laws.shared_races import SharedRaceLaws
from kvtier_testing.laws.shared_trouble import SharedTroubleLaws
from kvtier_testing.samples import make_frame, make_key, make_keys, same

_LARGEST = 16 * FRAME_ALIGNMENT


class SharedBackendLaws(SharedRaceLaws, SharedTroubleLaws, SharedCapacityLaws):
    """Subclass, and implement `config`. All laws of `BackendLaws` hold too.

    Two instances with one config are two users of one store, in one process or in two. What one writes the other finds,
    whatever it was told before; what one opens, closes or has no room for deletes nothing that the other may use.

    Set `bounded` if the backend keeps within a capacity. Implement `spoil`, `stalled`, `broken_key`, `stalled_store`,
    `interrupted` and `listings` where your store can be made to fail so, or be watched: the laws about that are skipped
    otherwise. `kvtier_testing.Proxy` stalls and interrupts any store on a network.
    """

    _tries_sharing = True

    def listings(self, folder: Path) -> int | None:
        """How often anybody has listed the store so far; None if that cannot be seen."""
        return None

    def test_a_shared_backend_is_marked_as_shared(self, tmp_path: Path) -> None:
        """`shared` is True in the backend as in its config.

        Otherwise kvtier would list the store as its own, and delete from it what other engines use.
        """
        with self.opened(tmp_path) as backend:
            assert backend.shared is True, (
                f"{type(backend).__name__}.shared is {backend.shared!r}; only with `shared = True` does a tier ask for "
                "keys that other processes may have added"
            )

    def test_absence_is_asked(self, tmp_path: Path) -> None:
        """That a key was absent says nothing: another user may have written it since.

        Otherwise every engine would compute what the others stored: the store would be shared in name only.
        """
        here, there = make_keys(2)
        with self.opened(tmp_path) as ours, self.opened(tmp_path) as theirs:
            for key in (here, there):
                assert list(ours.contains([key])) == [False], "contains() finds a key that was never written"
                assert not read(ours, key, _LARGEST), "read() finds a key that was never written"
            theirs.write([here], [self.frame(here)])
            in_new_process(write_one, self.config(tmp_path), self.context(), there, bytes(self.frame(there)))
            for key, who in ((here, "another instance"), (there, "another process")):
                self._must_find(ours, key, f"{who} wrote a key after it had been asked for")

    def test_presence_is_asked(self, tmp_path: Path) -> None:
        """That a key was there says nothing: it may be gone since.

        Otherwise requests would wait for frames that are gone, and be computed later than without the tier.
        """
        keys = here, there = make_keys(2)
        with self.opened(tmp_path) as ours, self.opened(tmp_path) as theirs:
            ours.write(keys, [self.frame(key) for key in keys])
            for key in keys:
                self._must_find(ours, key, "a key was written")
            theirs.delete([here])
            in_new_process(delete_one, self.config(tmp_path), self.context(), there)
            for key, who in ((here, "another instance"), (there, "another process")):
                assert list(ours.contains([key])) == [False], f"{who} deleted a key; contains() still finds it"
                assert not read(ours, key, _LARGEST), f"{who} deleted a key; read() still finds it"

    def test_what_others_change_is_seen(self, tmp_path: Path) -> None:
        """A frame that another user has overwritten is read as it is now.

        Otherwise a damaged frame that was replaced would stay damaged for everyone who had read it before.
        """
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

    def test_others_come_and_go_and_nothing_is_lost(self, tmp_path: Path) -> None:
        """A user with less capacity, of another namespace, or that closes deletes nothing that others may use.

        Otherwise each engine that starts or ends would empty the cache of the whole fleet.
        """
        keys = make_keys(6)
        with self.opened(tmp_path) as ours:
            ours.write(keys, [self.frame(key) for key in keys])
            for what, ctx in {
                "of the same configuration": self.context(),
                "with room for one frame": self.context(capacity=self.layout.frame_nbytes),
                "of another namespace with room for one frame": self.context("other", self.layout.frame_nbytes),
            }.items():
                with self.opened(tmp_path, ctx):
                    self._must_find(ours, keys[0], f"a user {what} opened the store")
                for key in keys:
                    self._must_find(ours, key, f"a user {what} opened and closed the store")

    # -- quarantine --------------------------------------------------------------------------------

    def test_quarantine_deletes_nothing(self, tmp_path: Path) -> None:
        """`quarantine` deletes nothing: another user may read the frame well, or have replaced it.

        Otherwise one machine with bad memory would delete good frames of all others.
        """
        intact, replaced = make_keys(2)
        with self.opened(tmp_path) as ours, self.opened(tmp_path) as theirs:
            ours.write([intact, replaced], [self.frame(intact), _damaged(self.frame(replaced))])
            for key in (intact, replaced):
                read(ours, key, _LARGEST)
            theirs.write([replaced], [self.frame(replaced)])
            ours.quarantine([intact, replaced])
            self._must_find(theirs, intact, "a user quarantined a frame that another one can read")
            self._must_find(theirs, replaced, "a user quarantined a frame that another one had replaced meanwhile")

    def test_what_is_quarantined_is_replaced(self, tmp_path: Path) -> None:
        """The next write of a quarantined key replaces it, even with the frame that this user wrote there before.

        Otherwise a damaged frame would stay for ever: each engine would find it, read it and compute it again.
        """
        keys = spoiled, damaged = make_keys(2)
        with self.opened(tmp_path) as ours, self.opened(tmp_path) as theirs:
            ours.write(keys, [self.frame(key) for key in keys])
            self.spoil(tmp_path, spoiled)
            theirs.write([damaged], [_damaged(self.frame(damaged))])
            ours.read(keys, [memoryview(bytearray(_LARGEST)) for _ in keys])
            ours.quarantine(keys)
            ours.write(keys, [self.frame(key) for key in keys])
            for key in keys:
                self._must_find(theirs, key, "a key was quarantined and written again")

    # -- batches -----------------------------------------------------------------------------------

    def test_large_batches_are_answered_in_order(self, tmp_path: Path) -> None:
        """Each of hundreds of keys in a call has its own answer, in their order.

        Otherwise long prompts, which gain the most, would be misses, or find the frames of others and throw them away.
        """
        keys, nbytes = make_keys(300), 2 * FRAME_ALIGNMENT
        present = [random.Random(key).random() < 0.5 for key in keys]
        written = [key for key, there in zip(keys, present, strict=True) if there]
        with self.opened(tmp_path) as backend:
            backend.write(written, [make_frame(key, nbytes) for key in written])
            found = list(backend.contains(keys))
            assert found == present, f"contains() of {len(keys)} keys answers otherwise than the store has them"
            asked = keys[:40]
            into = [memoryview(bytearray(nbytes)) for _ in asked]
            counts = list(backend.read(asked, into))
            expected = [nbytes if there else 0 for there in present[:40]]
            assert counts == expected, f"read() of {len(asked)} keys returns {expected}; it returned {counts}"
            wrong = [
                key for key, view, n in zip(asked, into, expected, strict=True) if n and view != make_frame(key, n)
            ]
            assert not wrong, f"read() of {len(asked)} keys returned other frames for {len(wrong)} of them"

    def test_a_store_is_not_listed(self, tmp_path: Path) -> None:
        """Nobody lists a store, which may have millions of frames of others.

        Otherwise an engine would take minutes to start, and cost the store more than all its requests.
        """
        keys = make_keys(20)
        with self.opened(tmp_path) as ours:
            ours.write(keys, [self.frame(key) for key in keys])
            before = self.listings(tmp_path)
            if before is None:
                pytest.skip("this suite cannot see whether the store is listed")
            with self.opened(tmp_path) as theirs:
                self._must_find(theirs, keys[0], "another instance wrote a key")
            after = self.listings(tmp_path)
            assert after is not None, "`listings` of this suite returned a number, and then None"
            listed = after - before
            assert not listed, f"to open a shared store, read a frame and close it, it was listed {listed} times"

    def _must_find(self, backend: Backend, key: ChunkKey, what: str) -> None:
        assert list(backend.contains([key])) == [True], f"{what}; contains() does not find it"
        found = read(backend, key, _LARGEST)
        assert same(found, self.frame(key)), (
            f"{what}; read() returns {len(found)} bytes, not the frame that was written"
        )


def _damaged(frame: memoryview) -> memoryview:
    frame[-1] ^= 0xFF
    return frame
