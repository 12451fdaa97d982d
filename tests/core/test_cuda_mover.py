"""The mover of a device: its copies on the CPU, its order on a device whose streams run when a test says so."""

import ctypes
import threading

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mover import World, jobs

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.testing.samples import make_layout
from kvtier_core.testing.streams import LateCopier, SimulatedStreams
from kvtier_core.transfer.cuda.autotune import DMA, KERNEL, choose
from kvtier_core.transfer.cuda.copiers import TorchCopier
from kvtier_core.transfer.cuda.host_registration import HostRegistration, NoRegistration
from kvtier_core.transfer.cuda.mover import DeviceMover

CHUNK = [[0, 1, 2, 3]]


def torch_copier(runtime):
    memory = ctypes.addressof(ctypes.c_char.from_buffer(runtime.slots))
    nbytes = runtime.layout.frame_nbytes
    shards = memory + runtime.part.shard_of(runtime.rank).offset
    return TorchCopier(torch.cpu, runtime.kv_cache, runtime.part, shards, len(runtime.slots) // nbytes, nbytes)


def mover_of(runtime, *, copier=None, streams=torch.cpu, registration=None, kind=DeviceMover):
    slots = len(runtime.slots) // runtime.layout.frame_nbytes
    copiers = [copier or torch_copier(runtime)] * len(runtime.layout.parts)
    return kind(runtime.kv_cache, slots, copiers, streams, registration or NoRegistration())


def ended(mover):
    """Jobs that are reported, and whether they succeeded."""
    return [(job, ok) for job, ok, _ in mover.finished()]


@pytest.fixture
def runtime():
    return World(make_layout(page_nbytes=(48, 96), blocks=4), gaps=[0, 16])


# -- torch's operators -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_torch_stores_what_the_host_mover_stores(job):
    runtime, pages, slots = job
    expected = runtime.after_store(pages, slots)
    mover = mover_of(runtime)
    mover.store(1, pages, slots)
    mover.wait([1])
    assert ended(mover) == [(1, True)]
    assert runtime.state() == expected


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_torch_loads_what_the_host_mover_loads(job):
    runtime, pages, slots = job
    expected = runtime.after_load(slots, pages)
    mover = mover_of(runtime)
    mover.load(1, slots, pages)
    mover.wait([1])
    assert ended(mover) == [(1, True)]
    assert runtime.state() == expected


# -- order -----------------------------------------------------------------------------------------------


def late_copier(runtime):
    return LateCopier(torch_copier(runtime))


def write(runtime, row, byte):
    """What a forward does to the pages of these blocks."""
    for start, run in zip(runtime.starts, runtime.kv_cache.layers, strict=True):
        for block in row:
            begin = start + block * run.stride
            runtime.pages[begin : begin + run.nbytes] = bytes([byte]) * run.nbytes


def read(runtime, row):
    """The pages of these blocks as they lie in a shard."""
    return b"".join(
        runtime.pages[start + block * run.stride :][: run.nbytes]
        for start, run in zip(runtime.starts, runtime.kv_cache.layers, strict=True)
        for block in row
    )


def payload(runtime, slot):
    begin = slot * runtime.layout.frame_nbytes + runtime.part.shard_of(0).offset
    return bytes(runtime.slots[begin : begin + runtime.part.shard_of(0).nbytes])


def engine_with_few_blocks(runtime, mover, device, rounds=12):
    """Chunks are computed, stored and forgotten, and their blocks given away at once: to a forward, or to a load."""
    under_way, computed, reported = {}, {}, set()
    for job in range(rounds):
        slot = job % 3
        row = device.rng.sample(range(runtime.kv_cache.blocks), 4)
        if under_way.get(slot) is not None:  # the owner gives a slot to nobody before its job was reported
            settle(mover, device, under_way.pop(slot)[0], reported)
            assert payload(runtime, slot) == computed[slot]
        stores_to_fence = [other for other, blocks in under_way.values() if not set(blocks).isdisjoint(row)]
        if slot in computed and device.rng.random() < 0.4:
            mover.load(job, [slot], [[row]])
            settle(mover, device, job, reported)
            assert read(runtime, row) == computed[slot], "the engine reads what was not loaded"
            continue
        mover.fence(stores_to_fence)
        byte = device.rng.randrange(256)
        device.engine.run(lambda row=row, byte=byte: write(runtime, row, byte))
        mover.store(job, [[row]], [slot])
        under_way[slot] = job, row
        computed[slot] = bytes([byte]) * runtime.part.shard_of(0).nbytes
        for _ in range(device.rng.randrange(4)):
            device.step()
    device.finish()
    for slot, content in computed.items():
        assert payload(runtime, slot) == content, "the engine overtook a store"


def settle(mover, device, job, reported):
    """Until the job is among those that were reported, which are kept."""
    while job not in reported:
        moved = device.step()
        reported.update(number for number, ok in ended(mover) if ok)
        assert moved or job in reported


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_the_streams_do_first(seed):
    runtime, device = World(make_layout(page_nbytes=(48, 96), blocks=4), gaps=[0, 16]), SimulatedStreams(seed)
    engine_with_few_blocks(runtime, mover_of(runtime, copier=late_copier(runtime), streams=device), device)


class WithoutFence(DeviceMover):
    def fence(self, jobs):
        pass


class BeforeTheForward(DeviceMover):
    def _begin(self, job, stream, *rest, **kwargs):
        wait, stream.wait_event = stream.wait_event, lambda event: None
        try:
            super()._begin(job, stream, *rest, **kwargs)
        finally:
            stream.wait_event = wait


class LoadsOvertakeStores(DeviceMover):
    def load(self, job, slots, pages):
        held = self._jobs
        self._jobs = {number: attrs.evolve(each, read=frozenset()) for number, each in held.items()}
        super().load(job, slots, pages)
        self._jobs = {**held, **{job: self._jobs[job]}}


@pytest.mark.parametrize("kind", [WithoutFence, BeforeTheForward, LoadsOvertakeStores])
def test_the_test_of_order_would_see(kind):
    def found(seed):
        runtime, device = World(make_layout(page_nbytes=(48, 96), blocks=4), gaps=[0, 16]), SimulatedStreams(seed)
        try:
            engine_with_few_blocks(
                runtime, mover_of(runtime, copier=late_copier(runtime), streams=device, kind=kind), device
            )
        except AssertionError:
            return True
        return False

    assert any(found(seed) for seed in range(200))


def test_nobody_is_held_up(runtime):
    """No call waits for the device, and a job is reported when its last copy has been made."""
    device = SimulatedStreams()
    mover = mover_of(runtime, copier=late_copier(runtime), streams=device)
    before = runtime.state()
    mover.store(1, [CHUNK], [0])
    mover.load(2, [1], [[[4, 5, 6, 7]]])
    mover.fence([1])
    mover.wait([1, 2], timeout=0)
    assert (ended(mover), runtime.state()) == ([], before)
    device.finish()
    assert sorted(ended(mover)) == [(1, True), (2, True)]
    assert ended(mover) == []


def test_a_fence_for_a_job_that_was_reported_is_none(runtime):
    device = SimulatedStreams()
    mover = mover_of(runtime, copier=late_copier(runtime), streams=device)
    mover.store(1, [CHUNK], [0])
    device.finish()
    mover.finished()
    mover.fence([1, 17])
    assert not device.engine.work


def test_a_copy_that_fails_has_ended_before_that_is_said(runtime):
    device = SimulatedStreams()
    copier = late_copier(runtime)
    copier.gather = lambda rows, slots, stream: 1 / 0
    mover = mover_of(runtime, copier=copier, streams=device)
    mover.store(1, [CHUNK], [0])
    assert ended(mover) == []
    device.finish()
    assert ended(mover) == [(1, False)]


def test_close_waits_and_then_refuses(runtime):
    device = SimulatedStreams()
    mover = mover_of(runtime, copier=late_copier(runtime), streams=device)
    mover.store(1, [CHUNK], [0])
    threading.Timer(0.05, device.finish).start()
    mover.close()
    mover.close()
    assert ended(mover) == [(1, True)]
    with pytest.raises(ContractError, match="^the mover is closed$"):
        mover.store(2, [CHUNK], [0])


@pytest.mark.parametrize(
    "pages, slots, why",
    [
        ([[[0, 1, 2, 8]]], [0], "block ids [0, 1, 2, 8] are not all NO_BLOCK or one of 8"),
        ([[[0, 1, 2, -2]]], [0], "block ids [0, 1, 2, -2] are not all NO_BLOCK or one of 8"),
        ([[[0, 1, 2]]], [0], "3 block ids for a chunk of 4 (group 0)"),
        ([CHUNK], [3], "slot 3 is not one of 3"),
        ([CHUNK], [-1], "slot -1 is not one of 3"),
        ([CHUNK], [0, 1], "1 chunks of pages for 2 slots"),
    ],
)
def test_wrong_numbers_begin_no_copy(runtime, pages, slots, why):
    before, mover = runtime.state(), mover_of(runtime)
    for begin in (lambda: mover.store(1, pages, slots), lambda: mover.load(1, slots, pages)):
        with pytest.raises(ContractError) as caught:
            begin()
        assert str(caught.value) == why
    assert (runtime.state(), mover.finished()) == (before, [])


def test_a_job_under_way_is_not_begun_again(runtime):
    mover = mover_of(runtime, copier=late_copier(runtime), streams=SimulatedStreams())
    mover.store(1, [CHUNK], [0])
    with pytest.raises(ContractError, match="^job 1 has not ended$"):
        mover.load(1, [0], [CHUNK])


# -- page-locking ----------------------------------------------------------------------------------------


class Kernel:
    """Locks what it is asked to when it may, and remembers."""

    def __init__(self, pieces=1000):
        self.may = threading.Semaphore(pieces)
        self.locked, self.refusing = {}, False

    def register(self, address, nbytes):
        assert self.may.acquire(timeout=30)
        if self.refusing:
            raise BackendError("no more")
        self.locked[address] = nbytes

    def unregister(self, address):
        del self.locked[address]


def registered(kernel, slots=10):
    return HostRegistration(1 << 20, slots, 4096, kernel.register, kernel.unregister, piece_nbytes=3 * 4096 + 100)


def eventually(done):
    waited = threading.Event()
    for _ in range(3000):
        if done():
            return True
        waited.wait(0.01)
    return False


def test_pieces_are_whole_slots_and_are_all_given_back():
    kernel = Kernel()
    registration = registered(kernel)
    assert eventually(lambda: registration.covers([9]))
    assert kernel.locked == {
        (1 << 20) + first * 4096: count * 4096 for first, count in ((0, 3), (3, 3), (6, 3), (9, 1))
    }
    assert registration.facts() == {"page-locked": "40KiB -> 40KiB"}
    registration.close()
    registration.close()
    assert kernel.locked == {}


def test_a_slot_is_used_when_it_is_locked_and_not_before(runtime):
    kernel = Kernel(pieces=1)
    registration = registered(kernel)
    mover = mover_of(runtime, registration=registration)
    assert (registration.covers([2]), registration.covers([3])) == (True, False)
    kernel.may.release()
    assert eventually(lambda: registration.covers([5]))
    assert not registration.covers([0, 6])
    kernel.may.release(2)
    mover.close()
    assert kernel.locked == {}


def test_a_job_with_a_slot_that_is_not_locked_yet_is_a_miss():
    runtime = World(make_layout(page_nbytes=(48, 96), blocks=4), slots=5)
    kernel = Kernel(pieces=1)
    mover = mover_of(runtime, registration=registered(kernel, slots=5))
    before = runtime.state()
    mover.store(1, [CHUNK], [4])
    mover.load(2, [0, 3], [CHUNK, [[4, 5, 6, 7]]])
    assert (ended(mover), runtime.state()) == ([(1, False), (2, False)], before)
    kernel.may.release()
    mover.close()


def test_what_cannot_be_locked_is_not_used_and_says_why():
    kernel = Kernel(pieces=1)
    registration = registered(kernel)
    kernel.refusing = True
    kernel.may.release()
    assert eventually(lambda: "no more" in registration.facts()["page-locked"])
    assert registration.facts() == {"page-locked": "40KiB -> 12KiB (no more)"}
    assert (registration.covers([2]), registration.covers([3])) == (True, False)
    registration.close()


def test_an_arena_of_which_nothing_can_be_locked_is_refused():
    kernel = Kernel()
    kernel.refusing = True
    with pytest.raises(BackendError, match="^no more$"):
        registered(kernel)


# -- copy engine or kernel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, dma, chosen",
    [
        (1.0, 2.0, KERNEL),
        (1.0, 1.1, DMA),  # not worth the multiprocessors that it takes from the engine
        (2.0, 1.0, DMA),
        (None, 1.0, DMA),  # this device does not read host memory
    ],
)
def test_the_faster_one_is_taken(kernel, dma, chosen):
    assert choose(lambda nbytes, to_slots, method: {KERNEL: kernel, DMA: dma}[method], 4096, True) == chosen


def test_a_device_that_copies_nothing_is_refused():
    with pytest.raises(BackendError, match="^pages of 4096 bytes cannot be copied by the device$"):
        choose(lambda nbytes, to_slots, method: None, 4096, True)
