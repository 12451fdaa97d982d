"""A faulty backend goes wrong as planned, and only then."""

import time

import pytest

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend
from kvtier_core.testing import Fault, FaultyBackend, always, every, now_and_then
from kvtier_core.testing.samples import make_frame, make_keys

THERE, ABSENT = make_keys(2)
FRAME = make_frame(THERE)


class Dict(Backend):
    shared = True

    def __init__(self):
        self.frames = {}

    def contains(self, keys):
        return [key in self.frames for key in keys]

    def read(self, keys, into):
        counts = [len(self.frames.get(key, b"")) for key in keys]
        for key, view, count in zip(keys, into, counts, strict=True):
            view[:count] = self.frames.get(key, b"")
        return counts

    def write(self, keys, frames):
        self.frames.update((key, bytes(frame)) for key, frame in zip(keys, frames, strict=True))

    def delete(self, keys):
        for key in keys:
            self.frames.pop(key, None)

    def scan(self):
        return ((key, len(frame)) for key, frame in self.frames.items())


@pytest.fixture
def backend():
    faulty = FaultyBackend(Dict(), always(Fault()))
    faulty.write([THERE], [FRAME])
    return faulty


def read(backend):
    into = [memoryview(bytearray(len(FRAME))) for _ in range(2)]
    return list(backend.read([THERE, ABSENT], into)), into[0]


def test_without_a_fault_it_is_the_other_backend(backend):
    assert backend.shared
    assert list(backend.contains([THERE, ABSENT])) == [True, False]
    assert read(backend) == ([len(FRAME), 0], FRAME)
    assert list(backend.scan()) == [(THERE, len(FRAME))]
    assert backend.facts() == {}
    backend.delete([THERE])
    assert list(backend.contains([THERE])) == [False]
    backend.close()


def test_it_raises_in_every_nth_call(backend):
    backend.plan = every(3, Fault(error=BackendError("planned")))
    failed = 0
    for _ in range(9):
        try:
            backend.contains([THERE])
        except BackendError:
            failed += 1
    assert failed == 3


def test_only_the_named_methods_go_wrong(backend):
    backend.plan = always(Fault(error=BackendError("planned")), "write")
    assert read(backend)[0] == [len(FRAME), 0]
    with pytest.raises(BackendError, match="planned"):
        backend.write([ABSENT], [FRAME])


def test_it_lies_about_lengths(backend):
    backend.plan = always(Fault(surplus=1))
    assert read(backend)[0] == [len(FRAME) + 1, 1]


def test_it_returns_other_bytes(backend):
    backend.plan = always(Fault(damage=True))
    counts, view = read(backend)
    assert counts == [len(FRAME), 0]
    assert view != FRAME


def test_it_loses_keys(backend):
    backend.plan = always(Fault(drop=True))
    backend.write([ABSENT], [FRAME])
    backend.delete([THERE])
    assert read(backend)[0] == [0, 0]
    assert list(backend.contains([THERE])) == [False]
    assert list(backend.scan()) == []
    backend.plan = always(Fault())
    assert list(backend.scan()) == [(THERE, len(FRAME))]


def test_it_is_slow(backend):
    backend.plan = always(Fault(delay=0.05))
    begun = time.monotonic()
    backend.contains([THERE])
    assert time.monotonic() - begun >= 0.05


def test_now_and_then_is_the_same_for_the_same_seed():
    faults = Fault(drop=True), Fault(damage=True)
    plans = [now_and_then(seed, 0.3, *faults) for seed in (1, 1, 2)]
    first, again, other = ([plan("read", call) for call in range(200)] for plan in plans)
    assert first == again != other
    assert 30 < 200 - first.count(Fault()) < 90
