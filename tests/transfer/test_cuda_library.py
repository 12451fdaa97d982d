"""The CUDA library: how it is built, what it asks of a driver, and what becomes of a driver's refusals."""

import ctypes
import shutil
from array import array
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
from fake_cuda import SOURCE, FakeCuda, anonymous, built, libraries
from sizes import some
from test_mover import World

from kvtier_core.errors import BackendError
from kvtier_core.transfer import movers
from kvtier_core.transfer.cuda import library as library_module
from kvtier_core.transfer.cuda.device_slots import DeviceSlots
from kvtier_core.transfer.cuda.library import FILE, Direction, Library, Method
from kvtier_core.transfer.page_lists import Layer
from kvtier_testing.samples import make_layout

INVALID, NOT_SUPPORTED, LAUNCH_FAILED = 1, 801, 719
UNIFIED, REACHES_HOST, LOCKS = 41, 91, 99
MIB = 1 << 20
FATBIN = bytes.fromhex("50ed55ba01001000")  # how what nvcc compiled begins


# -- how it is built -----------------------------------------------------------------------------------


KERNELS = {
    "with nvcc": "-DKVTIER_GPU_ARCHITECTURES=90",
    "without": "-DCMAKE_CUDA_COMPILER=",
    "nvcc fails": "-DCMAKE_CUDA_COMPILER=/bin/false",
}


@pytest.fixture(scope="module", params=some(KERNELS, "with nvcc", "without"))
def library(request, tmp_path_factory):
    for tool in ("cmake", "g++", *(["nvcc"] if request.param == "with nvcc" else [])):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    build = tmp_path_factory.mktemp("build")
    built("cmake", "-S", SOURCE, "-B", build, KERNELS[request.param])
    assert "warning" not in built("cmake", "--build", build)
    built("cmake", "--install", build, "--prefix", build / "installed")
    library = build / "installed/kvtier_core" / FILE
    assert (FATBIN in library.read_bytes()) == (request.param == "with nvcc")
    return library


def test_the_library_loads_and_tells_whether_there_is_a_device(library):
    if torch.cuda.is_available():
        assert Library(library).device(0).abilities
    else:
        with pytest.raises(BackendError, match="^no CUDA driver: libcuda.so.1: cannot open|^CUDA cannot begin: "):
            Library(library).device(0)


def test_the_library_says_what_its_kernels_are_for(library):
    told = Library(library).c.kvtier_cuda_architectures().decode()
    assert told == ("compute_90 sm_90" if FATBIN in library.read_bytes() else "")


def test_architectures_that_nvcc_does_not_know_cost_no_others(tmp_path):
    """Those of its default are all that a wheel has: one for each generation, and PTX of the oldest for the rest."""
    nvcc, out = tmp_path / "nvcc", tmp_path / "kernels"
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --list-gpu-code ] && echo sm_80 sm_90 && exit\necho "$@" >{out}\n')
    nvcc.chmod(0o755)
    built("cmake", f"-DNVCC={nvcc}", f"-DOUT={out}", "-P", SOURCE / "kernels.cmake")
    assert Path(f"{out}.txt").read_text() == "compute_80 sm_80 sm_90"
    codes = [word.rpartition("code=")[2] for word in out.read_text().split() if word.startswith("-gencode")]
    assert codes == ["compute_80", "sm_80", "sm_90"]


def test_a_library_of_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(library_module, "expected_stamp", lambda *_: "0" * 64)
    with pytest.raises(BackendError, match=r"^libkvtier_cuda\.so was built from different sources; reinstall kvtier$"):
        Library(libraries()[0])


def test_the_library_needs_nothing_that_an_engine_may_have_in_another_version(library):
    needs = built("env", "-u", "LD_PRELOAD", "-u", "LD_LIBRARY_PATH", "ldd", library)
    assert "libc.so" in needs
    assert "torch" not in needs
    assert "cuda" not in needs.replace(str(library), "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_opened():
    cache = attrs.evolve(World(make_layout()).kv_cache, device="cuda:0")
    slot_nbytes = cache.layout.frame_nbytes
    for _ in range(2):  # not only the first time
        for opening in (
            partial(movers.open_mover, cache, anonymous(slot_nbytes), slot_nbytes),
            partial(DeviceSlots, cache, 1),
        ):
            with pytest.raises(BackendError):
                opening()


def test_a_library_of_another_kvtier_is_refused(tmp_path):
    other = tmp_path / FILE
    (tmp_path / "empty.cpp").write_text("")
    built("g++", "-shared", "-fPIC", tmp_path / "empty.cpp", "-o", other)
    with pytest.raises(BackendError, match="^cannot load libkvtier_cuda.so: .*; reinstall kvtier$"):
        Library(other)


# -- what it asks of a device --------------------------------------------------------------------------


def test_errors_name_what_was_tried():
    cuda = FakeCuda()
    with pytest.raises(BackendError, match=r"^CUDA cannot find the device: a test wants it \(CUDA_.*, 101\)$"):
        Library(cuda.path).device(999, cuda.driver)
    with pytest.raises(BackendError, match="^no CUDA driver: .*nowhere.so"):
        Library(cuda.path).device(0, "/nowhere.so")


@pytest.mark.parametrize(
    "attribute, why",
    [(UNIFIED, "the device has addresses of its own"), (LOCKS, "the device cannot page-lock memory")],
)
def test_a_device_with_which_nothing_would_work_is_refused(attribute, why):
    cuda = FakeCuda()
    cuda.c.fake_attribute(attribute, 0)
    with pytest.raises(BackendError, match=f"^{why}"):
        cuda.device()


@pytest.mark.parametrize("version, batches", [(12060, False), (12080, True), (13000, True), (13020, True)])
def test_drivers_of_any_version(version, batches):
    """Batches are asked for as CUDA 12.8 has them: 13 has another signature under the same name."""
    cuda = FakeCuda()
    cuda.c.fake_version(version)
    job = Job(cuda)
    assert job.device.abilities.batches == batches
    job.store()
    assert job.stored()
    assert cuda.calls("cuMemcpyBatchAsync") == (1 if batches else 0)
    assert cuda.calls("cuMemcpyBatchAsync of 13") == 0
    assert cuda.calls("cuMemcpyDtoHAsync") == (0 if batches else 8)


def test_machine_code_for_other_devices_only_leaves_the_copy_engines():
    cuda = FakeCuda()
    cuda.c.fake_code(0)
    job = Job(cuda)
    assert not job.device.abilities.kernels
    why = "CUDA cannot load the kernels: a test wants it (CUDA_ERROR_OF_A_TEST, 209); built in: compute_80"
    assert job.device.no_kernels == why
    assert [job.can(method, True) for method in Method] == [True, False, False]
    job.store()
    assert job.stored()


def test_where_a_kernel_cannot_use_host_addresses_nothing_else_may(cuda):
    """On WSL batches of such addresses fault too: then the driver gets plain copies, which ask what an address is."""
    cuda.c.fake_attribute(REACHES_HOST, 0)
    job = Job(cuda)
    assert job.device.abilities == (True, False, False)
    assert [job.can(method, False) for method in Method] == [True, True, False]
    for method in (Method.DIRECT, Method.STAGED):
        job.forget()
        job.store(method)
        assert job.stored()
    assert cuda.calls("cuMemcpyBatchAsync") == 0


def test_a_kernel_never_writes_to_the_host(cuda):
    job = Job(cuda)
    assert not job.can(Method.KERNEL, True)
    with pytest.raises(BackendError, match="^these pages cannot be copied like this$"):
        job.store(Method.KERNEL)


def test_the_context_of_the_thread_is_left_as_it_was(cuda):
    job = Job(cuda)
    job.store(Method.STAGED)
    cuda.fail("cuLaunchKernel", result=LAUNCH_FAILED)
    with pytest.raises(BackendError):
        job.store(Method.STAGED)
    job.close()
    assert cuda.c.fake_contexts() == 0


# -- copies ----------------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    return FakeCuda()


class Job:
    """Chunks of ``blocks`` pages each in ``layers`` layers, all of them stored. Layers and slots lie apart."""

    def __init__(self, cuda, *, chunks=1, blocks=4, layers=2, nbytes=4096, piece_nbytes=32 * MIB, half_nbytes=MIB):
        self.cuda, self.device = cuda, cuda.device()
        layer_nbytes = chunks * blocks * nbytes + 16
        self.pages = bytearray(cuda.rng.randbytes(layers * layer_nbytes))
        self.shard_nbytes = layers * blocks * nbytes
        self.slot_nbytes = self.shard_nbytes + 16
        self.memory = anonymous(chunks * self.slot_nbytes)
        self._kept = ctypes.c_char.from_buffer(self.pages), ctypes.c_char.from_buffer(self.memory)
        base, slots = map(ctypes.addressof, self._kept)
        for begin in range(0, len(self.memory), piece_nbytes):
            self.device.lock(slots + begin, min(piece_nbytes, len(self.memory) - begin))
        rows = [
            Layer(base + number * layer_nbytes, nbytes, nbytes, number * blocks * nbytes, 0, blocks)
            for number in range(layers)
        ]
        self.part = self.device.part(rows, slots, self.slot_nbytes, slots, piece_nbytes)
        # No two neighbours in a row, if there are three.
        ids = [*range(0, chunks * blocks, 2), *range(1, chunks * blocks, 2)]
        self.rows, self.slots = array("i", ids), array("i", range(chunks))
        self.through = Direction(cuda.Stream(), cuda.Stream(), self.device.staging(half_nbytes))
        self.expected = [
            b"".join(
                self.pages[number * layer_nbytes + block * nbytes :][:nbytes]
                for number in range(layers)
                for block in ids[chunk * blocks :][:blocks]
            )
            for chunk in range(chunks)
        ]

    def can(self, method, to_slots):
        return self.part.can(method, to_slots, self.through.staging)

    def store(self, method=Method.DIRECT):
        self.part.copy(method, True, self.rows, self.slots, self.through)

    def stored(self):
        slots = (self.memory[number * self.slot_nbytes :][: self.shard_nbytes] for number in self.slots)
        return list(slots) == self.expected

    def forget(self):
        self.memory[:] = bytes(len(self.memory))

    def close(self):
        self.part.close()
        self.through.staging.close()


def test_no_call_has_more_copies_than_drivers_survive(cuda):
    job = Job(cuda, chunks=64, blocks=16, layers=5, nbytes=48)
    job.store()
    assert job.stored()
    assert (cuda.c.fake_longest_batch(), cuda.calls("cuMemcpyBatchAsync")) == (2048, 3)


def test_a_refused_batch_is_copied_one_by_one_and_not_retried(cuda, caplog):
    cuda.c.fake_most_in_batch(5)
    job = Job(cuda)
    job.store()
    assert job.stored()
    assert cuda.calls("cuMemcpyDtoHAsync") == 8, "all, for nobody knows which of them the driver took"
    assert not job.device.abilities.batches
    job.store()
    assert cuda.calls("cuMemcpyBatchAsync") == 1
    assert [record.getMessage() for record in caplog.records] == [
        "kvtier: the CUDA driver rejected a call with many copies; from now on each has its own call"
    ]


def test_a_batch_that_has_a_wrong_copy_says_nothing_of_other_batches(cuda, caplog):
    """It fails one by one, too."""
    job = Job(cuda)
    cuda.fail("cuMemcpyBatchAsync", times=1, result=1)
    cuda.fail("cuMemcpyDtoHAsync", times=1, result=1)
    with pytest.raises(BackendError, match=r"^CUDA cannot copy to the host: .*1\)$"):
        job.store()
    assert job.device.abilities.batches and not caplog.records
    job.store()
    assert job.stored()
    assert cuda.calls("cuMemcpyBatchAsync") == 2


def test_a_broken_device_is_not_asked_again_and_again(cuda):
    cuda.fail("cuMemcpyBatchAsync", result=LAUNCH_FAILED)
    job = Job(cuda)
    with pytest.raises(BackendError, match=r"^CUDA cannot enqueue a batch of copies: .*719\)$"):
        job.store()
    assert cuda.calls("cuMemcpyDtoHAsync") == 0
    assert job.device.abilities.batches


@pytest.mark.parametrize("method", [Method.DIRECT, Method.STAGED])
@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"])
def test_a_job_that_fails_half_way_raises_and_the_next_one_is_whole(cuda, method, function):
    cuda.c.fake_version(12000)
    job = Job(cuda, chunks=8, half_nbytes=2 * 8 * 4096)
    job.store(method)
    calls = cuda.calls(function)
    for after in range(calls):
        job.forget()
        cuda.fail(function, after=after, times=1, result=LAUNCH_FAILED)
        with pytest.raises(BackendError, match=r"719\)$"):
            job.store(method)
        job.store(method)
        assert job.stored()


def test_neighbours_on_both_sides_are_one_copy(cuda):
    job = Job(cuda, blocks=8)
    job.rows = array("i", [2, 3, 4, 0, 6, 7, 1, 5])
    job.store()
    assert cuda.c.fake_copies() == 2 * 5


def test_blocks_that_hold_all_layers_are_one_copy_if_a_chunk_is_one_block(cuda):
    """The layers of a block lie side by side in the engine, and so they do in a slot."""
    device, nbytes, layers, blocks = cuda.device(), 4096, 4, 3
    pages = bytearray(cuda.rng.randbytes(blocks * layers * nbytes))
    memory = anonymous(blocks * layers * nbytes)
    base, slots = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (pages, memory))
    device.lock(slots, len(memory))
    rows = [Layer(base + i * nbytes, layers * nbytes, nbytes, i * nbytes, 0, 1) for i in range(layers)]
    part = device.part(rows, slots, layers * nbytes, slots, 32 * MIB)
    through = Direction(cuda.Stream(), cuda.Stream())
    part.copy(Method.DIRECT, True, array("i", [2, 0]), array("i", [0, 2]), through)
    assert cuda.c.fake_copies() == 2
    block = layers * nbytes
    assert memory[:block] == pages[2 * block :] and memory[2 * block :] == pages[:block]


def test_no_copy_reaches_from_one_locked_piece_into_the_next(cuda):
    job = Job(cuda, chunks=3, nbytes=3000, piece_nbytes=4096)
    for method in (Method.DIRECT, Method.STAGED):
        job.forget()
        job.store(method)
        assert job.stored()
    assert cuda.c.fake_largest_copy() <= 4096


def test_a_staged_shard_is_one_copy_and_a_slice_no_longer_than_the_buffer(cuda):
    job = Job(cuda, chunks=10, blocks=16, nbytes=512, half_nbytes=3 * 16 * 512 * 2)
    job.store(Method.STAGED)
    assert job.stored()
    assert cuda.c.fake_copies() == 10
    assert cuda.calls("cuLaunchKernel") == 4, "slices of three chunks"


def test_a_shard_longer_than_the_buffer_goes_in_slices_of_layers(cuda):
    job = Job(cuda, chunks=2, blocks=4, layers=5, nbytes=512, half_nbytes=2 * 4 * 512)
    assert job.can(Method.STAGED, True)
    job.store(Method.STAGED)
    assert job.stored()
    assert cuda.c.fake_copies() == 2 * 3
    assert not Job(cuda, nbytes=4096, half_nbytes=4 * 4096 - 1).can(Method.STAGED, True), "not even a layer fits"


def test_more_pieces_than_go_with_one_launch(cuda):
    job = Job(cuda, blocks=600, nbytes=48)
    job.store(Method.STAGED)
    assert job.stored()
    assert cuda.calls("cuLaunchKernel") == 3


@pytest.mark.parametrize("nbytes", [16, 48, 2048, 2052, 2049, 20, 1, 6144])
@pytest.mark.parametrize("at, from_", [(0, 0), (16, 48), (4, 0), (0, 12), (1, 0), (3, 3)])
def test_a_page_is_copied_in_words_of_any_width(cuda, nbytes, at, from_):
    aligned = torch.empty(16384, dtype=torch.uint8)  # torch aligns to 64 bytes
    source = aligned[from_ : from_ + nbytes].random_()
    target = torch.full((8192,), 0xA5, dtype=torch.uint8)
    expected = target.clone()
    expected[at : at + nbytes] = source
    given = (ctypes.c_uint64(each) for each in (target.data_ptr() + at, source.data_ptr(), nbytes))
    cuda.c.fake_copy_bytes(*given, 32)
    assert torch.equal(target, expected)


def test_pages_of_several_segments(cuda):
    job = Job(cuda, blocks=3, layers=2, nbytes=40_000)
    job.store(Method.STAGED)
    assert job.stored()


def test_a_rank_without_layers_of_a_part_copies_nothing(cuda):
    runtime = World(make_layout())
    device = cuda.device()
    part = device.part([], 0, runtime.layout.frame_nbytes, 0, MIB)
    for method in (Method.DIRECT, Method.STAGED):
        through = Direction(cuda.Stream(), cuda.Stream(), device.staging(MIB))
        part.copy(method, True, array("i", []), array("i", [1, 2]), through)
    assert cuda.c.fake_copies() == 0
