"""Checksums that the device computes: zlib's own, of what was gathered, and believed only if the host agrees."""

import ctypes
import itertools
import random
import zlib

import attrs
import pytest
from fake_cuda import FakeCuda
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_mover import World, jobs

from kvtier_core.engine.worker.self_test import try_copies
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.transfer.cuda.autotune import decided
from kvtier_core.transfer.cuda.checksums import ROW, SumsMemory
from kvtier_core.transfer.cuda.device_slots import DeviceSlots
from kvtier_core.transfer.cuda.library import Method
from kvtier_core.transfer.cuda.opening import HALF_NBYTES
from kvtier_testing.samples import make_layout

#: What a warp sums before it goes on to another place.
SEGMENT = 64 << 10
CHUNK = [[0, 1, 2, 3]]
STAGED = {"autotune": decided(Method.STAGED), "half_nbytes": 512}
LENGTHS = st.integers(0, 1100) | st.builds(
    lambda count, more: count * SEGMENT + more, st.integers(1, 3), st.integers(-9, 9)
)


def on_device(cuda, content, begins, nbytes, stride=0):
    """The checksums of ranges in ``content``, which lies at a multiple of 64 in memory."""
    device, stream = cuda.device(), cuda.Stream()
    memory = SumsMemory(device)
    keep = (ctypes.c_char * (len(content) + 64))()
    at = -ctypes.addressof(keep) % 64
    keep[at : at + len(content)] = content
    sums = memory.take(len(begins))
    device.checksums(ctypes.addressof(keep) + at + begins[0], nbytes, sums, stream, stride)
    cuda.finish()
    told = sums.read()
    memory.give_back(sums)
    memory.close()
    return list(told)


# -- of memory on the device -------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    nbytes=LENGTHS, first=st.integers(0, 40), gap=st.integers(0, 40), count=st.integers(1, 3), seed=st.integers(0, 9)
)
@example(nbytes=0, first=0, gap=0, count=1, seed=0)
@example(nbytes=SEGMENT, first=0, gap=0, count=2, seed=0)
@example(nbytes=2 * SEGMENT + 1, first=15, gap=3, count=3, seed=0)
def test_device_checksums_are_what_zlib_computes(nbytes, first, gap, count, seed):
    cuda = FakeCuda(seed=seed)
    content = cuda.rng.randbytes(first + count * (nbytes + gap))
    begins = [first + i * (nbytes + gap) for i in range(count)]
    expected = [zlib.crc32(content[begin : begin + nbytes]) for begin in begins]
    assert on_device(cuda, content, begins, nbytes, nbytes + gap) == expected


def test_every_bit_counts():
    cuda, nbytes = FakeCuda(), 700
    content = bytearray(cuda.rng.randbytes(nbytes))
    (whole,) = on_device(cuda, bytes(content), [0], nbytes)
    for bit in range(0, 8 * nbytes, 61):
        content[bit // 8] ^= 1 << bit % 8
        assert on_device(cuda, bytes(content), [0], nbytes) != [whole]
        content[bit // 8] ^= 1 << bit % 8


def test_without_kernels_none_are_offered():
    cuda = FakeCuda()
    cuda.c.fake_code(0)
    with pytest.raises(BackendError, match="^nothing on this device computes checksums$"):
        on_device(cuda, b"x", [0], 1)
    assert cuda.c.fake_contexts() == 0


# -- of stores ---------------------------------------------------------------------------------------------


def shards(runtime, slots):
    """The checksums of what lies in the slots."""
    shard = runtime.part.shard_of(runtime.rank)
    begins = [slot * runtime.layout.frame_nbytes + shard.offset for slot in slots]
    return [zlib.crc32(runtime.slots[begin : begin + shard.nbytes]) for begin in begins]


def reported(mover, cuda):
    """The checksums of the one job under way."""
    cuda.finish()
    ((_, ok, checksums, _),) = mover.finished()
    assert ok
    return list(checksums)


@pytest.mark.parametrize("half_nbytes", [512, 64 << 10])
@settings(max_examples=150, deadline=None)
@given(job=jobs(), seed=st.integers(0, 1 << 32))
def test_a_staged_store_reports_those_of_its_shards_if_they_are_whole(half_nbytes, job, seed):
    """Whatever the streams do first, in however many slices."""
    runtime, pages, slots = job
    whole = [[[max(block, 0) for block in group] for group in chunk] for chunk in pages]
    cuda = FakeCuda(deferred=True, seed=seed)
    mover = cuda.mover(runtime, autotune=decided(Method.STAGED), half_nbytes=half_nbytes)
    for number, each in enumerate((whole, pages, whole)):
        mover.store(number, each, slots)
        holes = any(NO_BLOCK in group for chunk in each for group in chunk)
        found = reported(mover, cuda)
        assert found == ([] if holes else shards(runtime, slots))
    mover.close()


def test_a_shard_longer_than_the_memory_that_serves():
    runtime = World(make_layout((5 << 20, 7 << 20), 3), slots=2)
    cuda = FakeCuda()
    mover = cuda.mover(runtime, autotune=decided(Method.STAGED), half_nbytes=HALF_NBYTES)
    while mover.facts()["page-locked"] != "73736KiB -> 73736KiB":  # by its thread; till then slots are not filled
        pass
    mover.store(1, [[[0, 1, 2]], [[2, 3, 0]]], [1, 0])
    assert reported(mover, cuda) == shards(runtime, [1, 0])
    mover.close()


@pytest.fixture
def runtime():
    return World(make_layout((48, 96), 4), slots=3)


def test_the_facts_say_where_checksums_are_computed(runtime):
    cuda = FakeCuda()
    mover = cuda.mover(runtime, autotune=decided(Method.DIRECT))
    assert mover.facts()["checksums of group 0"] == "on the host (stores are direct)"
    mover.store(1, [CHUNK], [0])
    assert reported(mover, cuda) == []
    mover.close()
    mover = cuda.mover(runtime, **STAGED)
    assert mover.facts()["checksums of group 0"] == "on the device"
    mover.close()
    cuda.assert_all_returned()


def test_without_memory_for_them_stores_have_none(runtime):
    cuda = FakeCuda()
    cuda.fail("cuMemAlloc", after=2, times=1, result=2)
    mover = cuda.mover(runtime, **STAGED)
    assert mover.facts()["checksums of group 0"] == "on the host (no memory is reserved for them)"
    mover.store(1, [CHUNK], [0])
    assert reported(mover, cuda) == []
    mover.close()
    assert cuda.c.fake_allocations() == 0


def test_a_long_job_has_none_and_neither_has_one_too_many(runtime):
    memory = SumsMemory(FakeCuda().device())
    assert memory.take(ROW + 1) is None
    taken = list(itertools.islice(iter(lambda: memory.take(ROW), None), 100))
    assert len(taken) == 64
    places = sorted(each.told for each in taken)
    assert all(later - earlier == 4 * ROW for earlier, later in itertools.pairwise(places))
    memory.give_back(taken[5])
    assert memory.take(1).told == taken[5].told
    memory.close()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_jobs_under_way_at_once_have_their_own(seed):
    runtime, cuda = World(make_layout((48, 96), 2), slots=8), FakeCuda(deferred=True, seed=seed)
    mover = cuda.mover(runtime, **STAGED)
    for job in range(8):
        mover.store(job, [[[job, 7 - job]]], [job])
    found = {}
    while len(found) < 8:
        assert cuda.step() or mover._jobs
        found |= {job: list(checksums) for job, _, checksums, _ in mover.finished()}
        for job, checksums in found.items():
            assert checksums == shards(runtime, [job])
    mover.close()


def test_many_jobs_one_after_the_other_use_the_same_memory(runtime):
    cuda = FakeCuda()
    mover = cuda.mover(runtime, **STAGED)
    for job in range(200):
        mover.store(job, [CHUNK], [job % 3])
        assert reported(mover, cuda) == shards(runtime, [job % 3])
    mover.close()


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuMemsetD32Async", "cuMemcpyDtoHAsync"])
def test_a_store_that_failed_has_none_and_the_next_has(runtime, function):
    cuda = FakeCuda(deferred=True)
    cuda.c.fake_version(12000)
    mover = cuda.mover(runtime, **STAGED)
    for after in range(20):
        calls = cuda.calls(function)
        mover.store(1, [CHUNK], [0])
        assert reported(mover, cuda) == shards(runtime, [0])
        if after >= cuda.calls(function) - calls:
            break
        cuda.fail(function, after=after, times=1, result=719)
        mover.store(2, [CHUNK], [0])
        cuda.finish()
        assert mover.finished() == [(2, False, (), ())]
    assert after
    mover.close()


# -- what is believed ----------------------------------------------------------------------------------------


def test_checksums_that_the_host_contradicts_are_dropped_and_logged_once(runtime, caplog):
    cuda = FakeCuda(deferred=True)
    cuda.c.fake_sum_at_once()
    mover = cuda.mover(runtime, **STAGED)
    for job in range(3):
        mover.store(job, [CHUNK], [0])
        assert reported(mover, cuda) == []
    (line,) = [each for each in caplog.messages if "checksum" in each]
    assert line.startswith("kvtier: checksums of group 0: the device computes 0x")
    assert mover.facts()["checksums of group 0"].startswith("on the host (the device computes 0x")
    mover.close()


@pytest.mark.parametrize("wrong", [False, True])
def test_the_self_test_decides(wrong):
    """So that it is known before the first request."""
    import torch

    nbytes, blocks = 64, 8
    runtime = World(make_layout((nbytes,) * 2, 4), blocks=blocks)
    cuda = FakeCuda(deferred=True)
    if wrong:
        cuda.c.fake_sum_at_once()
    mover = cuda.mover(runtime, **STAGED)
    wait, mover.wait = mover.wait, lambda jobs: (cuda.finish(), wait(jobs))
    whole = torch.frombuffer(runtime.pages, dtype=torch.uint8)
    caches = {
        f"layer {number}": whole[start : start + nbytes * blocks].view(blocks, nbytes)
        for number, start in enumerate(runtime.starts)
    }
    assert try_copies(mover, runtime.kv_cache, [caches], [0]) == "", "copies are right either way"
    assert mover.facts()["checksums of group 0"].startswith("on the host" if wrong else "on the device")
    assert mover._copiers[0].checksums._compared
    mover.close()


def test_any_number_of_slots_on_a_device_is_summed():
    """Of small frames there are more than have places for checksums at a time."""
    world = World(make_layout((48,), 4))
    cuda, count, nbytes = FakeCuda(), ROW + 5, world.layout.frame_nbytes
    cache = attrs.evolve(world.kv_cache, device="cuda:0")
    slots = DeviceSlots(cache, count, device=cuda.device(), engine=cuda)
    content = random.Random(1).randbytes(count * nbytes)
    ctypes.memmove(slots.address, content, len(content))
    begins = range(3 * nbytes + 64, count * nbytes, nbytes)
    assert slots.checksums(3, count - 3, 64, 100) == tuple(zlib.crc32(content[at : at + 100]) for at in begins)
    slots.mover.close()
