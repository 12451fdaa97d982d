"""Slots whose shards are packed: movers, frames, and the tiers below an arena that packs."""

from __future__ import annotations

import ctypes
import random
import zlib

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_kv import kv, layout_of
from serializing import LossyConfig, XorConfig

from kvtier_core import native
from kvtier_core.builtin import packed_slots
from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.builtin.packed_slots import OfUnpacked
from kvtier_core.config.open import packs
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import FrameError, header_of, seal_part, shard_checksums_of
from kvtier_core.frames.identity import PACKED, RAW, identity_of, namespace_of_slots
from kvtier_core.interfaces import NO_BLOCK, JobResult
from kvtier_core.layouts import KVStructure
from kvtier_core.packed_form import packed_nbytes
from kvtier_core.transfer.copier import Copier, PlainCopier
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.transfer.packing import bound, pack, plain_pack
from kvtier_testing.samples import PagedBuffer, make_context, make_key, make_namespace

KEY, NAMESPACE = make_key(0), make_namespace()


LAYOUT = layout_of(ranks=2)


# -- room ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 255, 256, 4096, 4097, 100_000, 1 << 20, (32 << 20) + 130])
def test_one_tile_in_sixteen_may_be_raw(nbytes):
    raw = -(-(nbytes // 4096) // 16)
    payload = random.Random(0).randbytes(4096 * raw) + bytes(nbytes - 4096 * raw)
    assert plain_pack(memoryview(payload), memoryview(bytearray(packed_nbytes(nbytes))))
    assert packed_nbytes(nbytes) % 4096 == 0


def test_long_shards_take_four_fifths():
    assert packed_nbytes(32 << 20) < 0.775 * (32 << 20)
    assert packed_nbytes(0) == 0


def test_shards_are_as_long_as_they_are_packed():
    raw, packed = attrs.evolve(LAYOUT, packed=False).parts[0], LAYOUT.parts[0]
    assert [shard.nbytes for shard in packed.shards] == [packed_nbytes(shard.nbytes) for shard in raw.shards]
    assert [shard.pages_nbytes for shard in packed.shards] == [shard.nbytes for shard in raw.shards]
    assert LAYOUT.alone(1).packed


# -- copies --------------------------------------------------------------------------------------------


class Copies:
    """Pages of some layers, with gaps between them, and three slots in random bytes; and a copier of each kind."""

    def __init__(self, sizes, blocks=4, gap=0, seed=0):
        rng = random.Random(seed)
        self.layers = [bytearray(rng.randbytes((nbytes + gap) * 8)) for nbytes in sizes]
        self.places = [
            (memoryview(layer), nbytes, nbytes + gap) for layer, nbytes in zip(self.layers, sizes, strict=True)
        ]
        for page in self.pages(range(8)):
            page[:] = kv(len(page), rng.random())
        self.room = packed_nbytes(sum(sizes) * blocks)
        self.slots = bytearray(rng.randbytes(3 * (self.room + 4096)))
        native_layers, offset = [], 0
        for layer, nbytes, stride in self.places:
            native_layers.append((_address(layer.obj), stride, nbytes, offset, 0, blocks))
            offset += nbytes * blocks
        base = _address(self.slots) + 100
        self.copiers = [kind(native_layers, base, self.room + 4096, self.room) for kind in (Copier, PlainCopier)]

    def pages(self, blocks):
        """The pages of these blocks in every layer."""
        for layer, nbytes, stride in self.places:
            yield from (layer[block * stride :][:nbytes] for block in blocks if block != NO_BLOCK)

    def shard(self, slot):
        return memoryview(self.slots)[100 + slot * (self.room + 4096) :][: self.room]


def _address(buffer):
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@given(
    st.lists(st.sampled_from([2, 100, 4096, 4352, 8192]), min_size=1, max_size=3),
    st.integers(0, 1 << 30),
    st.sampled_from([0, 64]),
)
@settings(max_examples=60)
def test_pages_of_any_length_are_packed_alike_and_come_back(sizes, seed, gap):
    """Tiles begin in one page and end in another; pages that are not wanted are zeros; nothing else is touched."""
    rng, copies = random.Random(seed), Copies(sizes, gap=gap, seed=seed)
    rows = [[rng.choice((block, block, block, NO_BLOCK)) for block in rng.sample(range(8), 4)] for _ in range(2)]
    slots, pages, stored = rng.sample(range(3), 2), list(map(bytes, copies.layers)), []
    for copier in copies.copiers:
        expected = bytearray(copies.slots)
        checksums = copier.gather(rows, slots)
        assert list(checksums) == [zlib.crc32(copies.shard(slot)) for slot in slots]
        for slot in slots:
            begin = 100 + slot * (copies.room + 4096)
            expected[begin : begin + copies.room] = copies.shard(slot)
        assert copies.slots == expected
        assert list(map(bytes, copies.layers)) == pages
        stored.append(expected)
    assert stored[0] == stored[1]
    for copier in copies.copiers:
        for page in copies.pages([*rows[0], *rows[1]]):
            page[:] = rng.randbytes(len(page))
        assert copier.scatter(rows, slots)
        assert list(map(bytes, copies.layers)) == pages


def test_a_shard_without_room_is_missing_and_the_others_are_good():
    copies = Copies([4096, 8192], blocks=8)
    copies.layers[1][: 3 * 8192] = random.Random(0).randbytes(3 * 8192)
    rows = [list(range(8)), [3, 4, 5, 6, 7, 3, 4, 5]]
    results = [list(copier.gather(rows, [0, 2])) for copier in copies.copiers]
    assert results[0] == results[1] == [None, zlib.crc32(copies.shard(2))]


def test_a_shard_that_is_not_packed_is_an_error():
    copies = Copies([4096], blocks=2)
    for copier in copies.copiers:
        assert copier.scatter([[0, 1]], [1]) is False


def test_a_mover_says_which_slots_are_filled_and_which_load_failed():
    layout, rng = layout_of((4096,), blocks=2), random.Random(0)
    pages, memory = PagedBuffer(layout, 4, rng), memoryview(bytearray(2 * layout.frame_nbytes))
    for block in (0, 1):
        pages.put(0, block, kv(4096))
        pages.put(0, block + 2, rng.randbytes(4096))
    mover = HostMover(pages.kv_cache(), memory, layout.frame_nbytes)
    mover.store(1, [[[2, 3]], [[0, 1]]], [0, 1])
    mover.load(2, [0], [[[2, 3]]])
    mover.load(3, [1], [[[2, 3]]])
    mover.wait([2, 3])
    assert list(mover.finished()) == [JobResult(1, False, (), [1]), JobResult(2, False, (), []), JobResult(3, True)]
    assert pages.page(0, 2) == pages.page(0, 0)
    mover.close()


# -- frames --------------------------------------------------------------------------------------------


def slot(layout=LAYOUT, key=KEY):
    """A chunk in the slot of an arena that packs, or not."""
    view = memoryview(bytearray(layout.frame_nbytes))
    (part,) = layout.parts
    for number, shard in enumerate(part.shards):
        into, pages = view[shard.offset : shard.offset + shard.nbytes], kv(shard.pages_nbytes, number)
        if layout.packed:
            assert pack(memoryview(pages), into)
        else:
            into[:] = pages
    seal_part(view, namespace_of_slots(NAMESPACE, layout), key, part, codec=PACKED if layout.packed else RAW)
    return view


def codec_of(config=None, layout=LAYOUT, **kwargs):
    if config is None:
        return FrameCodec(NAMESPACE, layout, **kwargs)
    unpacked = attrs.evolve(layout, packed=False)
    serializer = OfUnpacked(config.open(make_context(layout=unpacked)), unpacked)
    return FrameCodec(NAMESPACE, layout, serializer, identity_of(config, packed=True), **kwargs)


def read(codec, stored, layout=LAYOUT):
    view = memoryview(bytearray(layout.frame_nbytes))
    return codec.decode_verified(KEY, memoryview(bytearray(stored)), len(stored), view), view


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_frames_are_stored_as_the_slot_has_them_and_say_so(shared):
    view = slot()
    codec = codec_of(shared=shared)
    stored = codec.encode(KEY, view)
    assert stored.obj is view.obj and header_of(stored).codec == PACKED
    assert str(header_of(stored).codec) == "packed shards"
    assert len(shard_checksums_of(stored)) == 2
    assert read(codec, stored)[0] is None


def test_an_arena_that_does_not_pack_serves_no_packed_frame_nor_the_other_way_round():
    raw = attrs.evolve(LAYOUT, packed=False)
    assert read(codec_of(layout=raw), codec_of().encode(KEY, slot()), raw)[0] is FrameError.NAMESPACE
    assert read(codec_of(), codec_of(layout=raw).encode(KEY, slot(raw)), raw)[0] is FrameError.NAMESPACE
    view = slot()
    seal_part(view, namespace_of_slots(NAMESPACE, LAYOUT), KEY, LAYOUT.parts[0], codec=RAW)
    assert read(codec_of(), view)[0] is FrameError.CODEC and FrameError.CODEC.incompatible
    shared = {codec_of(layout=layout, shared=True).namespace.digest for layout in (LAYOUT, raw)}
    assert len(shared) == 2, "in a shared store they would overwrite each other's frames"


@pytest.mark.parametrize("config", [XorConfig(mask=5), PackedConfig()], ids=["xor", "packed"])
def test_a_serializer_below_encodes_what_was_packed(config):
    """It knows nothing of that, and its frames are none of those of an arena that does not pack."""
    view = slot()
    codec = codec_of(config)
    stored = bytes(codec.encode(KEY, view))
    error, back = read(codec, stored)
    assert error is None and back == view
    plain = FrameCodec(NAMESPACE, attrs.evolve(LAYOUT, packed=False), config.open(make_context()), identity_of(config))
    assert plain.identity != codec.identity
    pages = b"".join(kv(shard.pages_nbytes, number) for number, shard in enumerate(LAYOUT.parts[0].shards))
    alone = memoryview(bytearray(bound(len(pages))))
    nbytes = config.open(make_context(layout=attrs.evolve(LAYOUT, packed=False))).encode(memoryview(pages), alone)
    assert stored[4096 : 4096 + nbytes] == alone[:nbytes]


def test_a_slot_decoded_by_a_lossy_serializer_is_marked():
    codec = codec_of(LossyConfig())
    error, back = read(codec, bytes(codec.encode(KEY, slot())))
    assert error is None
    assert str(header_of(back).codec) == "packed shards after a lossy codec"


class Random(XorConfig):
    """Decodes to what does not pack."""

    type = "random"

    def open(self, ctx):
        opened = super().open(ctx)
        opened.decode = lambda encoded, into: (
            into.__setitem__(slice(None), random.Random(0).randbytes(len(into))) or len(into)
        )
        return opened


def test_a_payload_that_cannot_be_packed_again_is_not_served():
    codec = codec_of(Random(mask=0))
    assert read(codec, bytes(codec.encode(KEY, slot())))[0] is FrameError.UNDECODABLE


@given(st.binary(max_size=60))
def test_lengths_of_shards_are_not_believed(garbage):
    serializer = OfUnpacked(XorConfig().open(make_context()), attrs.evolve(LAYOUT, packed=False))
    with pytest.raises(BackendError):
        serializer.decode(memoryview(garbage), memoryview(bytearray(LAYOUT.payload_nbytes)))


# -- when ----------------------------------------------------------------------------------------------


def test_kv_in_bfloat16_is_worth_it():
    assert packed_slots.why_not(layout_of(packed=False)) == ""


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (layout_of(dtype="float16"), "not all KV is in bfloat16"),
        (layout_of(dtype="bfloat16 float32"), "not all KV is in bfloat16"),
        (layout_of(structure=KVStructure.OPAQUE), "not all KV is in bfloat16"),
        (layout_of((256,), blocks=1, packed=False), "chunks are too short to gain from it"),
    ],
)
def test_other_kv_is_not(layout, why):
    assert packed_slots.why_not(attrs.evolve(layout, packed=False)) == why


def test_without_fast_instructions_it_is_not(monkeypatch):
    monkeypatch.setattr(native, "extension", None)
    assert "cannot pack as fast as it copies" in packed_slots.why_not(layout_of(packed=False))


@attrs.frozen
class ThirdParty(HeapConfig):
    """An arena whose author has not heard of packing."""

    packs = ()


@attrs.frozen
class Tier:
    config: HeapConfig
    packing: str


@attrs.frozen
class Stack:
    arenas: list[Tier]


@pytest.mark.parametrize(
    ("tiers", "packed"),
    [
        ([Tier(HeapConfig(), "auto")], True),
        ([Tier(HeapConfig(), "off")], False),
        ([Tier(ThirdParty(), "auto")], False),
        ([Tier(HeapConfig(), "auto"), Tier(HeapConfig(), "off")], False),
    ],
)
def test_all_arenas_pack_or_none(tiers, packed):
    assert packs(Stack(tiers), "cpu") is packed
    assert packs(Stack(tiers), "cuda") is False
