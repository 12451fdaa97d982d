"""Tests that `test_device_reads.py` runs in a process of its own: frames that are read into the memory of a GPU.

KvikIO is the real one. The driver is that of the tests, whose device memory is the host's, so that KvikIO reads through
a buffer of its own; so does its GPUDirect Storage not work, and is not asked for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path

import kvikio.buffer
import kvikio.cufile_driver
import kvikio.defaults
import pytest
from fake_cuda import FakeCuda
from patience import HANG
from test_staged_reader import HASTY, KEYS, NBYTES, SHARD, Machine, good, same

from kvtier_core.errors import BackendError
from kvtier_core.transfer.cuda import device_slots, opening
from kvtier_core.transfer.cuda.autotune import decided
from kvtier_core.transfer.cuda.device_slots import DeviceSlots
from kvtier_core.transfer.cuda.library import FILE, Method
from kvtier_core.transfer.cuda.opening import open_mover
from kvtier_core.types import FRAME_ALIGNMENT, ReadStatus
from kvtier_gds import device_lane, device_reads
from kvtier_gds.device_lane import DeviceLane
from kvtier_gds.device_reads import DeviceReads
from kvtier_gds.slab_files import SlabFiles
from kvtier_testing.samples import make_namespace


@pytest.fixture
def fake(monkeypatch):
    folder = Path(os.environ["LD_LIBRARY_PATH"])
    fake = FakeCuda(paths=(folder / FILE, folder / "libcuda.so.1"))
    device = fake.device()
    slots = functools.partial(DeviceSlots, device=device, engine=fake)
    staged = decided(Method.STAGED)
    mover = functools.partial(open_mover, device=device, engine=fake, half_nbytes=64 << 10, autotune=staged)
    monkeypatch.setattr(device_slots, "DeviceSlots", slots)
    monkeypatch.setattr(opening, "open_mover", mover)
    monkeypatch.setattr(device_lane, "DeviceReads", functools.partial(DeviceReads, must_be_direct=False))
    yield fake
    free_buffers_of_kvikio(fake)


def free_buffers_of_kvikio(fake):
    """It keeps them, and the next driver knows nothing of them."""
    fake.c.cuCtxPushCurrent_v2(None)
    kvikio.buffer.bounce_buffer_free()
    fake.c.cuCtxPopCurrent_v2(None)


@pytest.fixture
def opened(fake, tmp_path):
    with contextlib.closing(Machine(tmp_path, arena="cpu", device="cuda:0")) as machine:
        yield machine


@pytest.fixture
def machine(opened):
    attached(opened)
    assert [where(side) for side in opened.sides] == ["the GPU's memory"] * 2
    return opened


def attached(machine):
    assert [list(outcomes) for outcomes in machine.attach()] == [[(0, "")], [(0, "")]]


def where(side):
    return side._readers["gds"].facts()["read into"]


def test_each_rank_gets_the_shard_that_an_arena_would_bring(machine):
    expected = good(machine)
    assert expected[0][0].any()
    assert machine.load(machine.frames()) == [(False, {})] * 2
    assert same(machine.content(), expected)


def test_more_chunks_than_there_is_memory_for(opened, monkeypatch):
    monkeypatch.setattr(device_lane, "_NBYTES", NBYTES)
    attached(opened)
    expected = good(opened)
    assert opened.load(opened.frames()) == [(False, {})] * 2
    assert same(opened.content(), expected)


def test_only_payloads_pass_through_the_gpu(machine, monkeypatch):
    to_host, read = [], SlabFiles.read_extents

    def noted(files, extents, into):
        to_host.extend(map(len, into))
        return read(files, extents, into)

    monkeypatch.setattr(SlabFiles, "read_extents", noted)
    machine.load(machine.frames())
    assert to_host == [FRAME_ALIGNMENT] * 2 * len(KEYS)


@pytest.mark.parametrize("at", [0, 40])
def test_unverified_bytes_reach_no_page(machine, at):
    empty = machine.content()
    machine.change(KEYS[2], b"\xff" * 8, at=at)
    assert machine.load(machine.frames(KEYS[2:3])) == [(True, {KEYS[2]: ReadStatus.CORRUPT})] * 2
    assert same(machine.content(), empty)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [0, SHARD // 2, SHARD - 8])
def test_a_damaged_shard_reaches_no_page_of_its_rank(machine, rank, place):
    empty = machine.content()
    machine.change(KEYS[2], b"\xff" * 8, at=FRAME_ALIGNMENT + rank * SHARD + place)
    outcomes = machine.load(machine.frames(KEYS[2:3]))
    assert outcomes[rank] == (True, {KEYS[2]: ReadStatus.CORRUPT}) and outcomes[1 - rank] == (False, {})
    assert same([machine.content()[rank]], [empty[rank]])


def test_a_frame_of_another_key_or_namespace_reaches_no_page(machine):
    empty = machine.content()
    stranger = machine.frames(KEYS[:1], named=KEYS[1:2])
    assert machine.load(stranger) == [(True, {KEYS[1]: ReadStatus.CORRUPT})] * 2
    foreign = machine.frames(KEYS[:1], namespace=make_namespace("another"))
    assert machine.load(foreign) == [(True, {KEYS[0]: ReadStatus.CORRUPT})] * 2
    assert same(machine.content(), empty)


@pytest.mark.parametrize(
    ("nbytes", "ranks"),
    [(FRAME_ALIGNMENT, [0, 1]), (2 * FRAME_ALIGNMENT, [0, 1]), (NBYTES - FRAME_ALIGNMENT, [1])],
)
def test_a_frame_that_is_too_short_reaches_no_page(machine, nbytes, ranks):
    empty = machine.content()
    machine.load(machine.frames(KEYS[1:2]))  # what lies in a slot from before is no part of the frame
    (frame,) = machine.frames(KEYS[1:2])
    machine.wipe()
    short = frame._replace(location=frame.location._replace(nbytes=nbytes))
    outcomes = machine.load([short])
    assert [outcomes[rank] for rank in ranks] == [(True, {KEYS[1]: ReadStatus.CORRUPT})] * len(ranks)
    assert same([machine.content()[rank] for rank in ranks], [empty[rank] for rank in ranks])


def test_a_slab_that_ends_too_early_is_reported(machine, tmp_path):
    frames = machine.frames()
    with open(tmp_path / "kvtier.slab", "r+b") as slab:
        slab.truncate(frames[3].location.place[1] + NBYTES // 2)
    outcomes = machine.load(frames)
    assert [failed for failed, _ in outcomes] == [True, True]
    for _, unread in outcomes:
        assert set(unread) == set(KEYS[3:]) and ReadStatus.VERIFIED not in unread.values()


def test_a_slab_that_is_opened_to_others_while_payloads_are_read_reaches_no_page(machine, tmp_path, monkeypatch):
    empty, frames, read = machine.content(), machine.frames(), DeviceReads.read

    def read_when_opened(reads, extents, into):
        (tmp_path / "kvtier.slab").chmod(0o660)
        return read(reads, extents, into)

    monkeypatch.setattr(DeviceReads, "read", read_when_opened)
    assert [failed for failed, _ in machine.load(frames)] == [True, True]
    assert same(machine.content(), empty)


@pytest.mark.parametrize("host", [True, False], ids=["what the host can read", "a bad sector"])
def test_a_read_that_fails_is_its_frames_fault_only_if_the_host_cannot_read_it_either(machine, monkeypatch, host):
    begin, read = DeviceReads._begin, SlabFiles.read_extents
    payload = machine.frames(KEYS[1:2])[0].location.place[1] + FRAME_ALIGNMENT
    bad = {payload, payload + SHARD}

    def refuse(reads, extent, into):
        if extent.at in bad:
            raise OSError("cuFile says no")
        return begin(reads, extent, into)

    def spoiled(files, extents, into):
        if not host and extents[0].at in bad:
            return [BackendError("a bad sector")]
        return read(files, extents, into)

    monkeypatch.setattr(DeviceReads, "_begin", refuse)
    monkeypatch.setattr(SlabFiles, "read_extents", spoiled)
    unread = dict.fromkeys(KEYS[:3], ReadStatus.IO_ERROR) if host else {KEYS[1]: ReadStatus.CORRUPT}
    assert machine.load(machine.frames(KEYS[:3])) == [(True, unread)] * 2


def test_a_gpu_that_computes_no_checksums_loads_nothing(machine, fake):
    fake.fail("cuLaunchKernel", result=719)
    assert machine.load(machine.frames(KEYS[:2])) == [(True, dict.fromkeys(KEYS[:2], ReadStatus.IO_ERROR))] * 2


# -- where it cannot be ----------------------------------------------------------------------------------


def test_without_room_on_the_gpu_the_hosts_memory_is_used(opened, fake, monkeypatch):
    def full(cache, slots):
        raise BackendError("CUDA cannot allocate memory: out of memory")

    monkeypatch.setattr(device_slots, "DeviceSlots", full)
    attached(opened)
    assert [where(side) for side in opened.sides] == [
        "the host's memory (CUDA cannot allocate memory: out of memory)"
    ] * 2
    expected = good(opened)
    assert opened.load(opened.frames()) == [(False, {})] * 2
    assert same(opened.content(), expected)


class CuFile:
    """The states of cuFile's driver, which tells what it can do only while it is open. The real one cannot be opened
    over the driver of the tests: it never returns.
    """

    def __init__(self, monkeypatch, *, nvfs=False, p2pdma=False):
        self.users, self.modes = 0, []
        self.told = None  # KvikIO asks once

        def get(name):
            assert name == "is_gds_available"
            self.told = (nvfs and self.users > 0) if self.told is None else self.told
            return self.told

        open_file = kvikio.CuFile

        def opening(path):
            self.modes.append(kvikio.defaults.get("compat_mode"))
            with kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON):  # there is no GPU: the host reads
                return open_file(path)

        monkeypatch.delenv("CUFILE_ALLOW_COMPAT_MODE", raising=False)
        monkeypatch.setattr(device_lane, "DeviceReads", DeviceReads)
        monkeypatch.setattr(kvikio, "CuFile", opening)
        for name in ("memory_register", "memory_deregister"):  # the real ones open the driver
            monkeypatch.setattr(kvikio.buffer, name, lambda memory: None)
        monkeypatch.setattr(kvikio.cufile_driver, "get", get)
        monkeypatch.setattr(kvikio.cufile_driver, "driver_open", self.open)
        monkeypatch.setattr(kvikio.cufile_driver, "driver_close", self.close)
        monkeypatch.setattr(device_reads, "_supports_p2pdma", lambda: p2pdma and self.users > 0)

    def open(self):
        assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false", "it would read through the host, and say nothing"
        self.users += 1

    def close(self):
        self.users -= 1


@pytest.mark.parametrize("way", ["nvfs", "p2pdma"])
def test_gpudirect_storage_is_used_where_cufile_has_a_way(fake, tmp_path, monkeypatch, way):
    cufile = CuFile(monkeypatch, **{way: True})
    with contextlib.closing(Machine(tmp_path, arena="cpu", device="cuda:0")) as machine:
        attached(machine)
        assert [where(side) for side in machine.sides] == ["the GPU's memory"] * 2
        assert cufile.users == 2
        assert set(cufile.modes) == {kvikio.CompatMode.OFF}, "KvikIO may read through the host"
        expected = good(machine)
        assert machine.load(machine.frames()) == [(False, {})] * 2
        assert same(machine.content(), expected)
    assert cufile.users == 0


def test_cufile_that_cannot_be_opened_leaves_the_hosts_memory(opened, monkeypatch):
    def refused(*_):
        raise RuntimeError("no such device")

    CuFile(monkeypatch)
    monkeypatch.setattr(kvikio.cufile_driver, "driver_open", refused)
    attached(opened)
    assert all("cannot open cuFile: no such device" in where(side) for side in opened.sides)


def test_without_gpudirect_storage_the_hosts_memory_is_used(opened, fake, monkeypatch):
    CuFile(monkeypatch)
    attached(opened)
    assert all("GPUDirect Storage is not available" in where(side) for side in opened.sides)
    expected = good(opened)
    assert opened.load(opened.frames()) == [(False, {})] * 2
    assert same(opened.content(), expected)


def test_a_driver_that_hangs_is_not_waited_for(fake, tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(device_lane, "DeviceReads", lambda *_: go.wait(HANG))
    with contextlib.closing(Machine(tmp_path, arena="cpu", device="cuda:0", timeout=HASTY)) as machine:
        attached(machine)
        assert all("did not answer within 0.5s" in where(side) for side in machine.sides)
        go.set()


def test_closing_gives_everything_back(fake, tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(kvikio.buffer, "memory_deregister", lambda memory: left.append(fake.c.fake_allocations()))
    with contextlib.closing(Machine(tmp_path, arena="cpu", device="cuda:0")) as machine:
        attached(machine)
        machine.load(machine.frames())
    assert len(left) == 2 and all(left), "cuFile knows memory that is gone"
    free_buffers_of_kvikio(fake)
    fake.assert_all_returned()


# -- auto --------------------------------------------------------------------------------------------------


@pytest.fixture
def timeout():
    return "60s"


@pytest.fixture
def automatic(fake, tmp_path, monkeypatch, timeout):
    monkeypatch.setattr(device_lane, "_COMPARED_NBYTES", 2 * NBYTES)
    with contextlib.closing(Machine(tmp_path, arena="cpu", device="cuda:0", mode="auto", timeout=timeout)) as machine:
        yield machine


def compares(monkeypatch, to_gpu, to_host):
    """The two ways are compared, and this comes out of it: bytes a second."""
    measured = DeviceLane._speeds

    def pretend(lane, samples):
        assert all(measured(lane, samples))
        return to_gpu, to_host

    monkeypatch.setattr(DeviceLane, "_speeds", pretend)


def refusals(machine):
    for side in machine.sides:
        side.attach(machine.plan)
    return [side.progress().no_readers for side in machine.sides]


def test_auto_reads_into_the_gpu_where_that_is_no_slower(automatic, monkeypatch):
    compares(monkeypatch, 6.1e9, 6.0e9)
    assert refusals(automatic) == [{}, {}]
    assert where(automatic.sides[0]) == "the GPU's memory (6.1 GB/s, against 6.0 into the host's)"
    expected = good(automatic)
    assert automatic.load(automatic.frames()) == [(False, {})] * 2
    assert same(automatic.content(), expected)


def test_auto_leaves_it_to_an_arena_where_that_is_slower(automatic, fake, monkeypatch):
    compares(monkeypatch, 2e9, 6e9)
    why = "reads into its GPU are not used: slower: 2.0 GB/s, against 6.0 into the host's"
    assert all(why in refused["gds"] for refused in refusals(automatic))
    assert automatic.load(automatic.frames())[0][0], "the workers read it all the same"


def test_auto_leaves_it_to_an_arena_if_a_comparison_fails(automatic, monkeypatch):
    monkeypatch.setattr(DeviceLane, "_read_payloads", lambda *_: [0, 0])
    assert all(
        "reads into its GPU are not used: existing frames cannot be read" in refused["gds"]
        for refused in refusals(automatic)
    )


def test_auto_leaves_it_to_an_arena_without_gpudirect_storage(automatic, monkeypatch):
    CuFile(monkeypatch)
    assert all("GPUDirect Storage is not available" in refused["gds"] for refused in refusals(automatic))


@pytest.mark.parametrize("timeout", [HASTY])
def test_a_hanging_read_keeps_its_files_and_memory(automatic, fake, monkeypatch, timeout):
    """It would read into what others got meanwhile, or from another file."""
    go, closed = threading.Event(), []
    monkeypatch.setattr(DeviceLane, "_read_payloads", lambda *_: go.wait(HANG))
    monkeypatch.setattr(DeviceReads, "close", closed.append)
    before = fake.c.fake_allocations()
    assert all("could not be compared within 0.5s" in refused["gds"] for refused in refusals(automatic))
    assert not closed and fake.c.fake_allocations() > before
    go.set()
