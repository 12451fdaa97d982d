"""Packed slots of a GPU: the kernels make the bytes that the host makes, and the mover says what had no room."""

import ctypes
import random
import struct
import zlib

import attrs
import pytest
from fake_cuda import FakeCuda, libraries
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_kv import HEAD_NBYTES, KV, RAW, TILE, bfloat16, kv, layout_of, values
from test_mover import World

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import NO_BLOCK, JobResult
from kvtier_core.packed_form import HEADER_NBYTES, PackedForm, packed_nbytes
from kvtier_core.transfer.copier import Copier
from kvtier_core.transfer.cuda.checksums import MOST_PACKED
from kvtier_core.transfer.cuda.device_slots import DeviceSlots
from kvtier_core.transfer.packing import pack
from kvtier_testing.samples import make_layout

POISON = 0xA5
UNIT = 256  # to which staged shards are aligned
BLOCKS = 12

# -- the kernels ---------------------------------------------------------------------------------------


class Packing(ctypes.Structure):
    """csrc/cuda/packing.h has it."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("pages", "pages_stride", "pages_nbytes")),
        *((name, ctypes.c_uint64) for name in ("packed", "packed_stride", "packed_nbytes")),
        ("count", ctypes.c_uint32),
    ]


def aligned(nbytes):
    return -(-nbytes // UNIT) * UNIT


class Shards:
    """Shards of one length in both forms, with poison between them."""

    def __init__(self, count, nbytes, room):
        self.nbytes, self.room = nbytes, room
        self._strides = [aligned(nbytes) + UNIT, aligned(room) + UNIT]
        self._memories = [bytearray([POISON]) * (count * stride + UNIT) for stride in self._strides]
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self._memories]
        self._begins = [-address % UNIT for address in addresses]
        pages, packed = (address + begin for address, begin in zip(addresses, self._begins, strict=True))
        self.packing = Packing(pages, self._strides[0], nbytes, packed, self._strides[1], room, count)
        self.flags = (ctypes.c_uint32 * count)()
        self.c = ctypes.CDLL(str(libraries()[1]))

    def pages(self, number):
        return self._view(0, number, self.nbytes)

    def packed(self, number):
        return self._view(1, number, self.room)

    def _view(self, form, number, nbytes):
        begin = self._begins[form] + number * self._strides[form]
        return memoryview(self._memories[form])[begin : begin + nbytes]

    def pack(self, warps):
        self.c.fake_pack(ctypes.byref(self.packing), self.flags, warps)
        return list(self.flags)

    def unpack(self, warps):
        self.flags[0] = 0
        self.c.fake_unpack(ctypes.byref(self.packing), self.flags, warps)
        return not self.flags[0]

    def untouched_between(self):
        return all(
            set(self._view(form, number, stride)[nbytes:]) == {POISON}
            for form, (stride, nbytes) in enumerate(zip(self._strides, (self.nbytes, self.room), strict=True))
            for number in range(len(self.flags))
        )


def on_the_host(payload, room):
    """A shard as the host packs it; None if it has no room."""
    shard = memoryview(bytearray(room))
    return bytes(shard) if pack(memoryview(payload), shard) else None


def packed_alike(payloads, room, warps=5):
    """The kernels leave what the host does, and bring it back. Returns the shards."""
    shards = Shards(len(payloads), len(payloads[0]), room)
    for number, payload in enumerate(payloads):
        shards.pages(number)[:] = payload
    expected = [on_the_host(payload, room) for payload in payloads]
    assert shards.pack(warps) == [each is None for each in expected]
    for number, each in enumerate(expected):
        assert each is None or shards.packed(number) == each
        shards.pages(number)[:] = bytes(shards.nbytes)
    if None not in expected:
        assert shards.unpack(warps)
        assert [bytes(shards.pages(number)) for number in range(len(payloads))] == payloads
    assert shards.untouched_between()
    return shards


@st.composite
def payloads(draw, count, nbytes):
    """Values of KV, some others among them, and tiles of noise."""
    found = []
    for _ in range(count):
        payload = bytearray(kv(nbytes, draw(st.integers(0, 99))))
        places = st.integers(0, max(0, nbytes // 2 - 1))
        for place, value in draw(st.lists(st.tuples(places, st.integers(0, 65535)), max_size=30)):
            payload[2 * place : 2 * place + 2] = struct.pack("<H", value)[: nbytes - 2 * place]
        for tile in draw(st.sets(st.integers(0, nbytes // TILE), max_size=2)):
            noise = random.Random(tile).randbytes(len(payload[tile * TILE :][:TILE]))
            payload[tile * TILE : tile * TILE + len(noise)] = noise
        found.append(bytes(payload))
    return found


@settings(max_examples=80)
@given(st.data(), st.integers(1, 3), st.integers(0, 6 * TILE), st.sampled_from([1, 3, 40]))
def test_shards_of_any_length_are_packed_as_on_the_host(data, count, nbytes, warps):
    packed_alike(data.draw(payloads(count, nbytes)), packed_nbytes(nbytes) or 4096, warps)


@pytest.mark.parametrize("escapes", [0, 1, 8, 9, 10, 2000])
@pytest.mark.parametrize("n", [128, 1920, 2048])
def test_escapes_of_a_tile_are_listed_in_the_same_order(escapes, n):
    for seed in range(10):
        rng = random.Random(seed)
        far = [rng.choice((bfloat16(1e-9), bfloat16(-1e-20))) for _ in range(min(escapes, n))]
        tile = far + [bfloat16(rng.uniform(1, 2)) for _ in range(n - len(far))]
        rng.shuffle(tile)
        shards = packed_alike([values(*tile)], 8192)
        assert shards.packed(0)[HEADER_NBYTES + 2] == (escapes if escapes < 10 else RAW)


def test_every_value_is_packed_as_on_the_host():
    """Each exponent as the highest of its tile, below it all others, rare or frequent, and zeros."""
    tiles = []
    for exponent in range(256):
        lower = [each << 7 | 5 for each in range(exponent)] * (exponent % 3)
        tile = [sign << 15 | exponent << 7 | mantissa for sign in (0, 1) for mantissa in range(128)] + lower[:1700]
        tiles.append(values(*tile, *([0] * (2048 - len(tile)))))
    packed_alike(tiles, 8192)


@pytest.mark.parametrize("raw", [15, 16, 19, 30])
def test_raw_tiles_have_the_same_room_as_on_the_host(raw):
    """Of the last tile a part: its end is shorter."""
    nbytes, noise = 300 * TILE - 256, random.Random(0).randbytes(300 * TILE)
    places = sorted(random.Random(raw).sample(range(299), raw - 1))
    payload = bytearray(kv(nbytes))
    for place in (*places, 299):
        payload[place * TILE : (place + 1) * TILE] = noise[place * TILE : min((place + 1) * TILE, nbytes)]
    shards = packed_alike([bytes(payload), kv(nbytes)], packed_nbytes(nbytes), warps=64)
    packed_alike([bytes(payload), kv(nbytes)], PackedForm.of(nbytes).ends + 15 * 1024 - 64, warps=64)
    assert list(shards.flags) == [raw == 30, 0]


def host_scatters(shards, number):
    """What the host makes of a packed shard; None if it was not packed."""
    pages = bytearray(shards.nbytes)
    layers = [(ctypes.addressof(ctypes.c_char.from_buffer(pages)), shards.nbytes, shards.nbytes, 0, 0, 1)]
    shard = ctypes.addressof(ctypes.c_char.from_buffer(shards.packed(number)))
    return bytes(pages) if Copier(layers, shard, shards.room, shards.room).scatter([[0]], [0]) else None


def unpacked_alike(shards):
    """The kernel notices what the host notices, touches nothing beyond, and else brings the same back."""
    expected = host_scatters(shards, 0)
    assert shards.unpack(5) == (expected is not None)
    assert expected is None or shards.pages(0) == expected
    assert shards.untouched_between()


@pytest.mark.parametrize("seed", range(20))
def test_of_harmed_shards_the_same_is_noticed(seed):
    rng = random.Random(seed)
    shards = packed_alike([KV[: 2 * TILE] + rng.randbytes(TILE) + KV[:701]], packed_nbytes(3 * TILE + 701))
    good = bytes(shards.packed(0))
    for _ in range(50):
        shards.packed(0)[:] = good
        for _ in range(rng.choice((1, 1, 2, 50))):  # most of it in what decides
            place = rng.randrange(rng.choice((16, HEADER_NBYTES + 4 * HEAD_NBYTES, len(good))))
            shards.packed(0)[place] = rng.choice((0, 1, 9, 10, 255))
        unpacked_alike(shards)


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=2, max_size=2), st.integers(0, 9))
def test_any_heads_are_taken_as_on_the_host(heads, seed):
    shards = packed_alike([kv(TILE + 256, seed)], 8192)
    shards.packed(0)[HEADER_NBYTES:][: 2 * HEAD_NBYTES] = b"".join(heads)
    unpacked_alike(shards)


@pytest.mark.parametrize(
    "head",
    [
        bytes([112, 112, 10]),
        bytes([112, 112, 254]),
        struct.pack("<BBBHB", 112, 112, 1, 127, 5),
        struct.pack("<BBBHB", 112, 112, 1, 128, 5),
        struct.pack("<BBBHB", 112, 112, 1, 65535, 5),
        bytes([0, 0, RAW, 0]),
        bytes([0, 0, RAW, 1]),
    ],
)
def test_a_head_that_tells_what_cannot_be_is_noticed(head):
    """Of a last tile of 128 values, behind a whole one."""
    shards = packed_alike([kv(TILE + 256)], 8192)
    shards.packed(0)[HEADER_NBYTES + HEAD_NBYTES :][:HEAD_NBYTES] = head.ljust(HEAD_NBYTES, b"\0")
    unpacked_alike(shards)


def test_a_shard_of_raw_tiles_without_ends_is_read_no_further():
    shards = packed_alike([KV[: 5 * TILE]], PackedForm.of(5 * TILE).ends)
    for tile in range(5):
        shards.packed(0)[HEADER_NBYTES + tile * HEAD_NBYTES :][:7] = bytes([0, 0, RAW, tile, 0, 0, 0])
    unpacked_alike(shards)


# -- stores and loads ----------------------------------------------------------------------------------


class Sides:
    """Pages of KV, and slots in two memories: a mover on the host fills one, one on a device the other.

    Pages of the blocks in ``noisy`` do not pack. A half of the staging memory has room for ``together`` shards.
    """

    def __init__(self, layout, cuda, *, together=1, rank=0, gaps=None, seed=0, slots=3, noisy=()):
        self.world = World(layout, rank=rank, gaps=gaps, seed=seed, slots=slots, blocks=BLOCKS)
        self.cuda = cuda
        for number, page in enumerate(self.pages()):
            page[:] = random.Random(number).randbytes(len(page)) if number % BLOCKS in noisy else kv(len(page), number)
        self.slots = bytearray(self.world.slots)
        self.shard = layout.parts[0].shard_of(rank)
        half_nbytes = int(together * (aligned(self.shard.pages_nbytes) + aligned(self.shard.nbytes)))
        self.mover = cuda.mover(self.world, memory=memoryview(self.slots), half_nbytes=half_nbytes)

    def pages(self, blocks=range(BLOCKS)):
        """The pages of these blocks, layer after layer."""
        view = memoryview(self.world.pages)
        for start, run in zip(self.world.starts, self.world.kv_cache.layers, strict=True):
            yield from (view[start + block * run.stride :][: run.nbytes] for block in blocks)

    def packed(self, slot):
        return self._in(self.slots, slot)

    def packed_by_host(self, slot):
        return self._in(self.world.slots, slot)

    def _in(self, memory, slot):
        begin = slot * self.world.layout.frame_nbytes + self.shard.offset
        return memoryview(memory)[begin : begin + self.shard.nbytes]

    def ended(self):
        self.cuda.finish()
        (found,) = self.mover.finished()
        return found

    def host(self, begin):
        """What becomes of a job on the host."""
        begin(self.world.mover)
        self.world.mover.wait([1])
        (found,) = self.world.mover.finished()
        return found

    def close(self):
        self.mover.close()
        self.world.mover.close()
        self.cuda.assert_all_returned()


SIZES = st.lists(st.sampled_from([2, 100, 4096, 4352, 8192]), min_size=1, max_size=3)


@settings(max_examples=150)
@given(SIZES, st.integers(0, 1 << 30), st.integers(1, 2), st.sampled_from([1, 2, 2.9, 9]), st.integers(0, BLOCKS))
def test_jobs_leave_what_those_of_the_host_leave(sizes, seed, ranks, together, noisy):
    """Pages of any length, not wanted, noisy; chunks in slices; whatever the streams do first."""
    rng = random.Random(seed)
    layout = layout_of(tuple(sizes), blocks=rng.randint(1, 4), ranks=ranks)
    shape = {"rank": rng.randrange(ranks), "gaps": [rng.choice((0, 1, 64)) for _ in sizes], "seed": seed}
    sides = Sides(layout, FakeCuda(deferred=True, seed=seed), together=together, noisy={noisy}, **shape)
    drawn = [rng.choice((block, block, block, NO_BLOCK)) for block in rng.sample(range(BLOCKS), BLOCKS)]
    (blocks,) = layout.parts[0].blocks
    chunks, slots = [[drawn[i * blocks :][:blocks]] for i in range(3)], rng.sample(range(3), 3)
    pages = bytes(sides.world.pages)

    sides.mover.store(1, chunks, slots)
    expected, found = sides.host(lambda mover: mover.store(1, chunks, slots)), sides.ended()
    assert found == expected._replace(checksums=tuple(expected.checksums), filled=tuple(expected.filled))
    filled = list(found.filled) if not found.ok else [0, 1, 2]
    for place in {0, 1, 2} - set(filled):  # anything lies there
        sides.packed(slots[place])[:] = sides.packed_by_host(slots[place])
    assert sides.slots == sides.world.slots and sides.world.pages == pages

    job = [slots[place] for place in filled], [chunks[place] for place in filled]
    for page in sides.pages():
        page[:] = bytes([POISON]) * len(page)
    poisoned = bytes(sides.world.pages)
    sides.mover.load(1, *job)
    assert sides.ended() == JobResult(1, True)
    loaded, sides.world.pages[:] = bytes(sides.world.pages), poisoned
    assert sides.host(lambda mover: mover.load(1, *job)).ok
    assert sides.world.pages == loaded
    sides.close()


LAYOUT = layout_of((4096, 2048), blocks=4, ranks=2)
CHUNK = [[0, 1, 2, 3]]


def test_a_chunk_without_room_leaves_the_others():
    sides = Sides(LAYOUT, FakeCuda(deferred=True), noisy=range(4, 8))
    assert not sides.mover.store(1, [CHUNK, [[4, 5, 6, 7]], [[3, 2, 1, 0]]], [2, 0, 1])
    assert sides.ended() == JobResult(1, False, (), (0, 2))
    for slot, row in ((2, [0, 1, 2, 3]), (1, [3, 2, 1, 0])):
        assert sides.packed(slot) == on_the_host(b"".join(sides.pages(row)), sides.shard.nbytes)
    sides.close()


def test_a_store_of_which_some_slots_are_not_locked_says_which_had_room(monkeypatch):
    world = World(layout_of((4096,), blocks=2), slots=5)
    sides = Sides(world.layout, FakeCuda(), slots=5, noisy=(2, 3))
    partly = sides.mover._slots.locked
    partly.end = sides.mover._slots.address + 4 * world.layout.frame_nbytes - 1
    sides.mover.store(1, [[[0, 1]], [[4, 5]], [[2, 3]], [[6, 7]]], [2, 4, 1, 0])
    assert sides.ended() == JobResult(1, False, (), (0, 3))
    sides.close()


@pytest.mark.parametrize("harm", [0, HEADER_NBYTES + 2])
def test_a_load_of_what_is_not_packed_fails_and_the_next_does_not(harm):
    sides = Sides(LAYOUT, FakeCuda(deferred=True))
    sides.mover.store(1, [CHUNK, CHUNK], [0, 1])
    assert sides.ended().ok
    sides.packed(0)[harm] ^= 0x7F
    for slots, ok in (([1, 0], False), ([1], True)):
        sides.mover.load(1, slots, [CHUNK, [[4, 5, 6, 7]]][: len(slots)])
        assert sides.ended() == JobResult(1, ok)
    sides.close()


def test_the_checksums_are_those_of_packed_shards():
    sides = Sides(LAYOUT, FakeCuda(deferred=True), rank=1)
    sides.mover.store(1, [CHUNK, [[NO_BLOCK, 5, NO_BLOCK, 7]]], [2, 0])
    assert sides.ended() == JobResult(1, True, tuple(zlib.crc32(sides.packed(slot)) for slot in (2, 0)))
    sides.close()


def test_a_device_that_sums_wrongly_still_says_what_has_no_room(caplog):
    cuda = FakeCuda(deferred=True)
    cuda.c.fake_sum_at_once()
    sides = Sides(LAYOUT, cuda, noisy=range(4, 8))
    for _ in range(2):
        sides.mover.store(1, [CHUNK, [[4, 5, 6, 7]]], [2, 0])
        assert sides.ended() == JobResult(1, False, (), (0,))
    assert "the host computes them" in caplog.text
    sides.mover.store(1, [CHUNK], [2])
    assert sides.ended() == JobResult(1, True)
    sides.close()


def test_of_a_long_store_as_many_are_filled_as_have_flags():
    layout = layout_of((256,), blocks=1)
    count = MOST_PACKED + 2
    sides = Sides(layout, FakeCuda(), slots=count, together=99)
    sides.mover.store(1, [[[number % 8]] for number in range(count)], list(range(count)))
    assert sides.ended() == JobResult(1, False, (), tuple(range(MOST_PACKED)))
    sides.close()


def test_without_a_place_for_its_flags_a_job_fails():
    sides = Sides(LAYOUT, FakeCuda(deferred=True))
    before = bytes(sides.slots), bytes(sides.world.pages)
    memory = sides.mover._copiers[0].checksums._memory
    taken = list(iter(lambda: memory.take(1), None))
    sides.mover.store(1, [CHUNK], [0])
    sides.mover.load(2, [1], [CHUNK])
    assert sides.mover.finished() == [JobResult(1, False), JobResult(2, False)]
    assert before == (sides.slots, sides.world.pages)
    memory.give_back(taken.pop())
    sides.mover.store(1, [CHUNK], [0])
    assert sides.ended().ok
    sides.close()


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuMemsetD32Async", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"])
def test_a_job_that_fails_half_way_fills_nothing_and_the_next_is_whole(function):
    cuda = FakeCuda(deferred=True)
    cuda.c.fake_version(12000)
    sides = Sides(LAYOUT, cuda)
    chunks = [CHUNK, [[4, NO_BLOCK, 6, 7]], [[3, 2, 1, 0]]]
    jobs = [lambda: sides.mover.store(1, chunks, [0, 1, 2]), lambda: sides.mover.load(1, [0, 1, 2], chunks)]
    tried = 0
    for begin in jobs:
        calls = cuda.calls(function)
        begin()
        assert sides.ended().ok
        for after in range(cuda.calls(function) - calls):
            cuda.fail(function, after=after, times=1, result=719)
            begin()
            assert sides.ended() == JobResult(1, False)
            begin()
            assert sides.ended().ok
            tried += 1
    assert tried
    sides.close()


def test_a_rank_without_layers_copies_nothing():
    layout = attrs.evolve(layout_of((4096,), blocks=2), ranks=2, stages=((1,), (0,)))
    world = World(make_layout((8,), 1))
    cache = attrs.evolve(world.kv_cache, layers=(), rank=1, layout=layout)
    world.kv_cache, world.layout, world.slots = cache, layout, bytearray(2 * layout.frame_nbytes)
    mover = FakeCuda().mover(world)
    mover.store(1, [[[0, 1]]], [0])
    mover.load(2, [1], [[[0, 1]]])
    assert mover.finished() == [JobResult(1, True), JobResult(2, True)]
    mover.close()


# -- what is refused -----------------------------------------------------------------------------------


def refused(cuda):
    with pytest.raises(BackendError) as caught:
        Sides(LAYOUT, cuda)
    return str(caught.value)


def test_a_half_always_has_room_for_a_shard_in_both_forms():
    sides = Sides(LAYOUT, FakeCuda(), together=0.5)
    sides.mover.store(1, [CHUNK], [1])
    assert sides.ended().ok
    sides.close()


def test_without_kernels_nothing_is_packed():
    cuda = FakeCuda()
    cuda.c.fake_code(0)
    assert refused(cuda).startswith("set packing: off: the GPU has no packing kernels: CUDA cannot load the kernels: ")


@pytest.mark.parametrize("after", range(3))
def test_without_memory_for_it_nothing_is_packed(after):
    cuda = FakeCuda()
    cuda.fail("cuMemAlloc", after=after, times=1, result=2)
    assert refused(cuda) == "set packing: off: the engine left too little GPU memory to pack shards"
    cuda.assert_all_returned()


def test_frames_in_the_memory_of_a_gpu_are_not_unpacked():
    cuda, cache = FakeCuda(), attrs.evolve(World(LAYOUT).kv_cache, device="cuda:0")
    with pytest.raises(BackendError, match="^frames cannot be unpacked in the GPU's memory yet$"):
        DeviceSlots(cache, 2, device=cuda.device(), engine=cuda)
