"""A faulty backend goes wrong as planned, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from faulty_backend import Fault, FaultyBackend, always, every, now_and_then
from machine import LAYOUT, NAMESPACE, Slots
from patience import HANG, wait_until

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.work.io_pool import IOPool
from kvtier_testing.samples import make_frame, make_keys

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


def test_a_fault_raises_in_every_nth_call(backend):
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


@pytest.mark.parametrize("method", ["contains", "read", "write", "delete", "scan", "close"])
def test_any_exception_from_any_method(backend, method):
    backend.plan = always(Fault(error=ZeroDivisionError("planned")), method)
    into = [memoryview(bytearray(len(FRAME)))]
    arguments = {"read": ([THERE], into), "write": ([THERE], [FRAME]), "scan": (), "close": ()}
    with pytest.raises(ZeroDivisionError, match="planned"):
        getattr(backend, method)(*arguments.get(method, ([THERE],)))


def test_an_error_keeps_no_view(backend):
    backend.plan = always(Fault(error=BackendError("planned")))
    memory = bytearray(len(FRAME))
    for _ in range(2):
        with memoryview(memory) as view, pytest.raises(BackendError) as raised:
            backend.read([THERE], [view[:]])
        del raised
    memory.append(0)  # BufferError while any view is left


@pytest.mark.parametrize("surplus", [1, -1, -1 - len(FRAME), 1 << 60])
def test_a_fault_returns_a_wrong_length(backend, surplus):
    backend.plan = always(Fault(surplus=surplus))
    assert read(backend) == ([len(FRAME) + surplus, surplus], FRAME)


@pytest.mark.parametrize("answers", [-3, -1, 1, 3])
def test_a_fault_returns_more_answers_than_keys_or_fewer(backend, answers):
    backend.plan = always(Fault(answers=answers))
    assert len(read(backend)[0]) == len(backend.contains([THERE, ABSENT])) == max(0, 2 + answers)


def test_a_fault_returns_other_bytes(backend):
    backend.plan = always(Fault(damage=True))
    counts, view = read(backend)
    assert counts == [len(FRAME), 0]
    assert view != FRAME


def test_a_fault_returns_the_frame_of_another_key(backend):
    backend.write([ABSENT], [make_frame(ABSENT)])
    backend.plan = always(Fault(instead=ABSENT))
    assert read(backend) == ([len(FRAME)] * 2, make_frame(ABSENT))


def test_a_fault_loses_the_call(backend):
    backend.plan = always(Fault(drop=True))
    backend.write([ABSENT], [FRAME])
    backend.delete([THERE])
    assert read(backend)[0] == [0, 0]
    assert list(backend.contains([THERE])) == [False]
    assert list(backend.scan()) == []
    backend.plan = always(Fault())
    assert list(backend.scan()) == [(THERE, len(FRAME))]


def test_a_fault_loses_the_keys_afterwards(backend):
    backend.plan = always(Fault(lose=True))
    assert read(backend) == ([len(FRAME), 0], FRAME)
    assert read(backend)[0] == [0, 0]
    backend.write([ABSENT], [FRAME])
    assert list(backend.scan()) == []


def test_a_slow_backend_takes_its_delay(backend):
    backend.plan = always(Fault(delay=0.05))
    begun = time.monotonic()
    backend.contains([THERE])
    assert time.monotonic() - begun >= 0.05


def test_a_fault_hangs_until_it_is_released(backend):
    begun, release = threading.Event(), threading.Event()
    hangs = always(Fault(until=release), "contains")
    backend.plan = lambda method, call: begun.set() or hangs(method, call)
    pool = IOPool("test")
    answers = []
    pool.submit_load(lambda: backend.contains([THERE]), lambda outcome: answers.append(outcome.value))
    assert begun.wait(HANG)
    assert not pool.close(0.05)
    assert read(backend)[0] == [len(FRAME), 0], "the other calls go on"
    release.set()
    assert pool.close(HANG)
    pool.step()
    assert answers == [[True]]


HANGING = """
import threading
from test_faults import THERE, Dict
from faulty_backend import Fault, FaultyBackend, always
from kvtier_core.work.io_pool import IOPool

begun = threading.Event()
fault = Fault(until=threading.Event())
backend = FaultyBackend(Dict(), lambda method, call: begun.set() or fault)
pool = IOPool("test")
pool.submit_load(lambda: backend.contains([THERE]), print)
assert begun.wait()
assert not pool.close(0.05)
print("the end")
"""


def test_the_end_of_a_process_does_not_wait_for_a_call_that_hangs():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", HANGING], env=env, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def test_calls_are_noted(backend):
    read(backend)
    backend.delete([THERE])
    assert backend.calls == ["write", "read", "delete"]


def test_now_and_then_is_the_same_for_the_same_seed():
    faults = Fault(drop=True), Fault(damage=True)
    plans = [now_and_then(seed, 0.3, *faults) for seed in (1, 1, 2)]
    first, again, other = ([plan("read", call) for call in range(200)] for plan in plans)
    assert first == again != other
    assert 30 < 200 - first.count(Fault()) < 90


# -- the end of a stack over stores that go wrong ------------------------------------------------------


def open_over(*stores):
    """An arena over these stores, on real threads."""
    tiers = [
        StoreTier(
            f"store {i}",
            store,
            pool=IOPool(f"test{i}"),
            index=CacheIndex(LruConfig().open()),
            codec=FrameCodec(NAMESPACE, LAYOUT),
            capacity=LAYOUT.frame_nbytes,
            inflight=LAYOUT.frame_nbytes,
        )
        for i, store in enumerate(stores)
    ]
    arena = Arena("arena", 0, Slots(1), CacheIndex(LruConfig().open()))
    return StorageManager([arena, *tiers], namespace=NAMESPACE, layout=LAYOUT, pool=IOPool("seal"))


@pytest.mark.parametrize("error", [BackendError("planned"), ZeroDivisionError("planned")])
def test_a_store_that_raises_in_close_keeps_no_other_open(error):
    stores = [FaultyBackend(Dict(), always(fault, "close")) for fault in (Fault(error=error), Fault())]
    open_over(*stores).close(timeout=HANG)
    assert [store.calls for store in stores] == [["close"]] * 2


def test_a_store_that_hangs_in_close_delays_no_one():
    release = threading.Event()
    stores = [FaultyBackend(Dict(), always(fault, "close")) for fault in (Fault(until=release), Fault())]
    patience = threading.Timer(HANG, release.set)
    patience.start()
    open_over(*stores).close(timeout=0.05)
    patience.cancel()
    wait_until(lambda: [store.calls for store in stores] == [["close"]] * 2)
    assert not release.is_set(), "somebody waited for the call that hangs"
    release.set()
