"""The laws of a backend. Subclass `BackendLaws`, name a config, and let pytest collect the class."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext, SupportsWalk
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey
from kvtier_testing.laws.backend_frames import come_and_go, damage_of, listed, read, soak, write_for_ever
from kvtier_testing.laws.base import kill_at_work
from kvtier_testing.laws.direct_reads import DirectReadLaws
from kvtier_testing.resources import PATIENCE
from kvtier_testing.samples import Poisoned, make_frame, make_key, make_keys, make_namespace

_KILLS = 6
_ROUNDS = 40
_HEAD_START = 0.1  # seconds


class BackendLaws(DirectReadLaws):
    """Subclass, and implement `config`. A backend that is `shared` is tried by `SharedBackendLaws` instead.

    Set `persistent` if frames are still there after close and open. Implement `spoil` and `stalled` if your medium
    can be made to fail or to wait: the laws about that are skipped otherwise.
    """

    def test_a_shared_backend_is_tried_as_one(self, tmp_path: Path) -> None:
        """A backend with `shared = True` is tried by `SharedBackendLaws`.

        Otherwise engines would share a store of which nobody has seen that it can be shared.
        """
        with self.opened(tmp_path) as backend:
            assert not backend.shared or self._tries_sharing, (
                f"{type(backend).__name__} says that other processes may add and drop keys (shared = True): "
                "its laws are those of SharedBackendLaws, so subclass that"
            )

    _tries_sharing = False

    # -- lives -------------------------------------------------------------------------------------

    def test_scan_finds_what_survived(self, tmp_path: Path) -> None:
        """`scan` names every frame that survived, with its bytes, oldest first, and nothing else.

        Otherwise a restarted engine would compute what it has stored, or its tier would exceed its capacity by frames
        it misses.
        """
        self._skip_unless_recovered()
        keys = make_keys(6)
        frames = [make_frame(key, nbytes=(i + 1) * FRAME_ALIGNMENT) for i, key in enumerate(keys)]
        with self.opened(tmp_path) as backend:
            for key, written in zip(reversed(keys), reversed(frames), strict=True):
                backend.write([key], [written])
                time.sleep(self.scan_tick)
            backend.delete([keys[2]])
        with self.opened(tmp_path) as backend:
            survivors = [5, 4, 3, 1, 0]
            assert [(bytes(key), nbytes) for key, nbytes in listed(backend)] == [
                (keys[i], len(frames[i])) for i in survivors
            ], "scan() names every frame that survived, with its bytes, oldest first, and nothing else"
            lost = [i for i in survivors if read(backend, keys[i], self.layout.frame_nbytes) != frames[i]]
            assert not lost, f"{len(lost)} of {len(survivors)} frames that scan() names cannot be read as written"

    def test_a_scan_may_race_with_a_delete(self, tmp_path: Path) -> None:
        """A `scan` may name a frame that is deleted meanwhile, or not; nothing fails.

        Otherwise a tier that makes room as it opens would sometimes fail to open, and the engine would serve without
        it.
        """
        keys, nbytes = make_keys(12), 2 * FRAME_ALIGNMENT
        with self.opened(tmp_path) as backend:
            backend.write(keys, [make_frame(key, nbytes=nbytes) for key in keys])
            begun = iter(listed(backend))
            next(begun, None)
            backend.delete(keys)
            _must_name(begun, keys, nbytes)
            with ThreadPoolExecutor(1) as threads:
                others = threads.submit(come_and_go, backend, keys, nbytes, _ROUNDS)
                while not others.done():
                    _must_name(listed(backend), keys, nbytes)
                others.result()

    def test_a_killed_writer_leaves_no_torn_frame(self, tmp_path: Path) -> None:
        """When a process is killed in a write, each key has its whole frame or none.

        Otherwise lookups would find torn frames, which are read and thrown away for their checksums: time and room for
        nothing.
        """
        self._skip_unless_recovered()
        rng = random.Random(0)
        for round_ in range(_KILLS):
            after = rng.uniform(0, 0.05)
            kill_at_work(write_for_ever, self.config(tmp_path), self.context(), round_, 33, (2, 9), after=after)
            with self.opened(tmp_path) as backend:
                survivors = dict(listed(backend))
                assert make_key(0) in survivors, "what was written long before the kill is lost"
                for key, nbytes in survivors.items():
                    whole = read(backend, key, nbytes)
                    assert len(whole) == nbytes, f"scan() names a frame of {nbytes} bytes; read() finds {len(whole)}"
                    damage = damage_of(whole, key, make_namespace())
                    assert not damage, f"a writer that was killed left a torn frame: {damage}"

    def test_what_other_namespaces_left_counts_against_the_capacity(self, tmp_path: Path) -> None:
        """A tier counts its own frames; the store must remove those that another model left.

        Otherwise each change of the model, or of vLLM, would leave a capacity's worth of unread frames, until the store
        is full.
        """
        capacity = 4 * self.layout.frame_nbytes
        before: list[OpenContext] = []
        for model in ("first", "second", "third"):
            before.append(ctx := self.context(model, capacity))
            with self.opened(tmp_path, ctx) as backend:
                if backend.shared:
                    pytest.skip("what a shared store holds is not one engine's to count")
                for key in make_keys(4):
                    backend.write([key], [make_frame(key, self.layout.frame_nbytes, namespace=ctx.namespace)])
            nbytes = self._stored_nbytes(tmp_path, before)
            assert nbytes <= capacity, (
                f"the tier may take {capacity} bytes, and each of its engines kept within that; when the {model} "
                f"had closed, {nbytes} bytes of frames lay in the store: frames of other namespaces must make room"
            )

    def test_only_backend_error_escapes(self, tmp_path: Path) -> None:
        """A call of a closed backend raises BackendError or answers.

        Otherwise kvtier could not tell a store that fails from a broken plugin, and would give up the tier.
        """
        key = make_key(0)
        with self.opened(tmp_path) as backend:
            backend.write([key], [self.frame(key)])
        calls: dict[str, Callable[[], object]] = {
            "contains": lambda: backend.contains([key]),
            "read": lambda: backend.read([key], [Poisoned(self.layout.frame_nbytes).view]),
            "write": lambda: backend.write([key], [self.frame(key)]),
            "delete": lambda: backend.delete([key]),
            "scan": lambda: list(listed(backend)),
        }
        for call, use in calls.items():
            try:
                use()
            except BackendError:
                continue
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise AssertionError(f"{call}() after close raises BackendError or answers; it raised {why}") from error

    # -- threads -----------------------------------------------------------------------------------

    def test_threads_at_once(self, tmp_path: Path) -> None:
        """Calls run at the same time on several threads, but never two for one key.

        Otherwise frames would be mixed or lost under load. Checksums find that: stored prompts would be computed again,
        now and then.
        """
        with self.opened(tmp_path) as backend, ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(soak, backend, seed) for seed in range(4)]:
                one.result()

    def test_a_slow_read_does_not_block_others(self, tmp_path: Path) -> None:
        """While the read of one frame is slow, a bad sector or a slow link, frames of other keys are served.

        Otherwise one slow frame would hold up every request that the tier could serve, until each gives up and
        computes.
        """
        slow, quick = make_keys(2)
        with self.opened(tmp_path) as backend, ThreadPoolExecutor(2) as threads:
            backend.write([slow, quick], [self.frame(slow), self.frame(quick)])
            with self.stalled(tmp_path, slow) as stalls:
                if not stalls:
                    pytest.skip("this suite cannot make a read wait")
                into = [memoryview(bytearray(self.layout.frame_nbytes)) for _ in range(2)]
                held = threads.submit(backend.read, [slow], into[:1])
                while not (held.running() or held.done()):
                    time.sleep(0.001)
                time.sleep(_HEAD_START)  # without it the law may miss a fault; it never sees one that is not there
                other = threads.submit(backend.read, [quick], into[1:])
                wait([other], timeout=PATIENCE)
                assert other.done() and not other.exception(), (
                    "while the read of one key waits, that of another one "
                    f"{f'raised {other.exception()}' if other.done() else f'does not return in {PATIENCE:g} seconds'}: "
                    "calls come on several threads at once, and none may keep the others"
                )
                assert not held.done(), "`stalled` of this suite does not stall: the read of its key has returned"
            with contextlib.suppress(BackendError):
                held.result()

    def _skip_unless_recovered(self) -> None:
        if not self.persistent:
            pytest.skip("nothing survives by design")
        if self._tries_sharing:
            pytest.skip("a shared store is not listed: its tier asks for each key")

    def _live(self, folder: Path) -> set[str]:
        """Open, write, look, read, delete and close. Its files stay."""
        keys = make_keys(4)
        with self.opened(folder) as backend:
            backend.write(keys, [self.frame(key) for key in keys])
            backend.contains(keys)
            backend.read(keys, [memoryview(bytearray(self.layout.frame_nbytes)) for _ in keys])
            list(listed(backend))
            backend.delete(keys)
        return set()

    def _stored_nbytes(self, folder: Path, engines: Sequence[OpenContext]) -> int:
        """Bytes of all frames in the store: by `walk`, or without one by a `scan` for each engine that was there."""
        config = self.config(folder)
        if isinstance(config, SupportsWalk):
            with config.walk() as stored:
                return sum(each.nbytes for each in stored)
        self._skip_unless_recovered()
        nbytes = 0
        for ctx in engines:
            with self.opened(folder, ctx) as backend:
                nbytes += sum(length for _, length in listed(backend))
        return nbytes


def _must_name(scanned: Iterable[tuple[ChunkKey, int]], keys: Sequence[ChunkKey], nbytes: int) -> None:
    """Nothing but these keys, of this length."""
    try:
        odd = [(key, length) for key, length in scanned if key not in keys or length != nbytes]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise AssertionError(f"scan() raised when frames were deleted meanwhile: {why}") from error
    assert not odd, f"only frames of {nbytes} bytes were written; scan() names one of {odd[0][1]}, or a key of its own"
