"""The mover of a device: the library as it is, over a driver whose streams run when a test says so."""

import ctypes
import mmap
import threading

import attrs
import pytest
from fake_cuda import FakeCuda, _Event, anonymous
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG
from test_mover import World, jobs

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.layouts import ChunkLayout
from kvtier_core.transfer.cuda import host_registration, opening
from kvtier_core.transfer.cuda.autotune import Choice, ScratchAutotune, choose, decided
from kvtier_core.transfer.cuda.host_registration import HostRegistration, Pieces
from kvtier_core.transfer.cuda.library import Direction, Method, NativePart
from kvtier_core.transfer.cuda.mover import DeviceMover
from kvtier_core.transfer.page_lists import Layer
from kvtier_testing.samples import make_group, make_layout

CHUNK = [[0, 1, 2, 3]]
WAYS = st.sampled_from(Method)
#: So little that a job of these tests goes in several slices.
HALF_NBYTES = 512


def ended(mover):
    """Jobs that are reported, and whether they succeeded."""
    return [(job, ok) for job, ok, *_ in mover.finished()]


def make_world():
    return World(make_layout(page_nbytes=(48, 96), blocks=4), gaps=[0, 16])


@pytest.fixture
def runtime():
    return make_world()


# -- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half_nbytes", [HALF_NBYTES, 64 << 10])
@pytest.mark.parametrize("method", list(Method)[:2])
@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_a_job_stores_its_pages(method, half_nbytes, job):
    runtime, pages, slots = job
    expected = runtime.after_store(pages, slots)
    mover = FakeCuda().mover(runtime, autotune=decided(method), half_nbytes=half_nbytes)
    mover.store(1, pages, slots)
    assert ended(mover) == [(1, True)]
    mover.close()
    assert runtime.state() == expected


@pytest.mark.parametrize("half_nbytes", [HALF_NBYTES, 64 << 10])
@pytest.mark.parametrize("method", Method)
@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_a_job_loads_its_pages(method, half_nbytes, job):
    runtime, pages, slots = job
    expected = runtime.after_load(slots, pages)
    mover = FakeCuda().mover(runtime, autotune=decided(method), half_nbytes=half_nbytes)
    mover.load(1, slots, pages)
    assert ended(mover) == [(1, True)]
    mover.close()
    assert runtime.state() == expected


# -- order -----------------------------------------------------------------------------------------------


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


def engine_with_few_blocks(runtime, mover, cuda, rounds=12):
    """Chunks are computed, stored and forgotten, and their blocks given away at once: to a forward, or to a load."""
    under_way, computed, reported = {}, {}, set()
    for job in range(rounds):
        slot = job % 3
        row = cuda.rng.sample(range(runtime.kv_cache.blocks), 4)
        if under_way.get(slot) is not None:  # the owner gives a slot to nobody before its job was reported
            settle(mover, cuda, under_way.pop(slot)[0], reported)
            assert payload(runtime, slot) == computed[slot]
        stores_to_fence = [other for other, blocks in under_way.values() if not set(blocks).isdisjoint(row)]
        if slot in computed and cuda.rng.random() < 0.4:
            mover.load(job, [slot], [[row]])
            settle(mover, cuda, job, reported)
            assert read(runtime, row) == computed[slot], "the engine reads what was not loaded"
            continue
        mover.fence(stores_to_fence)
        byte = cuda.rng.randrange(256)
        cuda.engine.run(lambda row=row, byte=byte: write(runtime, row, byte))
        mover.store(job, [[row]], [slot])
        under_way[slot] = job, row
        computed[slot] = bytes([byte]) * runtime.part.shard_of(0).nbytes
        for _ in range(cuda.rng.randrange(4)):
            cuda.step()
    cuda.finish()
    for slot, content in computed.items():
        assert payload(runtime, slot) == content, "the engine overtook a store"


def settle(mover, cuda, job, reported):
    """Until the job is among those that were reported, which are kept."""
    while job not in reported:
        moved = cuda.step()
        reported.update(number for number, ok in ended(mover) if ok)
        assert moved or job in reported


def run(seed, store, load, kind=DeviceMover, **options):
    runtime, cuda = make_world(), FakeCuda(deferred=True, seed=seed, **options)
    mover = cuda.mover(runtime, autotune=by(store, load), half_nbytes=HALF_NBYTES)
    mover.__class__ = kind
    try:
        engine_with_few_blocks(runtime, mover, cuda)
    finally:
        cuda.finish()
        mover.close()


def by(store, load):
    """Stores are made in one way, loads in another."""
    return lambda layers, possible, to_slots: decided(store if to_slots else load)(layers, possible, to_slots)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), store=WAYS, load=WAYS)
def test_copies_are_right_in_any_order_of_the_streams(seed, store, load):
    run(seed, store, load)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), store=WAYS, load=WAYS, streams=st.integers(1, 4))
def test_streams_that_are_one_another_or_the_engines_change_nothing(seed, store, load, streams):
    run(seed, store, load, streams=streams)


@pytest.mark.parametrize("to_slots", [True, False])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_slices_of_a_job_use_the_same_memory_one_after_the_other(to_slots, seed):
    runtime = World(make_layout(page_nbytes=(48, 96), blocks=2), gaps=[0, 16])
    cuda = FakeCuda(deferred=True, seed=seed)
    mover = cuda.mover(runtime, autotune=decided(Method.STAGED), half_nbytes=256)
    pages, slots = [[[0, 1]], [[4, 3]], [[7, 2]]], [2, 0, 1]
    expected = runtime.after_store(pages, slots) if to_slots else runtime.after_load(slots, pages)
    if to_slots:
        mover.store(1, pages, slots)
    else:
        mover.load(1, slots, pages)
    cuda.finish()
    mover.close()
    assert runtime.state() == expected


class WithoutFence(DeviceMover):
    def fence(self, jobs):
        pass


class BeforeTheForward(DeviceMover):
    def mark(self):
        event = self._engine.Event()
        event.record(self._stores.kernels)
        return event


class LoadsOvertakeStores(DeviceMover):
    def load(self, job, slots, pages, after=None):
        held = self._jobs
        self._jobs = {number: attrs.evolve(each, read=frozenset()) for number, each in held.items()}
        super().load(job, slots, pages, after)
        self._jobs = {**held, **{job: self._jobs[job]}}


class ReportedWhenGathered(DeviceMover):
    """As if the bus were not part of a store."""

    def store(self, job, pages, slots):
        super().store(job, pages, slots)
        self._jobs[job] = attrs.evolve(self._jobs[job], done=self._jobs[job].pages)


@pytest.mark.parametrize(
    "kind, store",
    [
        *(
            (kind, method)
            for kind in (WithoutFence, BeforeTheForward, LoadsOvertakeStores)
            for method in list(Method)[:2]
        ),
        (ReportedWhenGathered, Method.STAGED),
    ],
)
def test_the_test_of_order_would_see(kind, store):
    def found(seed):
        try:
            run(seed, store, Method.STAGED, kind)
        except AssertionError:
            return True
        return False

    assert any(found(seed) for seed in range(300))


@pytest.mark.parametrize("method", list(Method)[:2])
def test_no_call_waits_for_the_device(runtime, method):
    """No call waits for the device, and a job is reported when its last copy has been made."""
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(method))
    before = runtime.state()
    mover.store(1, [CHUNK], [0])
    mover.load(2, [1], [[[4, 5, 6, 7]]])
    mover.fence([1])
    mover.wait([1, 2], timeout=0)
    assert (ended(mover), runtime.state()) == ([], before)
    cuda.finish()
    assert sorted(ended(mover)) == [(1, True), (2, True)]
    assert ended(mover) == []
    mover.close()


@pytest.mark.parametrize("method", Method)
def test_a_load_waits_for_no_forward_of_its_own_step(runtime, method):
    """Which touches none of its pages. Without a mark it waits for whatever was enqueued."""
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(method))
    cuda.engine.run(lambda: None)
    mark = mover.mark()
    cuda.engine.run(lambda: None)
    mover.load(1, [1], [CHUNK], mark)
    while cuda.engine.work > 1:  # the forward of this step is left
        assert cuda.step()
    cuda.hold(cuda.engine)
    cuda.finish()
    assert ended(mover) == [(1, True)]
    mover.load(2, [1], [CHUNK])
    cuda.finish()
    assert ended(mover) == []
    cuda.hold(None)
    cuda.finish()
    assert ended(mover) == [(2, True)]
    mover.close()


@pytest.mark.parametrize("ask", [ended, lambda mover: mover.wait([1])])
def test_a_question_that_fails_does_not_end_a_job(runtime, monkeypatch, ask):
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(Method.DIRECT))
    mover.load(1, [1], [CHUNK])

    def refused(event):
        raise RuntimeError("not while a graph is captured")

    (job,) = mover._jobs.values()
    with monkeypatch.context() as asked:
        asked.setattr(type(job.done), "query", refused)
        ask(mover)
        assert not mover._loads.kernels.work, "it was still under way"
    mover.close()


@pytest.mark.parametrize("method", list(Method)[:2])
def test_a_lost_device_has_copied_nothing_and_delays_no_one(runtime, method):
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(method))
    mover.store(1, [CHUNK], [0])
    mover.load(2, [1], [[[4, 5, 6, 7]]])
    cuda.lose()
    mover.wait([1, 2])
    assert sorted(ended(mover)) == [(1, False), (2, False)]
    mover.close()


def test_pages_are_free_when_they_are_gathered(runtime):
    """The engine goes on before a byte has passed the bus."""
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(Method.STAGED))
    bus, gone_on = mover._stores.bus, []
    mover.store(1, [CHUNK], [0])
    mover.fence([1])
    cuda.engine.run(lambda: gone_on.append(True))
    cuda.hold(bus)
    cuda.finish()
    assert gone_on and bus.work and ended(mover) == []
    cuda.hold(None)
    cuda.finish()
    assert ended(mover) == [(1, True)]
    mover.close()


def test_a_fence_for_a_reported_job_does_nothing(runtime):
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(Method.DIRECT))
    mover.store(1, [CHUNK], [0])
    cuda.finish()
    mover.finished()
    mover.fence([1, 17])
    assert not cuda.engine.work
    mover.close()


@pytest.mark.parametrize("method", list(Method)[:2])
def test_a_copy_that_fails_has_ended_before_that_is_said(runtime, method, caplog):
    cuda = FakeCuda(deferred=True)
    cuda.c.fake_version(12000)
    mover = cuda.mover(runtime, autotune=decided(method), half_nbytes=HALF_NBYTES)
    cuda.fail("cuMemcpyDtoHAsync", after=1, times=1, result=719)
    mover.store(1, [CHUNK, [[4, 5, 6, 7]]], [0, 1])
    assert ended(mover) == []
    assert "cannot enqueue copies: CUDA cannot copy to the host: " in caplog.text
    streams = mover._stores
    cuda.finish()
    assert not streams.kernels.work and not streams.bus.work
    assert ended(mover) == [(1, False)]
    mover.close()


@pytest.mark.parametrize("method", list(Method)[:2])
@pytest.mark.parametrize("to_slots", [True, False], ids=["store", "load"])
@pytest.mark.parametrize("records", [0, 1])
def test_a_job_whose_end_cannot_be_recorded_fails_when_its_copies_have_ended(
    runtime, monkeypatch, method, to_slots, records
):
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(method))
    mark, left, streams = mover.mark(), [records], mover._stores if to_slots else mover._loads
    record = _Event.record

    def refused(event, stream):
        if stream is not cuda.engine and not left[0]:
            raise RuntimeError("no event")
        left[0] -= stream is not cuda.engine
        record(event, stream)

    monkeypatch.setattr(_Event, "record", refused)
    if to_slots:
        mover.store(1, [CHUNK], [0])
    else:
        mover.load(1, [0], [CHUNK], mark)
    assert ended(mover) == [(1, False)]
    assert not streams.kernels.work and not streams.bus.work
    mover.close()


@pytest.mark.parametrize("refused", ["mark", "wait"])
def test_a_job_that_cannot_begin_keeps_no_place_for_checksums(runtime, monkeypatch, refused):
    cuda = FakeCuda()
    mover = cuda.mover(runtime, autotune=decided(Method.STAGED))

    def no_more(*_):
        raise RuntimeError("no event")

    with monkeypatch.context() as patched:
        if refused == "mark":
            patched.setattr(_Event, "record", no_more)
        else:
            patched.setattr(type(cuda.engine), "wait_event", no_more)
        for job in range(100):
            with pytest.raises(RuntimeError, match="^no event$"):
                mover.store(job, [CHUNK], [0])
    mover.store(1, [CHUNK], [0])
    assert [result.checksums != () for result in mover.finished()] == [True]
    mover.close()


def test_a_failed_store_is_reported_once_it_reads_no_page_any_more():
    """The pages of one group are being gathered when those of the other cannot be; nothing is on the bus yet."""
    runtime = World(ChunkLayout([make_group((48,)), make_group((96,), name="group 1")], 64))
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(Method.STAGED))
    cuda.fail("cuLaunchKernel", after=1, times=1, result=719)
    mover.store(1, [[[0, 1, 2, 3], [4, 5, 6, 7]]], [0])
    cuda.hold(mover._stores.kernels)
    cuda.finish()
    assert ended(mover) == []
    cuda.hold(None)
    cuda.finish()
    assert ended(mover) == [(1, False)]
    mover.close()


def test_close_waits_and_then_refuses(runtime):
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(Method.STAGED))
    mover.store(1, [CHUNK], [0])
    threading.Timer(0.05, cuda.finish).start()
    mover.close()
    mover.close()
    assert ended(mover) == [(1, True)]
    cuda.assert_all_returned()
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
        ([CHUNK], [0, 1], "expected pages of 2 chunks, got 1"),
    ],
)
def test_wrong_numbers_begin_no_copy(runtime, pages, slots, why):
    before, mover = runtime.state(), FakeCuda().mover(runtime, autotune=decided(Method.DIRECT))
    for begin in (lambda: mover.store(1, pages, slots), lambda: mover.load(1, slots, pages)):
        with pytest.raises(ContractError) as caught:
            begin()
        assert str(caught.value) == why
    assert (runtime.state(), mover.finished()) == (before, [])
    mover.close()


def test_all_streams_go_before_the_engines(runtime):
    """At its priority, copies on an H100 waited until a CUDA graph had ended."""
    cuda = FakeCuda()
    mover = cuda.mover(runtime, autotune=decided(Method.DIRECT))
    assert [stream.priority for stream in cuda._made] == [0, -1, -1, -1, -1]
    mover.close()


def test_a_job_under_way_is_not_begun_again(runtime):
    cuda = FakeCuda(deferred=True)
    mover = cuda.mover(runtime, autotune=decided(Method.DIRECT))
    mover.store(1, [CHUNK], [0])
    with pytest.raises(ContractError, match="^job 1 has not ended$"):
        mover.load(1, [0], [CHUNK])
    cuda.finish()
    mover.close()


# -- page-locking ----------------------------------------------------------------------------------------

PAGE = mmap.PAGESIZE
BASE = 64 * PAGE


class Kernel:
    """Locks what it is asked to when it may, and remembers."""

    def __init__(self, pieces=1000):
        self.may = threading.Semaphore(pieces)
        self.locked, self.refusing = {}, False

    def lock(self, address, nbytes):
        assert self.may.acquire(timeout=HANG)
        if self.refusing:
            raise BackendError("no more")
        self.locked[address] = nbytes

    def unlock(self, address):
        del self.locked[address]


def registered(kernel, address=BASE, nbytes=10 * PAGE, stride=3 * PAGE, **options):
    return HostRegistration(Pieces(address, nbytes, 3 * PAGE, stride), kernel.lock, kernel.unlock, **options)


def eventually(done):
    waited = threading.Event()
    for _ in range(3000):
        if done():
            return True
        waited.wait(0.01)
    return False


def test_all_is_locked_in_pieces_and_given_back():
    kernel = Kernel()
    registration = registered(kernel)
    assert eventually(lambda: registration.end == BASE + 10 * PAGE)
    assert kernel.locked == {BASE + first * PAGE: count * PAGE for first, count in ((0, 3), (3, 3), (6, 3), (9, 1))}
    assert registration.facts()["page-locked"] == "40KiB -> 40KiB"
    registration.close().join()
    assert kernel.locked == {}


def test_the_first_slots_are_locked_at_once():
    """However long it is: the self-test uses the first slots."""
    kernel = Kernel(pieces=2)
    registration = registered(kernel, at_once=4 * PAGE)
    assert registration.end == BASE + 6 * PAGE
    kernel.may.release(2)
    registration.close().join()
    kernel = Kernel(pieces=1)
    kernel.lock = lambda address, nbytes, lock=kernel.lock: lock(address, nbytes) or setattr(kernel, "refusing", True)
    kernel.may.release()
    with pytest.raises(BackendError, match="^no more$"):
        registered(kernel, at_once=4 * PAGE)
    assert kernel.locked == {}, "half of it is given back"


def test_pieces_begin_and_end_where_pages_of_the_system_do():
    """Else neighbours would share one, and the second could not be locked."""
    kernel = Kernel()
    registration = registered(kernel, BASE + 100, 4 * PAGE)
    assert eventually(lambda: registration.end == BASE + 5 * PAGE)
    assert kernel.locked == {BASE: 3 * PAGE, BASE + 3 * PAGE: 2 * PAGE}
    registration.close().join()


def test_in_every_stride_one_piece_is_locked():
    """The shards of one rank, in slots of which the rest is of others."""
    kernel = Kernel(pieces=1)
    registration = registered(kernel, BASE + PAGE, 16 * PAGE, stride=8 * PAGE, at_once=8 * PAGE)
    assert (kernel.locked, registration.end) == ({BASE + PAGE: 3 * PAGE}, BASE + 9 * PAGE)
    kernel.may.release()
    assert eventually(lambda: registration.end == BASE + 17 * PAGE)
    assert kernel.locked == {BASE + PAGE: 3 * PAGE, BASE + 9 * PAGE: 3 * PAGE}
    assert registration.facts()["page-locked"] == "24KiB -> 24KiB"
    registration.close().join()
    assert kernel.locked == {}


def test_after_each_piece_the_driver_is_left_to_the_engine_for_as_long():
    pauses, kernel = [], Kernel(pieces=1)
    registration = registered(kernel, pause=pauses.append)
    kernel.may.release(3)
    assert eventually(lambda: registration.end == BASE + 10 * PAGE)
    registration.close().join()
    assert len(pauses) == 3 and all(pause > 0 for pause in pauses)


def test_memory_is_used_when_it_is_locked_and_not_before():
    kernel = Kernel(pieces=1)
    registration = registered(kernel)
    assert registration.end == BASE + 3 * PAGE
    kernel.may.release()
    assert eventually(lambda: registration.end == BASE + 6 * PAGE)
    kernel.may.release(2)
    registration.close().join()
    assert kernel.locked == {}


def test_slots_that_cannot_be_locked_are_not_used_and_the_fact_says_why():
    kernel = Kernel(pieces=1)
    registration = registered(kernel)
    kernel.refusing = True
    kernel.may.release()
    assert eventually(lambda: "no more" in registration.facts()["page-locked"])
    assert registration.facts()["page-locked"] == "40KiB -> 12KiB (no more)"
    assert registration.end == BASE + 3 * PAGE
    registration.close().join()


def test_locking_is_retried_and_the_failure_is_logged_once(caplog):
    caplog.set_level("INFO", "kvtier")
    pauses, kernel = [], Kernel(pieces=1)
    registration = registered(kernel, pause=pauses.append)
    kernel.refusing = True
    kernel.may.release(3)
    assert eventually(lambda: sum(pauses) > 0.6), "the third try comes later than the second"
    kernel.refusing = False
    kernel.may.release(3)
    assert eventually(lambda: registration.end == BASE + 10 * PAGE)
    assert registration.facts()["page-locked"] == "40KiB -> 40KiB"
    registration.close().join()
    assert caplog.messages == [
        "kvtier: cannot page-lock memory: 40KiB -> 12KiB: unlocked memory is not used; retrying: no more",
        "kvtier: page-locking has finished: 40KiB -> 40KiB",
    ]


def test_closing_does_not_wait_for_the_next_try(monkeypatch):
    monkeypatch.setattr(host_registration, "_FIRST_RETRY", 10 * HANG)
    kernel = Kernel(pieces=1)
    registration = registered(kernel)
    kernel.refusing = True
    kernel.may.release()
    assert eventually(lambda: "no more" in registration.facts()["page-locked"])
    unlocking = registration.close()
    unlocking.join(HANG)
    assert not unlocking.is_alive() and kernel.locked == {}


def test_memory_stays_mapped_until_it_is_unlocked_and_the_engine_need_not_wait():
    """Else the driver would unlock what is there by then."""
    kernel, memory = Kernel(), anonymous(10 * PAGE)
    keep = ctypes.c_char.from_buffer(memory)
    may, unlock = threading.Event(), kernel.unlock
    kernel.unlock = lambda address: may.wait(HANG) and unlock(address)
    registration = registered(kernel, keep=keep)
    del keep
    unlocking = registration.close()
    try:
        with pytest.raises(BufferError):
            memory.close()
        assert kernel.locked and unlocking.is_alive() and not unlocking.daemon, "the process waits for it"
    finally:
        may.set()
    unlocking.join(HANG)
    assert kernel.locked == {}
    memory.close()


def test_a_graph_may_be_captured_while_slots_are_locked():
    """Torch captures in the global mode, in which page-locking by any other thread fails, and spoils the capture."""
    cuda = FakeCuda()
    device, memory = cuda.device(), anonymous(16 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pieces = Pieces(address, 16 * PAGE, 4 * PAGE, 4 * PAGE)
    with cuda.capturing():
        registration = HostRegistration(pieces, device.lock, device.unlock)
        assert eventually(lambda: registration.end == address + 16 * PAGE), registration.facts()
        registration.close().join()
    assert cuda.c.fake_locked_ranges() == 0


def test_an_arena_of_which_nothing_can_be_locked_is_refused(runtime):
    cuda = FakeCuda()
    cuda.fail("cuMemHostRegister", result=2)
    with pytest.raises(BackendError, match=r"^CUDA cannot page-lock memory: .*, 2\)$"):
        cuda.mover(runtime, autotune=decided(Method.DIRECT))
    assert not host_registration._shared
    assert cuda.c.fake_allocations() == 0


def test_movers_over_the_same_memory_lock_it_once(runtime):
    """The driver refuses to lock an address twice."""
    cuda = FakeCuda()
    device, memory = cuda.device(), anonymous(3 * runtime.layout.frame_nbytes)
    options = {"autotune": decided(Method.STAGED), "checksums": False}
    movers = [cuda.mover(runtime, memory=memory, device=device, **options) for _ in range(3)]
    assert cuda.calls("cuMemHostRegister") == 1
    while movers:
        assert cuda.c.fake_locked_ranges() == 1
        movers.pop().close()
    cuda.assert_all_returned()


def test_memory_that_is_being_unlocked_is_locked_again_afterwards(runtime):
    cuda = FakeCuda()
    device, memory = cuda.device(), anonymous(300 * runtime.layout.frame_nbytes)
    for _ in range(20):
        cuda.mover(runtime, memory=memory, device=device, autotune=decided(Method.DIRECT)).close()
    cuda.assert_all_returned()


@pytest.mark.parametrize("method", Method)
def test_each_rank_locks_its_own_shards_alone(method, monkeypatch):
    """The driver of the tests refuses copies that leave what is locked, and to lock a page of the system twice."""
    monkeypatch.setattr(opening, "_SHORTEST_PIECE", PAGE)
    layout, memory, cuda = make_layout((PAGE // 4,), blocks=4, ranks=2), anonymous(3 * 3 * PAGE), FakeCuda()
    device, movers = cuda.device(), []
    for rank in range(2):
        runtime = World(layout, rank=rank)
        memory[:], runtime.slots = runtime.slots, memoryview(memory)
        mover = cuda.mover(runtime, autotune=decided(method), device=device, checksums=False)
        movers.append(mover)
        assert eventually(lambda mover=mover: mover.facts()["page-locked"] == "12KiB -> 12KiB")
        assert cuda.c.fake_locked_ranges() == 3 * len(movers)
        expected = runtime.after_load([2, 0], [CHUNK, [[4, 5, 6, 7]]])
        mover.load(1, [2, 0], [CHUNK, [[4, 5, 6, 7]]])
        assert ended(mover) == [(1, True)] and runtime.state() == expected
        if method is not Method.KERNEL:
            expected = runtime.after_store([CHUNK], [1])
            mover.store(2, [CHUNK], [1])
            assert ended(mover) == [(2, True)] and runtime.state() == expected
    for mover in movers:
        mover.close()
    cuda.assert_all_returned()


@pytest.mark.parametrize(
    "layout",
    [
        make_layout((PAGE // 4,), blocks=4),
        make_layout((PAGE // 4,), blocks=4, ranks=2, replicas=2),
        make_layout((PAGE // 4,), blocks=3, ranks=2),
        make_layout((PAGE // 8,), blocks=4, ranks=2),
        make_layout((9 << 20,), blocks=4, ranks=2),
    ],
    ids=["one rank", "the same on both", "within a page", "short", "long"],
)
def test_else_all_of_the_memory_is_locked(layout, monkeypatch):
    monkeypatch.setattr(opening, "_SHORTEST_PIECE", PAGE)
    cache = World(make_layout((8,), blocks=1)).kv_cache
    for rank in range(layout.ranks):
        pieces = opening._pieces(attrs.evolve(cache, layout=layout, rank=rank), BASE, 7, layout.frame_nbytes)
        assert pieces == Pieces(BASE, 7 * layout.frame_nbytes)


def partly_locked(runtime, slots):
    """A mover of which so many slots are locked, and a byte less than one more."""
    mover = FakeCuda().mover(runtime, autotune=decided(Method.STAGED))
    (registration,) = host_registration._shared.values()
    registration.end = mover._slots.address + (slots + 1) * runtime.layout.frame_nbytes - 1
    return mover


def test_of_a_store_with_slots_that_are_not_locked_yet_the_others_are_filled():
    runtime = World(make_layout(page_nbytes=(48, 96), blocks=2), slots=5)
    mover = partly_locked(runtime, 3)
    pages, slots = [[[0, 1]], [[2, 3]], [[4, 5]]], [2, 4, 0]
    expected = runtime.after_store([pages[0], pages[2]], [2, 0])
    mover.store(1, pages, slots)
    ((job, ok, checksums, filled),) = mover.finished()
    assert (job, ok, list(checksums), list(filled)) == (1, False, [], [0, 2])
    assert runtime.state() == expected
    mover.close()


def test_a_job_without_locked_slots_fails_and_so_does_a_load_of_any_other():
    runtime = World(make_layout(page_nbytes=(48, 96), blocks=4), slots=5)
    mover = partly_locked(runtime, 3)
    before = runtime.state()
    mover.store(1, [CHUNK], [4])
    mover.load(2, [0, 3], [CHUNK, [[4, 5, 6, 7]]])
    assert (mover.finished(), runtime.state()) == ([(1, False, (), ()), (2, False, (), ())], before)
    mover.close()


# -- which way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "direct, staged, kernel, chosen",
    [
        (10, 20, None, Method.STAGED),
        (10, 10.5, 11.5, Method.DIRECT),  # not worth the multiprocessors that they take from the engine
        (10, 11.5, 12, Method.STAGED),
        (10, 11, 20, Method.KERNEL),
        (10, None, None, Method.DIRECT),
    ],
)
def test_the_fastest_is_taken_if_it_is_worth_it(direct, staged, kernel, chosen):
    speeds = {Method.DIRECT: direct, Method.STAGED: staged, Method.KERNEL: kernel}
    assert choose({method: speed for method, speed in speeds.items() if speed}).method == chosen


def test_a_device_that_copies_nothing_is_refused():
    with pytest.raises(BackendError, match="^no copy method works for these pages on this device$"):
        choose({})


def test_the_log_has_the_figures():
    choice = Choice(Method.STAGED, {Method.DIRECT: 12.34e9, Method.STAGED: 48e9})
    assert str(choice) == "staged (direct 12.3 GB/s, staged 48.0 GB/s)"
    assert str(Choice(Method.DIRECT)) == "direct (not measured)"


def autotuned(cuda, layers, to_slots):
    device = cuda.device()
    through = [Direction(cuda.Stream(), cuda.Stream(), device.staging(64 << 10)) for _ in range(2)]
    return ScratchAutotune(device, *through, nbytes=1 << 20)(layers, list(Method)[: 2 if to_slots else 3], to_slots)


ALTERNATING = [Layer(1000 + 512 * i, 1024, 512, 512 * 4 * i, 0, 4) for i in range(2)]


@pytest.mark.parametrize("to_slots", [True, False])
def test_each_way_is_measured_on_pages_placed_like_the_engines(to_slots):
    cuda = FakeCuda()
    choice = autotuned(cuda, [*ALTERNATING, Layer(1 << 20, 96, 48, 4096, 4, 2)], to_slots)
    assert set(choice.speeds) == {Method.DIRECT, Method.STAGED} and not choice.wrong
    assert cuda.c.fake_locked_ranges() == 0, "the scratch memory is given back"


def test_kernels_read_slots_only_where_copies_cannot_be_staged():
    device = (cuda := FakeCuda()).device()
    through = [Direction(cuda.Stream(), cuda.Stream()) for _ in range(2)]
    possible = [Method.DIRECT, Method.KERNEL]
    assert set(ScratchAutotune(device, *through, nbytes=1 << 20)(ALTERNATING, possible, False).speeds) == set(possible)


@pytest.mark.parametrize("to_slots", [True, False])
def test_a_way_that_takes_one_page_for_another_is_not_chosen(to_slots, monkeypatch, caplog):
    copy = NativePart.copy

    def mistaken(part, method, to_slots, rows, *others):
        swapped = rows[:-2] + rows[-1:] + rows[-2:-1]
        copy(part, method, to_slots, swapped if method is Method.STAGED else rows, *others)

    monkeypatch.setattr(NativePart, "copy", mistaken)
    choice = autotuned(FakeCuda(), ALTERNATING, to_slots)
    assert (choice.method, choice.wrong) == (Method.DIRECT, [Method.STAGED])
    assert "staged copies wrong bytes" in str(choice)
    assert [record.getMessage() for record in caplog.records] == [
        "kvtier: not used on this device: staged copies wrong bytes"
    ]


def test_a_method_that_does_not_work_is_not_chosen():
    cuda = FakeCuda()
    cuda.fail("cuLaunchKernel", result=719)
    assert set(autotuned(cuda, ALTERNATING, False).speeds) == {Method.DIRECT}


def test_where_nothing_can_be_measured_pages_of_any_size_are_staged():
    cuda = FakeCuda()
    cuda.fail("cuMemHostRegister", result=2)
    assert autotuned(cuda, ALTERNATING, False) == Choice(Method.STAGED)
    assert cuda.c.fake_allocations() == 2, "what was allocated for it is freed"


@pytest.mark.more
def test_an_engine_that_leaves_no_memory_is_served_nevertheless(runtime):
    cuda = FakeCuda()
    cuda.fail("cuMemAlloc", times=2, result=2)  # for staged copies
    expected = runtime.after_store([CHUNK], [0])
    mover = cuda.mover(runtime)
    facts = mover.facts()
    assert facts["stores of group 0"].startswith("direct (direct ") and "staged" not in facts["stores of group 0"]
    mover.store(1, [CHUNK], [0])
    assert (ended(mover), runtime.state()) == ([(1, True)], expected)
    mover.close()


def test_a_driver_without_batches_is_not_used_without_kernels(runtime):
    """A long job would be hundreds of thousands of calls on the engine's thread."""
    cuda = FakeCuda()
    cuda.c.fake_version(12060)
    cuda.c.fake_code(0)
    with pytest.raises(BackendError, match=r"^the driver is older than CUDA 12\.8, and there are no kernels: "):
        cuda.mover(runtime)
