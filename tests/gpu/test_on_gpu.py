"""What only a GPU can show. `make gpu-check` runs this where there is one; elsewhere it is skipped."""

import ctypes
import functools
import mmap
import random
import time
import zlib

import attrs
import pytest
import torch

from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal_part
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import ChunkLayout
from kvtier_core.transfer.cuda.autotune import decided
from kvtier_core.transfer.cuda.checksums import SumsMemory
from kvtier_core.transfer.cuda.library import Method, load
from kvtier_core.transfer.cuda.opening import HALF_NBYTES, open_mover
from kvtier_core.transfer.packing import pack
from kvtier_core.transfer.staged_reader import StagedReader
from kvtier_core.types import FRAME_ALIGNMENT, Location, ReadStatus, StoredFrame
from kvtier_core.work.io_pool import Outcome
from kvtier_cpu import plugin
from kvtier_cpu.config import CpuConfig
from kvtier_gds import device_lane
from kvtier_gds.device_lane import DeviceLane
from kvtier_gds.slab import Extent
from kvtier_testing.laws.arenas import ArenaLaws, settle, shard_of
from kvtier_testing.samples import (
    PagedBuffer,
    make_context,
    make_group,
    make_keys,
    make_layout,
    make_namespace,
    poison,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: make gpu-check on a machine with one"
)

POISON = 0xA5
METHODS = list(Method)


class GpuPages(PagedBuffer):
    """An engine's paged buffer in the GPU's memory, poisoned. ``align`` is where a layer may begin."""

    device = "cuda:0"

    def __init__(self, layout, blocks, rng, rank=0, *, align=1):
        super().__init__(layout, 1, rng, rank)
        self.blocks = blocks
        self._starts = [start - start % align for start in self._starts]
        self.tensors = [
            torch.full((start + stride * blocks,), POISON, dtype=torch.uint8, device=self.device)
            for start, stride in zip(self._starts, self._strides, strict=True)
        ]

    def kv_cache(self):
        cache = super().kv_cache()
        runs = [
            attrs.evolve(run, base=tensor.data_ptr() + start)
            for run, tensor, start in zip(cache.layers, self.tensors, self._starts, strict=True)
        ]
        return attrs.evolve(cache, layers=tuple(runs))

    def page(self, layer, block):
        return self._bytes(self._on_device(layer, block))

    def put(self, layer, block, page):
        self._on_device(layer, block).copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))

    def everything(self):
        return [self._bytes(tensor) for tensor in self.tensors]

    def _on_device(self, layer, block):
        begin = self._starts[layer] + block * self._strides[layer]
        return self.tensors[layer][begin : begin + self._page_nbytes[layer]]

    @staticmethod
    def _bytes(tensor):
        here = tensor.cpu()
        return ctypes.string_at(here.data_ptr(), here.nbytes)


class TestCpuArenaOnGpu(ArenaLaws):
    def config(self, folder):
        return CpuConfig()

    def paged_buffer(self, layout, blocks, rng, rank=0):
        return GpuPages(layout, blocks, rng, rank)


class Slots:
    """Memory of an arena, with movers that copy as they are told. They share its page-locking."""

    def __init__(self, layout, slots):
        self.nbytes = layout.frame_nbytes
        self.memory = mmap.mmap(-1, slots * self.nbytes)

    def view(self, slot):
        return memoryview(self.memory)[slot * self.nbytes : (slot + 1) * self.nbytes]

    def mover(self, cache, method, half_nbytes=HALF_NBYTES):
        mover = open_mover(cache, self.memory, self.nbytes, autotune=decided(method), half_nbytes=half_nbytes)
        assert str(method) in " ".join(mover.facts().values()), f"{method} is not possible here: {mover.facts()}"
        while len(set((locked := mover.facts()["page-locked"]).split(" -> "))) > 1:  # by its thread
            assert "(" not in locked, locked
            time.sleep(0.01)
        return mover


SHAPES = {
    "one odd byte": make_layout((1, 3, 17), 5),
    "words": make_layout((2052, 20), 3),
    "several ranks": make_layout((4096, 512), 4, 3),
    "ranks that lock and read their shards alone": make_layout((128 << 10, 384 << 10), 2, 2),
    "2 KiB to 2 MiB": make_layout((2 << 10, 8 << 10, 32 << 10, 128 << 10, 2 << 20), 2),
    "two groups": ChunkLayout([make_group((2048, 512)), make_group((1024, 2048), name="group 1", block_tokens=8)], 64),
    "more pieces than one launch takes": make_layout((2048, 2048), 400),
}


@pytest.mark.parametrize("half_nbytes", [HALF_NBYTES, 4 << 20])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_method_copies_each_byte_that_is_wanted_and_no_other(method, shape, align, half_nbytes):
    layout, rng = SHAPES[shape], random.Random(shape)
    rank = layout.ranks - 1
    (part,) = layout.parts
    blocks = 3 * max(part.blocks) + 2
    pages = GpuPages(layout, blocks, rng, rank, align=align)
    pages.fill(rng)
    memory = Slots(layout, 4)
    mover = memory.mover(pages.kv_cache(), method, half_nbytes)
    drawn = [rng.sample(range(blocks), 3 * count) for count in part.blocks]
    drawn = [[NO_BLOCK if rng.random() < 0.2 else block for block in group] for group in drawn]
    chunks, slots = [[group[i::3] for group in drawn] for i in range(3)], [3, 0, 2]

    for slot in range(4):
        poison(memory.view(slot))
    expected = {slot: bytearray(memory.view(slot)) for slot in range(4)}
    for chunk, slot in zip(chunks, slots, strict=True):
        for layer, block, begin, nbytes in wanted(layout, rank, chunk):
            expected[slot][begin : begin + nbytes] = pages.page(layer, block)
    mover.store(1, chunks, slots)
    assert settle(mover, [1]) == {1: True}
    assert all(memory.view(slot) == expected[slot] for slot in range(4)), "not what a store should leave"

    other = GpuPages(layout, blocks, rng, rank, align=align)
    loader = memory.mover(other.kv_cache(), method, half_nbytes)
    untouched = [tensor.clone() for tensor in other.tensors]
    for chunk in chunks:
        for layer, block, _, _ in wanted(layout, rank, chunk):
            other.put(layer, block, pages.page(layer, block))
    expected = other.everything()
    for tensor, poisoned in zip(other.tensors, untouched, strict=True):
        tensor.copy_(poisoned)
    loader.load(2, slots, chunks)
    assert settle(loader, [2]) == {2: True}
    assert other.everything() == expected, "not what a load should leave"
    mover.close()
    loader.close()


def wanted(layout, rank, chunk):
    """Layer, block, place in the slot and bytes of each page that is wanted."""
    (part,) = layout.parts
    begin = part.shard_of(rank).offset
    for layer in part.shard_of(rank).layers:
        for block in chunk[layer.group]:
            if block != NO_BLOCK:
                yield layer.layer, block, begin, layer.page_nbytes
            begin += layer.page_nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 17, 4096, (64 << 10) - 1, (64 << 10) + 16, 5_000_003, 80 << 20])
@pytest.mark.parametrize("begin", [0, 1, 4, 15, 16])
def test_checksums_are_those_of_zlib(nbytes, begin):
    device, stream = load().device(0), torch.cuda.current_stream()
    memory = SumsMemory(device)
    sums, stride = memory.take(3), nbytes + 7
    content = torch.empty(begin + 3 * stride, dtype=torch.uint8, device="cuda").random_()
    device.checksums(content.data_ptr() + begin, nbytes, sums, stream, stride)
    stream.synchronize()
    here = GpuPages._bytes(content)
    begins = range(begin, begin + 3 * stride, stride)
    assert sums.read() == tuple(zlib.crc32(here[at : at + nbytes]) for at in begins)
    memory.close()


@pytest.mark.parametrize("half_nbytes", [HALF_NBYTES, 4 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_staged_store_reports_the_checksums_of_its_shards(shape, half_nbytes):
    layout, rng = SHAPES[shape], random.Random(shape)
    (part,) = layout.parts
    blocks = 3 * max(part.blocks)
    pages = GpuPages(layout, blocks, rng, layout.ranks - 1)
    pages.fill(rng)
    memory = Slots(layout, 3)
    mover = memory.mover(pages.kv_cache(), Method.STAGED, half_nbytes)
    drawn = [rng.sample(range(blocks), 3 * count) for count in part.blocks]
    shard = part.shard_of(layout.ranks - 1)
    for job in range(3):
        mover.store(job, [[group[i::3] for group in drawn] for i in range(3)], [2, 0, 1])
        mover.wait([job])
        (ended,) = mover.finished()
        begins = [slot * layout.frame_nbytes + shard.offset for slot in (2, 0, 1)]
        assert list(ended.checksums) == [zlib.crc32(memory.memory[at : at + shard.nbytes]) for at in begins]
    mover.close()


@pytest.mark.parametrize("half_nbytes", [HALF_NBYTES, 8 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_shards_are_what_the_host_packs_and_come_back(shape, half_nbytes):
    """But for the second chunk, which is noise: it may have no room. The first has places without a page."""
    layout, rng = attrs.evolve(SHAPES[shape], packed=True), random.Random(shape)
    (part,) = layout.parts
    rank = layout.ranks - 1
    shard = part.shard_of(rank)
    blocks = 3 * max(part.blocks)
    pages = GpuPages(layout, blocks, rng, rank)
    drawn = [rng.sample(range(blocks), 3 * count) for count in part.blocks]
    chunks, slots = [[group[i::3] for group in drawn] for i in range(3)], [2, 0, 1]
    for number, chunk in enumerate(chunks):
        for layer, block, _, nbytes in wanted(layout, rank, chunk):
            pages.put(layer, block, rng.randbytes(nbytes) if number == 1 else numbers(rng, nbytes))
    for group in chunks[0]:
        group[0] = NO_BLOCK
    memory = Slots(layout, 3)
    for slot in range(3):
        poison(memory.view(slot))
    expected = {slot: bytearray(memory.view(slot)) for slot in range(3)}
    fits = [host_packs(pages, shard, chunk, expected[slot]) for chunk, slot in zip(chunks, slots, strict=True)]
    mover = memory.mover(pages.kv_cache(), Method.STAGED, half_nbytes)
    mover.store(1, chunks, slots)
    mover.wait([1])
    (ended,) = mover.finished()
    filled = [place for place in range(3) if fits[place]]
    assert (ended.ok, list(ended.filled)) == (all(fits), [] if all(fits) else filled)
    assert all(memory.view(slots[place]) == expected[slots[place]] for place in filled), "not what the host packs"
    sums = [zlib.crc32(expected[slot][shard.offset : shard.offset + shard.nbytes]) for slot in slots]
    assert list(ended.checksums) == (sums if all(fits) else [])

    held = {place: shard_pages(pages, shard, chunks[place]) for place in filled}
    for tensor in pages.tensors:
        tensor.fill_(POISON)
    mover.load(2, [slots[place] for place in filled], [chunks[place] for place in filled])
    assert settle(mover, [2]) == {2: True}
    assert {place: shard_pages(pages, shard, chunks[place]) for place in filled} == held
    memory.view(slots[0])[shard.offset] ^= 1
    mover.load(3, [slots[0]], [chunks[0]])
    assert settle(mover, [3]) == {3: False}
    mover.close()


def numbers(rng, nbytes):
    """Numbers in bfloat16 that pack."""
    drawn = torch.randn(-(-nbytes // 2), generator=torch.Generator().manual_seed(rng.getrandbits(63)))
    return GpuPages._bytes(drawn.bfloat16().view(torch.uint8))[:nbytes]


def shard_pages(pages, shard, chunk):
    """The pages of a chunk in the order of its shard, with zeros in place of a NO_BLOCK."""
    return b"".join(
        bytes(layer.page_nbytes) if block == NO_BLOCK else pages.page(layer.layer, block)
        for layer in shard.layers
        for block in chunk[layer.group]
    )


def host_packs(pages, shard, chunk, slot):
    """Fill a slot as the host does. False if the chunk has no room there."""
    into = memoryview(slot)[shard.offset : shard.offset + shard.nbytes]
    used = pack(memoryview(shard_pages(pages, shard, chunk)), into)
    into[used:] = bytes(len(into) - used)
    return used > 0


class HostFrames:
    """Frames in the host's memory, in place of `SlabFiles`: each is a slab."""

    fds = ()

    def __init__(self, frames):
        self.frames = frames

    def read(self, ranges, into):
        for view, each in zip(into, map(Extent.of, ranges), strict=True):
            view[:] = self.bytes_at(each)
        return list(map(len, into))

    def bytes_at(self, extent):
        return self.frames[extent.slab][extent.at : extent.at + extent.nbytes]

    def must_be_ours(self):
        pass

    def facts(self):
        return {}

    def close(self):
        pass


class HostReads:
    """In place of `DeviceReads`: torch copies the frames into the memory of the GPU."""

    def __init__(self, frames, fds, memory):
        self.frames = frames
        torch.as_tensor(memory, device=GpuPages.device).fill_(POISON)

    def read(self, extents, into):
        for memory, each in zip(into, map(self.frames.bytes_at, extents), strict=True):
            torch.as_tensor(memory, device=GpuPages.device).copy_(torch.frombuffer(each, dtype=torch.uint8))
        torch.cuda.synchronize()
        return [Outcome(memory.nbytes) for memory in into]

    def close(self):
        pass


@pytest.mark.parametrize("shape", SHAPES)
def test_frames_read_into_gpu_memory_reach_the_pages_if_they_verify(shape, monkeypatch):
    layout, rng, home, keys = SHAPES[shape], random.Random(shape), make_namespace(), make_keys(3)
    (part,) = layout.parts
    shard = part.shard_of(layout.ranks - 1)
    pages = GpuPages(layout, 3 * max(part.blocks), rng, layout.ranks - 1)
    pages.fill(rng)
    drawn = [rng.sample(range(pages.blocks), 3 * count) for count in part.blocks]
    chunks = [[group[i::3] for group in drawn] for i in range(3)]
    shards = [shard_of(pages, shard, chunk) for chunk in chunks]
    frames = [bytearray(layout.frame_nbytes) for _ in chunks]
    for key, frame, stored in zip(keys, frames, shards, strict=True):
        frame[shard.offset : shard.offset + shard.nbytes] = stored
        seal_part(memoryview(frame), home, key, part)
    places = [StoredFrame("store", Location((i, 0), layout.frame_nbytes), keys[i], home.digest) for i in range(3)]
    files = HostFrames(frames)
    monkeypatch.setattr(device_lane, "DeviceReads", functools.partial(HostReads, files))
    reader = StagedReader(files, pages.kv_cache(), 5.0, lambda *opened: [DeviceLane(*opened, 5.0)])
    assert reader.facts()["read into"] == "the GPU's memory"
    pages.fill(rng)
    before = pages.everything()
    frames[1][shard.offset] ^= 1
    assert outcome(reader, 1, places[1:2], chunks[1:2]) == (False, {keys[1]: ReadStatus.CORRUPT})
    assert pages.everything() == before
    frames[1][shard.offset] ^= 1
    assert outcome(reader, 2, places, chunks) == (True, {})
    assert [shard_of(pages, shard, chunk) for chunk in chunks] == shards
    reader.close()


def outcome(reader, job, frames, chunks):
    reader.load(job, frames, chunks)
    reader.wait([job])
    (ended,) = reader.finished()
    return ended.ok, {key: read.status for key, read in ended.unread.items()}


@pytest.mark.parametrize("method", METHODS)
def test_stores_come_after_the_forward_and_before_the_next(method):
    """A forward that takes long writes the pages; the next, which overwrites them, is enqueued at once."""
    layout = make_layout((64 << 10,) * 8, 16)
    pages = GpuPages(layout, 16, random.Random(0), align=16)
    memory = Slots(layout, 1)
    mover = memory.mover(pages.kv_cache(), method)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for byte in range(5):
        for _ in range(20):
            matrix @ matrix
        for tensor in pages.tensors:
            tensor.fill_(byte)
        mover.store(byte, [[list(range(16))]], [0])
        assert not mover.finished(), "the host waited for the device"
        mover.fence([byte])
        for tensor in pages.tensors:
            tensor.fill_(0xEE)
        assert settle(mover, [byte]) == {byte: True}
        assert memory.view(0)[FRAME_ALIGNMENT:] == bytes([byte]) * layout.payload_nbytes
    mover.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_load_overtakes_kernels_that_the_engine_has_enqueued_after_its_mark(method):
    layout = make_layout((64 << 10,) * 8, 16)
    pages = GpuPages(layout, 16, random.Random(0), align=16)
    mover = Slots(layout, 1).mover(pages.kv_cache(), method)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    mark, computed = mover.mark(), torch.cuda.Event()
    for _ in range(40):
        matrix @ matrix
    computed.record()
    mover.load(1, [0], [[list(range(16))]], mark)
    assert settle(mover, [1]) == {1: True}
    assert not computed.query()
    mover.close()


def test_a_refused_copy_is_not_an_error_of_the_engine():
    """A failed registration once made the next launch of torch's raise."""
    device, memory = load().device(0), mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    device.lock(address, 1 << 20)
    with pytest.raises(BackendError, match=r"^CUDA cannot page-lock memory: .* \(CUDA_ERROR_.*, 712\)$"):
        device.lock(address, 1 << 20)
    with pytest.raises(BackendError, match="^CUDA cannot release page-locked memory: "):
        device.unlock(address + 4096)
    torch.zeros(1000, device="cuda").add_(1)
    torch.cuda.synchronize()
    device.unlock(address)


def test_a_graph_is_replayed_while_slots_are_page_locked():
    """As an engine does that captured its graphs before the arena was attached."""
    number = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number += 1
    layout = make_layout((64 << 10,) * 8, 16)
    memory, cache = Slots(layout, 128), GpuPages(layout, 16, random.Random(0), align=16).kv_cache()
    mover = open_mover(cache, memory.memory, memory.nbytes, autotune=decided(Method.DIRECT))
    whole, locked = mover.facts()["page-locked"].split(" -> ")
    assert locked != whole, "all was locked at once; nothing was tested"
    replays = 0
    while (locked := mover.facts()["page-locked"]) != f"{whole} -> {whole}":
        assert "(" not in locked, locked
        graph.replay()
        replays += 1
    torch.cuda.synchronize()
    assert number.item() == replays
    mover.close()


MODELS = {
    "Llama-3.1-8B": make_layout((64 << 10,) * 32, 16),
    "Llama-3.1-70B, one of 8 ranks": make_layout((8 << 10,) * 80, 16),
    "DeepSeek MLA": make_layout((18432,) * 61, 16),
}


@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_a_stack_come_back(model):
    layout, rng = MODELS[model], random.Random(model)
    chunks = 4
    config = load_config(
        {"version": 1, "chunk_tokens": 256, "tiers": [{"type": "cpu", "capacity": "256MiB"}]}, Registry.of(plugin)
    )
    manager = open_stack(config, make_context(layout=layout))
    blocks = chunks * layout.parts[0].blocks[0]
    pages, other = (GpuPages(layout, blocks, rng, align=16) for _ in range(2))
    for tensor in pages.tensors:
        tensor.random_()
    movers = [
        config.arenas[0].config.attach(next(iter(manager.handles.values())), each.kv_cache()) for each in (pages, other)
    ]
    held = [[list(row)] for row in torch.randperm(blocks).view(chunks, -1).tolist()]
    keys = make_keys(chunks)
    slots = [slot.index for slot in manager.reserve(keys, "store").values()]
    movers[0].store(1, held, slots)
    assert settle(movers[0], [1]) == {1: True}
    manager.commit("store")
    pinned = manager.lookup(keys, "request").slots
    assert len(pinned) == chunks
    movers[1].load(2, [slot.index for slot in pinned], held)
    assert settle(movers[1], [2]) == {2: True}
    manager.release("request")
    shard = layout.parts[0].shard_of(0)
    assert [shard_of(other, shard, chunk) for chunk in held] == [shard_of(pages, shard, chunk) for chunk in held]
    for mover in movers:
        mover.close()
    manager.close()
