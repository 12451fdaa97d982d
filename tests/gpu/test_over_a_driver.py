"""What `test_on_gpu.py` does, over the driver of the tests, so that it still fits what it tests when a GPU comes."""

import ctypes
import functools

import attrs
import pytest
import test_on_gpu
from fake_cuda import FakeCuda
from sizes import some
from test_on_gpu import SHAPES, GpuPages

from kvtier_core.transfer.cuda import device_slots, opening
from kvtier_core.transfer.cuda.device_slots import DeviceSlots
from kvtier_core.transfer.cuda.library import Method
from kvtier_core.transfer.cuda.opening import open_mover
from kvtier_core.work.io_pool import Outcome

QUICK = ["words", "several ranks", "ranks that lock and read their shards alone", "two groups"]


class HostReads(test_on_gpu.HostReads):
    def __init__(self, frames, fds, memory):
        self.frames = frames

    def read(self, extents, into):
        for memory, each in zip(into, extents, strict=True):
            ctypes.memmove(memory.address, bytes(self.frames.bytes_at(each)), memory.nbytes)
        return [Outcome(memory.nbytes) for memory in into]


@pytest.fixture(autouse=True)
def memory_of_the_host(monkeypatch):
    """In place of the GPU's: that is where this driver keeps it."""
    fake, kv_cache = FakeCuda(), GpuPages.kv_cache
    options = {"device": fake.device(), "engine": fake}

    monkeypatch.setattr(opening, "open_mover", functools.partial(open_mover, **options))
    monkeypatch.setattr(device_slots, "DeviceSlots", functools.partial(DeviceSlots, **options))
    monkeypatch.setattr(test_on_gpu, "open_mover", functools.partial(open_mover, **options))
    monkeypatch.setattr(GpuPages, "device", "cpu")
    monkeypatch.setattr(GpuPages, "kv_cache", lambda pages: attrs.evolve(kv_cache(pages), device="cuda:0"))
    monkeypatch.setattr(test_on_gpu, "HostReads", HostReads)


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("shape", QUICK)
def test_every_method_copies_over_the_driver(method, shape):
    test_on_gpu.test_every_method_copies_each_byte_that_is_wanted_and_no_other(method, shape, 16, 4 << 20)


@pytest.mark.parametrize("model", some(test_on_gpu.MODELS))
def test_chunks_of_a_stack_come_back_over_the_driver(model):
    test_on_gpu.test_chunks_of_a_stack_come_back(model)


@pytest.mark.parametrize("law", ["packed_shards_hold_their_pages", "pages_that_do_not_pack_leave_their_slot_unfilled"])
def test_laws_of_packed_slots_over_the_driver(law, tmp_path):
    getattr(test_on_gpu.TestCpuArenaOnGpu(), f"test_{law}")(tmp_path)


@pytest.mark.parametrize("half_nbytes", [32 << 20, 8 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_shards_over_the_driver(shape, half_nbytes):
    test_on_gpu.test_packed_shards_are_what_the_host_packs_and_come_back(shape, half_nbytes)


@pytest.mark.parametrize("shape", SHAPES)
def test_reads_into_gpu_memory_reach_the_pages_over_the_driver(shape, monkeypatch):
    test_on_gpu.test_frames_read_into_gpu_memory_reach_the_pages_if_they_verify(shape, monkeypatch)
