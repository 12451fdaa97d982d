"""The laws of a shared store in trouble: a key that fails, a store that does not answer, one that cannot be reached."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend
from kvtier_core.types import ChunkKey, Seconds
from kvtier_testing.laws.backend_frames import damage_of, read
from kvtier_testing.laws.backends import BackendLaws
from kvtier_testing.laws.shared_processes import store, write
from kvtier_testing.resources import PATIENCE
from kvtier_testing.samples import is_poison, make_keys, make_namespace, poison, same

_TIMEOUT = Seconds(1)
_BATCH = 40  # keys: a backend that waits for each of them in turn is found out
_AFTERMATH = 0.3  # seconds; with fewer the law may miss a fault; it never sees one that is not there

T = TypeVar("T")


class SharedTroubleLaws(BackendLaws):
    """The laws of `SharedBackendLaws` for trouble. What the hooks below cannot cause is not tried.

    A store that can be reached over TLS, too, has a second suite for that: waits and ends differ there.
    """

    def broken_key(self, folder: Path, key: ChunkKey) -> bool:
        """From now on the store fails for this key, where it is read and, if that can be done, where it is written;
        False if it cannot be made to. By default the frame is spoiled."""
        return self.spoil(folder, key)

    @contextlib.contextmanager
    def stalled_store(self, folder: Path) -> Iterator[bool]:
        """The whole store answers nothing before the context ends, or so slowly that no batch of calls is done in time,
        although no byte is long in coming (try both); yields False if that cannot be done."""
        yield False

    @contextlib.contextmanager
    def interrupted(self, folder: Path) -> Iterator[bool]:
        """The store cannot be reached before the context ends, and keeps what it has; yields False if that cannot be
        done."""
        yield False

    def test_a_key_that_fails_fails_alone(self, tmp_path: Path) -> None:
        """A key that fails fails alone: the others of its batch are found, read and written.

        Otherwise one bad object, or one node of a cluster that is down, would make every frame of the store a miss.
        """
        keys = first, broken, last = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write(keys, [self.frame(key) for key in keys])
            if not self.broken_key(tmp_path, broken):
                pytest.skip("this suite cannot make the store fail for one key")
            self._must_serve(backend, keys, [first, last], seed=0)
            newest = [self.frame(key, seed=1) for key in keys]
            errors = _answer_of("write", lambda: write(backend, keys, newest))
            assert errors[0] is errors[2] is None, f"beside a key that fails two others were not written: {errors}"
            self._must_serve(backend, keys, [first, last] if errors[1] else keys, seed=1)

    def test_no_call_outlasts_its_timeout(self, tmp_path: Path) -> None:
        """Each call answers or raises BackendError within `OpenContext.timeout`, however many keys it has.

        Otherwise a store that hangs would hold arena slots and threads, and requests would wait longer than computing
        takes.
        """
        asked, read_, written, deleted = (make_keys(4 * _BATCH)[i::4] for i in range(4))
        into = [memoryview(bytearray(self.layout.frame_nbytes)) for _ in read_]
        with self._impatient(tmp_path, read_) as backend:
            calls = {
                "contains": lambda: backend.contains(asked),
                "read": lambda: backend.read(read_, into),
                "write": lambda: backend.write(written, [self.frame(key) for key in written]),
                "delete": lambda: backend.delete(deleted),
            }
            with self._stalled_calls(tmp_path, calls):
                pass

    def test_a_call_that_gave_up_is_over(self, tmp_path: Path) -> None:
        """A call that has given up writes nothing to its views later, and reads nothing from them.

        Otherwise a late answer would overwrite the KV of another chunk after that was verified: wrong answers.
        """
        here, there = make_keys(2)
        into, frame = memoryview(bytearray(self.layout.frame_nbytes)), self.frame(there)
        with self._impatient(tmp_path, [here]) as backend:
            calls = {"read": lambda: backend.read([here], [into]), "write": lambda: backend.write([there], [frame])}
            with self._stalled_calls(tmp_path, calls):
                poison(into)
                poison(frame)
            time.sleep(_AFTERMATH)
            assert is_poison(into), "a read gave up because the store did not answer, and wrote to its view later"
            found = _when_it_works(lambda: read(backend, there, self.layout.frame_nbytes))
            damage = damage_of(found, there, make_namespace()) if found else ""
            assert not damage, f"a write gave up because the store did not answer, and left a frame that is {damage}"

    def test_a_store_that_recovers_is_used_again(self, tmp_path: Path) -> None:
        """Calls fail or miss while a store cannot be reached; afterwards the same instance serves again.

        Otherwise every engine would have to be restarted after a restart of the store.
        """
        before, during, after = make_keys(3)
        with self.opened(tmp_path) as backend:
            backend.write([before], [self.frame(before)])
            with self.interrupted(tmp_path) as possible:
                if not possible:
                    pytest.skip("this suite cannot make the store unreachable")
                stored = self._use_unreachable(backend, before, during)
            _when_it_works(lambda: store(backend, after, self.frame(after)))
            for key in [before, after, *([during] if stored else [])]:
                found = _when_it_works(functools.partial(read, backend, key, self.layout.frame_nbytes))
                assert same(found, self.frame(key)), (
                    "the store was out of reach for a while; a frame that was stored before, meanwhile or afterwards "
                    f"is a miss or another one: read() returns {len(found)} bytes"
                )

    @contextlib.contextmanager
    def _impatient(self, folder: Path, stored: list[ChunkKey]) -> Iterator[Backend]:
        """An instance with a short timeout, which a store that answers may exceed while the machine is busy."""
        with self.opened(folder) as patient:
            patient.write(stored, [self.frame(key) for key in stored])
        impatient = attrs.evolve(self.context(), timeout=_TIMEOUT)
        with contextlib.ExitStack() as closing:
            yield _when_it_works(lambda: closing.enter_context(self.opened(folder, impatient)))

    def _must_serve(self, backend: Backend, keys: list[ChunkKey], served: list[ChunkKey], seed: int) -> None:
        """Of a batch with a key that fails, these are found and read."""
        there = _answer_of("contains", lambda: list(backend.contains(keys)))
        lost = [key for key, found in zip(keys, there, strict=True) if key in served and not found]
        assert not lost, f"in a batch with a key that fails contains() does not find {len(lost)} others: {there}"
        into = [memoryview(bytearray(self.layout.frame_nbytes)) for _ in keys]
        _answer_of("read", lambda: backend.read(keys, into))
        lost = [key for key, view in zip(keys, into, strict=True) if key in served and view != self.frame(key, seed)]
        assert not lost, f"in a batch with a key that fails read() does not serve {len(lost)} others as written"

    @contextlib.contextmanager
    def _stalled_calls(self, folder: Path, calls: Mapping[str, Callable[[], Any]]) -> Iterator[None]:
        """Make all calls at once while the store does not answer, until the context ends: each must end in time."""
        with ThreadPoolExecutor(len(calls)) as threads, self.stalled_store(folder) as stalls:
            if not stalls:
                pytest.skip("this suite cannot make the store wait")
            running = {name: threads.submit(call) for name, call in calls.items()}
            wait(running.values(), timeout=_TIMEOUT + PATIENCE)
            late = [f"{name}()" for name, call in running.items() if not call.done()]
            assert not late, (
                f"the store does not answer, and the timeout is {_TIMEOUT}; {PATIENCE:g} seconds later "
                f"{' and '.join(late)} had not returned"
            )
            for name, call in running.items():
                _must_be_backend_error(name, call.exception(), "does not answer")
            assert not (_served(running["read"]) and _served(running["write"])), (
                "`stalled_store` of this suite does not stall: all frames were read and written"
            )
            yield

    def _use_unreachable(self, backend: Backend, known: ChunkKey, new: ChunkKey) -> bool:
        """Make each call: none finds anything, and none raises anything but BackendError. Is the new frame stored?"""
        answers: dict[str, object] = {}
        calls: dict[str, Callable[[], object]] = {
            "contains": lambda: any(backend.contains([known])),
            "read": lambda: backend.read([known], [memoryview(bytearray(self.layout.frame_nbytes))])[0],
            "write": lambda: write(backend, [new], [self.frame(new)])[0],
            "delete": lambda: backend.delete([new]),
        }
        for name, call in calls.items():
            try:
                answers[name] = call()
            except Exception as error:  # noqa: BLE001 - whatever it is, the law reports it
                _must_be_backend_error(name, error, "cannot be reached")
                answers[name] = error
        assert answers["contains"] is not True, "the store cannot be reached, and contains() finds a key in it"
        found = answers["read"]
        assert not found or isinstance(found, BackendError), "the store cannot be reached, and read() finds a frame"
        return answers["write"] is None and answers["delete"] is not None


def _answer_of(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except BackendError as error:
        raise AssertionError(f"one key fails, and {name}() raises for all of its batch: {error}") from error


def _served(call: Future[Any]) -> bool:
    """Did this read or write work for every key?"""
    return not call.exception() and not any(each == 0 or isinstance(each, BackendError) for each in call.result())


def _must_be_backend_error(name: str, error: BaseException | None, what: str) -> None:
    assert error is None or isinstance(error, BackendError), (
        f"the store {what}; {name}() raises BackendError or answers; it raised {type(error).__name__}: {error}"
    )


def _when_it_works(call: Callable[[], T]) -> T:
    """The result of the call once it raises BackendError no more: not at once, but before long."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except BackendError as error:
            assert time.monotonic() < deadline, (
                f"the store has served again for {PATIENCE:g} seconds, and calls still fail: {error}"
            )
            time.sleep(0.05)
