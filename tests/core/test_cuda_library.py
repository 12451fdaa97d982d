"""The CUDA library without a GPU: it builds, it loads, it says so; and its arithmetic on the CPU."""

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from test_mover import World, jobs

from kvtier_core.errors import BackendError
from kvtier_core.testing.samples import make_layout
from kvtier_core.transfer.cuda.copiers import pieces_of
from kvtier_core.transfer.cuda.library import FILE, Library
from kvtier_core.transfer.page_lists import layers_of

SOURCE = Path(__file__).parents[2] / "csrc/cuda"


def built(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- the library ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    for tool in ("nvcc", "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    build = tmp_path_factory.mktemp("build")
    built("cmake", "-S", SOURCE, "-B", build, "-DKVTIER_CUDA_ARCHITECTURES=90")
    assert "warning" not in built("cmake", "--build", build)
    built("cmake", "--install", build, "--prefix", build / "installed")
    return build / "installed/kvtier_core" / FILE


def test_it_loads_and_tells_whether_there_is_a_device(library):
    if torch.cuda.is_available():
        assert Library(library).devices() == torch.cuda.device_count()
    else:
        with pytest.raises(BackendError, match=r"^CUDA: .+ \(\d+\)$"):
            Library(library).devices()


def test_what_cannot_be_opened_is_an_error(library):
    with pytest.raises(BackendError, match=r"^CUDA: .+ \(\d+\)$"):
        Library(library).open(999, [(0, 16, 16, 0)], 0, 4096)


def test_it_needs_nothing_that_an_engine_may_have_in_another_version(library):
    needs = built("env", "-u", "LD_PRELOAD", "-u", "LD_LIBRARY_PATH", "ldd", library)
    assert "libc.so" in needs
    assert "torch" not in needs
    assert "cuda" not in needs.replace(str(library), "")


# -- its arithmetic ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    path = tmp_path_factory.mktemp("host") / "on_host.so"
    source = Path(__file__).with_name("cuda_on_host.cpp")
    built(
        "g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCE}", source, "-o", path
    )
    return ctypes.CDLL(str(path))


def arguments(runtime, to_slots, pages, slots):
    """What both take, of each group of a job; and what must be kept until they return."""
    layers = list(layers_of(runtime.kv_cache, runtime.part))
    memory = ctypes.addressof(ctypes.c_char.from_buffer(runtime.slots))
    shards = memory + runtime.part.shard_of(runtime.rank).offset
    for number, first in enumerate(itertools.accumulate(runtime.part.blocks[:-1], initial=0)):
        own = [layer for layer in layers if layer.first == first]
        flat = (ctypes.c_uint64 * (4 * len(own)))(*(number for layer in own for number in layer[:4]))
        pieces = pieces_of([chunk[number] for chunk in pages], slots)
        numbers = [len(own), shards, runtime.layout.frame_nbytes, to_slots, pieces.buffer_info()[0], len(pieces) // 3]
        yield [flat, *(ctypes.c_uint64(number) for number in numbers)], pieces


@pytest.mark.parametrize("workers, lanes", [(1, 1), (5, 32), (256, 32)])
@pytest.mark.parametrize("to_slots", [True, False])
@settings(max_examples=60, deadline=None)
@given(job=jobs())
def test_the_lanes_of_the_kernel_copy_each_byte_that_is_wanted_and_no_other(on_host, to_slots, workers, lanes, job):
    runtime, pages, slots = job
    expected = runtime.after_store(pages, slots) if to_slots else runtime.after_load(slots, pages)
    for handed, pieces in arguments(runtime, to_slots, pages, slots):
        on_host.kernel_on_host(*handed, workers, lanes)
        assert pieces is not None
    assert runtime.state() == expected


@pytest.mark.parametrize("to_slots", [True, False])
@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_the_list_of_copies_is_each_byte_that_is_wanted_and_no_other(on_host, to_slots, job):
    runtime, pages, slots = job
    expected = runtime.after_store(pages, slots) if to_slots else runtime.after_load(slots, pages)
    for handed, pieces in arguments(runtime, to_slots, pages, slots):
        on_host.copies_on_host(*handed)
        assert pieces is not None
    assert runtime.state() == expected


@pytest.mark.parametrize("nbytes", [16, 48, 2048, 2052, 2049, 20, 1])
@pytest.mark.parametrize("at, from_", [(0, 0), (16, 48), (4, 0), (0, 12), (1, 0), (3, 3)])
def test_a_page_is_copied_in_words_of_any_width(on_host, nbytes, at, from_):
    aligned = torch.empty(8192, dtype=torch.uint8)  # torch aligns to 64 bytes
    source = aligned[from_ : from_ + nbytes].random_()
    target = torch.full((4096,), 0xA5, dtype=torch.uint8)
    expected = target.clone()
    expected[at : at + nbytes] = source
    given = (ctypes.c_uint64(each) for each in (target.data_ptr() + at, source.data_ptr(), nbytes))
    on_host.page_on_host(*given, 32)
    assert torch.equal(target, expected)


def test_more_pieces_than_go_with_one_launch(on_host):
    layout = make_layout(page_nbytes=(16, 32), blocks=300)
    runtime = World(layout, blocks=600, slots=2)
    pages, slots = [[list(range(300, 600))], [list(range(299, -1, -1))]], [1, 0]
    expected = runtime.after_store(pages, slots)
    ((given, pieces),) = arguments(runtime, True, pages, slots)
    on_host.kernel_on_host(*given, 7, 32)
    assert pieces is not None
    assert runtime.state() == expected


def test_neighbours_on_both_sides_are_one_copy(on_host):
    runtime = World(make_layout(page_nbytes=(48, 96), blocks=4), gaps=[0, 8])
    ((given, pieces),) = arguments(runtime, True, [[[2, 3, 4, 0]]], [0])
    assert on_host.copies_on_host(*given) == 2 + 4, "runs of the dense layer, pages of the padded one"
    assert pieces is not None
